"""A user's mistake is one clear sentence, an exit code, and nothing half-written."""

import json
import re
import shutil

import numpy as np
import pytest

import dia_lora
from common.ds_config import resolve_ds
from common.errors import UserError
from common.tokens import TokenDataset
from helpers import support
from helpers.dia_support import SMALL, poison_letter_q


@pytest.fixture(scope="module")
def ranks(only_rank):
    return only_rank


@pytest.fixture
def attempt(demo, ranks, tmp_path):
    """Trains in this process with these changes to a good configuration; returns the sentence it is refused with."""

    def run(**changes) -> str:
        assets = {"model": str(demo / "dia"), "data": str(demo / "tokens/train"), "out": str(tmp_path / "run")}
        config = dia_lora.Config(**{**SMALL, **assets, "accumulation": 1, **changes})
        with pytest.raises(UserError) as error:
            dia_lora.train(config, ranks, resolve_ds(config.ds, config, 1))
        sentence = str(error.value)
        assert "\n" not in sentence and len(sentence) < 400
        assert not (tmp_path / "run" / "export").exists()
        return sentence

    return run


@pytest.fixture
def clips(demo):
    tokens = TokenDataset(str(demo / "tokens/train"))
    return [{"id": tokens.id(i), "text": tokens.text(i), "codes": np.array(tokens.codes(i))} for i in range(8)]


def test_dataset_of_another_codec(attempt, clips, tmp_path):
    data = support.write_tokens(tmp_path / "tokens", clips, codec="encodec")
    assert re.search("codec has name = 'encodec' but --model .* needs 'dac'", attempt(data=str(data)))


def test_dataset_with_other_channels(attempt, clips, tmp_path):
    stereo = [clip | {"codes": np.concatenate([clip["codes"]] * 2, axis=1)} for clip in clips]
    data = support.write_tokens(tmp_path / "tokens", stereo, channels=18)
    assert "channels = 18 but the model needs 9" in attempt(data=str(data))


def test_code_1024_in_a_clip(attempt, clips, tmp_path):
    clips[3]["codes"][7, 2] = 1024
    data = support.write_tokens(tmp_path / "tokens", clips)
    sentence = attempt(data=str(data))
    assert clips[3]["id"] in sentence and "1024" in sentence


def test_over_long_text(attempt, clips, tmp_path):
    clips[2]["text"] = "[S1] " + "ü" * 600
    data = support.write_tokens(tmp_path / "tokens", clips)
    sentence = attempt(data=str(data))
    assert clips[2]["id"] in sentence and "1202 bytes" in sentence and "1024" in sentence


def test_missing_text(attempt, clips, tmp_path):
    clips[4]["text"] = ""
    data = support.write_tokens(tmp_path / "tokens", clips)
    assert f"clip {clips[4]['id']!r} has no text" in attempt(data=str(data))


def test_no_dataset(attempt, tmp_path):
    assert "is not a token dataset" in attempt(data=str(tmp_path))


def test_damaged_dataset(attempt, clips, tmp_path):
    data = support.write_tokens(tmp_path / "tokens", clips)
    [file] = data.glob("*.arrow")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert "its checksum is not dataset.json's" in attempt(data=str(data))
    file.write_bytes(content[:-8])
    assert "the dataset is incomplete" in attempt(data=str(data))


def test_unknown_lora_group(attempt):
    assert "unknown LoRA group 'dec_croos'" in attempt(lora_groups=["dec_self", "dec_croos"])


def test_missing_model(attempt, tmp_path):
    assert "--model" in attempt(model=str(tmp_path / "nothing"))


def test_model_of_another_kind(attempt, demo):
    assert "not 'dia'" in attempt(model=str(demo / "codec"))


def test_quantised_base_under_zero3(attempt):
    assert "--quantize 4bit needs ZeRO-2" in attempt(quantize="4bit", ds="ds_configs/zero3.json")


def test_micro_tokens_below_the_longest_clip(attempt):
    assert "--micro-tokens 50 is below the longest clip" in attempt(micro_tokens=50)


def test_endless_nan_stops_with_the_clips_named_and_the_checkpoint_kept(attempt, demo, clips, tmp_path):
    model = poison_letter_q(demo / "dia", tmp_path / "dia")
    for clip in clips:
        clip["text"] = "[S1] q"
    data = support.write_tokens(tmp_path / "tokens", clips)
    sentence = attempt(model=str(model), data=str(data), text_dropout=0.0, save_every=1, steps=9)
    assert "3 steps in a row were not finite" in sentence and any(clip["id"] in sentence for clip in clips)


def run_command(*arguments) -> tuple[int, str]:
    [code], [output] = support.run_recipe(*arguments, world=1)
    return code, output


def assert_one_sentence(code: int, output: str, *parts: str) -> None:
    assert code == 2, output
    lines = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in output
    assert all(part in lines[0] for part in parts), lines[0]


@pytest.mark.parametrize("lr", ["0", "1e-12", "10"])
def test_senseless_learning_rate(lr):
    assert_one_sentence(*run_command("--lr", lr), f"--lr {float(lr)} is out of range")


def test_missing_ds_file(tmp_path):
    assert_one_sentence(*run_command("--ds", "nowhere.json", "--out", tmp_path / "run"), "nowhere.json")
    assert not (tmp_path / "run").exists()


def test_malformed_ds_json(tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text('{"zero_optimization": {"stage": 2}')
    assert_one_sentence(*run_command("--ds", broken, "--out", tmp_path / "run"), "broken.json", "not valid JSON")
    assert not (tmp_path / "run").exists()


def test_ds_json_that_contradicts_a_flag(tmp_path):
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 8}))
    result = run_command("--ds", other, "--accumulation", "4", "--out", tmp_path / "run")
    assert_one_sentence(*result, "gradient_accumulation_steps", "8", "--accumulation 4")


def test_local_model_without_weights_is_refused_without_the_network(attempt, demo, tmp_path):
    folder = tmp_path / "dia"
    shutil.copytree(demo / "dia", folder)
    (folder / "model.safetensors").unlink()
    assert "--model" in attempt(model=str(folder))
