"""data/demo.py: the demo is complete and deterministic, and loads with plain transformers."""

import json
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
import soundfile

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Of two processes at once, like two ranks, one builds and the other waits."""
    out = tmp_path_factory.mktemp("demo") / "demo"
    command = [sys.executable, ROOT / "data/demo.py", "--out", out]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    output = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("clips synthesised" in text for text in output) == 1
    return out


def test_corpus(built):
    out = built
    texts = {}
    for split, count in (("train", 64), ("eval", 8)):
        files = sorted((out / "audio" / split).glob("*.wav"))
        assert len(files) == count
        texts[split] = [file.with_suffix(".txt").read_text().strip() for file in files]
        for file in files:
            wave, rate = soundfile.read(file, always_2d=True)
            assert rate == 44100 and wave.shape[1] == 1 and 0.5 < len(wave) / rate < 2.3
    assert not set(texts["train"]) & set(texts["eval"])
    words = {split: set(" ".join(lines).split()) for split, lines in texts.items()}
    assert words["eval"] <= words["train"]
    assert all(text.startswith("[S1] ") for lines in texts.values() for text in lines)


def test_tokens(built):
    out = built
    for split, count in (("train", 64), ("eval", 8)):
        data = datasets.load_from_disk(str(out / "tokens" / split)).with_format("numpy")
        info = json.loads((out / "tokens" / split / "dataset.json").read_text())
        assert len(data) == count == info["rows"]
        assert info["weights"] == str(out / "codec")
        assert len(set(data["speaker"])) == 4 and set(data["split"]) == {split}
        for row in data:
            assert row["codes"].size == row["frames"] * 9 and 0 <= row["codes"].min() <= row["codes"].max() < 1024


def test_no_trace_of_the_temporary_folder(built):
    out = built
    assert {path.name for path in out.parent.iterdir()} == {"demo", "demo.lock"}
    for file in out.rglob("*.json*"):
        assert "demo.tmp" not in file.read_text(), file


def test_model_and_processor_load(built):
    import torch
    from transformers import DiaForConditionalGeneration, DiaProcessor

    out = built
    model = DiaForConditionalGeneration.from_pretrained(out / "dia")
    processor = DiaProcessor.from_pretrained(out / "dia")
    inputs = processor(text=["[S1] bada gumi"], return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=40, do_sample=False, guidance_scale=None)
    assert ids.shape[0] == 1 and ids.shape[2] == 9
    config = model.config.decoder_config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id, config.vocab_size) == (
        1026,
        1024,
        1025,
        1028,
    )
    assert model.config.delay_pattern == [0, 8, 9, 10, 11, 12, 13, 14, 15]
    assert model.generation_config.temperature == 1.8 and model.generation_config.max_length == 3072


def test_finished_demo_is_reused_without_torch(built):
    code = "import sys; sys.path.insert(0, 'data'); from pathlib import Path; import demo; "
    code += f"demo.ensure_demo(Path({str(built)!r})); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.long
def test_same_bytes_again_and_a_changed_key_rebuilds(built, tmp_path):
    import demo

    out = tmp_path / "again"
    demo.ensure_demo(out)
    for name in (
        "codec/model.safetensors",
        "dia/model.safetensors",
        "tokens/train/data-00000-of-00001.arrow",
    ):
        assert (out / name).read_bytes() == (built / name).read_bytes(), name
    stamp = (out / "demo.json").stat().st_ino
    (out / "demo.json").write_text('{"key": "older code"}')
    demo.ensure_demo(out)
    assert (out / "demo.json").stat().st_ino != stamp
    assert np.array_equal(*(soundfile.read(d / "audio/eval/ada_000.wav")[0] for d in (out, built)))


def test_every_file_in_demos_is_a_model():
    import demo

    assert demo.find_models() == ["clone", "dia", "higgs", "mot", "pairs", "speech"]


def test_foreign_folder_is_refused(script, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("do not delete")
    code, _, err = script("demo", "--out", tmp_path / "mine")
    assert code == 2 and "not a demo folder" in err and (tmp_path / "mine/thesis.txt").exists()
