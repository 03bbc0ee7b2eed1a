"""./launch.sh inspect: what is shown is what plain formulas and the libraries' own models give, for every recipe."""

import json

import numpy as np
import pytest
import torch
from datasets import load_from_disk
from torch.nn import functional as F

from common import inspection
from common.ds_config import WHOLE
from common.errors import UserError
from helpers import support
from infer import inspect_clip

IGNORE = -100


def inspect(*words) -> dict:
    """The sections by title."""
    sections = inspect_clip.inspect(inspect_clip.parse_args([str(word) for word in words]))
    return {section.title: section for section in sections}


def column(table, name: str) -> list[str]:
    return [row[table.header.index(name)] for row in table.rows]


def fact(sections: dict, name: str) -> str:
    return dict(sections["Clip"].rows)[name]


def assert_codes(sections: dict, labels: np.ndarray, logits: list[np.ndarray], names: dict) -> None:
    """Labels, masks, predictions, loss and accuracy are these; logits: (P, ids) for each column."""
    shown = np.array(sections["Labels"].rows)[:, 1:]
    is_masked = np.char.startswith(shown, "-")
    assert np.array_equal(is_masked, labels == IGNORE)
    expected = np.vectorize(lambda i: names.get(i, str(i)))(labels)
    assert np.array_equal(shown[~is_masked], expected[~is_masked])
    best = np.stack([table.argmax(-1) for table in logits], axis=1)
    predicted = np.array(sections["Predictions"].rows)[:, 1:-1]
    assert (predicted[is_masked] == "").all()
    marks = np.where(best == labels, "*", "")
    expected = np.char.add(np.vectorize(lambda i: names.get(i, str(i)))(best), marks)
    assert np.array_equal(predicted[~is_masked], expected[~is_masked])
    means, right = [], []
    for c, table in enumerate(logits):
        wanted = torch.tensor(labels[:, c])
        means.append(F.cross_entropy(torch.tensor(table), wanted, ignore_index=IGNORE).item())
        right.append(np.mean((best == labels)[:, c][~is_masked[:, c]]))
    loss, width = sections["Loss"], labels.shape[1]  # parts of the loss that are no label column come after these
    assert [float(value) for value in column(loss, "loss")][:width] == pytest.approx(means, abs=1e-4)
    assert column(loss, "right")[:width] == [f"{100 * share:.0f} %" for share in right]
    assert column(loss, "targets")[:width] == [str(n) for n in (~is_masked).sum(0)]
    reasons = [name for name in loss.header if name.startswith("-")]
    for c in range(labels.shape[1]):
        counted = sum(int(column(loss, reason)[c]) for reason in reasons)
        assert counted == is_masked[:, c].sum(), "every masked label has a reason"


# ---- Dia -------------------------------------------------------------------------------------------------------


def dia_layout(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels of a whole clip, written out cell by cell."""
    delays, bos, eos, pad = [0, *range(8, 16)], 1026, 1024, 1025

    def cell(t: int, c: int) -> int:
        t -= delays[c] + 1
        return bos if t < 0 else codes[t, c] if t < len(codes) else eos if t == len(codes) else pad

    length = len(codes) + 16
    stream = np.array([[cell(t, c) for c in range(9)] for t in range(length + 1)])
    labels = stream[1:].copy()
    labels[(labels == bos) | (labels == pad)] = IGNORE
    return stream[:-1], labels


def dia_logits(model, text: str, inputs: np.ndarray) -> list[np.ndarray]:
    ids = torch.tensor([list(text.replace("[S1]", "\x01").replace("[S2]", "\x02").encode())])
    with torch.no_grad():
        output = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            decoder_input_ids=torch.tensor(inputs)[None],
            use_cache=False,
        )
    return [*output.logits.numpy()]  # (channels, positions, ids)


DIA_NAMES = {1026: "BOS", 1024: "EOS", 1025: "PAD"}


def read_row(folder, name: str) -> dict:
    [row] = [row for row in load_from_disk(str(folder)) if row["id"] == name]
    return row | {"codes": np.array(row["codes"]).reshape(row["frames"], -1)}


@pytest.mark.parametrize("recipe", ["dia_lora", "dia_full"])
def test_dia_shows_the_librarys_loss_and_predictions(demo, recipe):
    from transformers import DiaForConditionalGeneration

    row = read_row(demo / "tokens/train", "train-ada_004")
    inputs, labels = dia_layout(row["codes"])
    found = inspect("--recipe", recipe, "--model", demo / "dia", "--data", demo / "tokens/train", "--clip", row["id"],
                    "--text-dropout", 0, "--precision", "fp32", "--eos-weight", 3)  # fmt: skip
    shown = np.array(found["Inputs"].rows)[:, 1:]
    assert np.array_equal(shown, np.vectorize(lambda i: DIA_NAMES.get(i, str(i)))(inputs))
    logits = dia_logits(DiaForConditionalGeneration.from_pretrained(demo / "dia").eval(), row["text"], inputs)
    assert_codes(found, labels, logits, DIA_NAMES)
    losses = [F.cross_entropy(torch.tensor(table), torch.tensor(labels[:, c]), reduction="none").numpy()
              for c, table in enumerate(logits)]  # fmt: skip
    weights = np.where(labels.T == 1024, 3, 1) * (labels.T != IGNORE)
    assert float(fact(found, "loss")) == pytest.approx((np.array(losses) * weights).sum() / weights.sum(), abs=1e-4)
    pieces = "".join(piece for _, piece in found["Tokens"].items)
    assert pieces == row["text"] and fact(found, "text") == row["text"]
    # the position's own loss, in the last column
    shown = [float(value) for value in column(found["Predictions"], "loss")]
    assert shown == pytest.approx((np.array(losses) * (weights > 0)).sum(0) / (weights > 0).sum(0), abs=1e-3)


@pytest.fixture(scope="module")
def lora_run(demo, tmp_path_factory):
    """The folder of a dia_lora run whose adapter differs from the base."""
    import dia_lora

    flags = {"model": str(demo / "dia"), "data": str(demo / "tokens/train"), "precision": "fp32", "text_dropout": 0.0}
    model = dia_lora.build_model(dia_lora.Config(**flags), WHOLE, {})
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=draw))
    run = tmp_path_factory.mktemp("lora") / "run"
    model.save_pretrained(str(run / "export"), save_embedding_layers=False)
    (run / "config.json").write_text(json.dumps({"recipe": "dia_lora", "config": flags}))
    (run / "export/training_config.json").write_text(json.dumps(flags | {"recipe": "dia_lora"}))
    return run


def test_a_run_and_its_export_predict_with_their_adapter(demo, lora_run):
    from peft import PeftModel
    from transformers import DiaForConditionalGeneration

    row = read_row(demo / "tokens/train", "train-ada_000")
    inputs, labels = dia_layout(row["codes"])
    base = DiaForConditionalGeneration.from_pretrained(demo / "dia").eval()
    before = dia_logits(base, row["text"], inputs)
    logits = dia_logits(PeftModel.from_pretrained(base, lora_run / "export").eval(), row["text"], inputs)
    assert np.abs(np.array(logits) - np.array(before)).max() > 0.1
    for words in (["--run", lora_run], ["--model", lora_run / "export"]):
        assert_codes(inspect(*words), labels, logits, DIA_NAMES)


def test_a_text_that_is_dropped_in_an_epoch_is_shown_as_dropped(demo):
    words = ["--recipe", "dia_lora", "--data", demo / "tokens/train", "--text-dropout", 1]
    found = inspect(*words)
    assert {number for number, _ in found["Tokens"].items} == {0} and "without text" in found["Tokens"].note
    assert "Predictions" not in found and "loss" not in found["Loss"].header  # without a model: the published layout
    assert "train-ada_000" == fact(found, "id")


def test_a_window_of_a_clip_has_no_end(demo):
    words = ["--recipe", "dia_lora", "--data", demo / "tokens/train", "--text-mode", "tags", "--max-seconds", 0.7]
    found = inspect(*words, "--over-long", "crop", "--epoch", 3)
    labels = np.array(found["Labels"].rows)[:, 1:]
    assert "cut before the end" in fact(found, "frames") and not (labels == "EOS").any()
    start = int(fact(found, "frames").split()[0])
    codes = read_row(demo / "tokens/train", "train-ada_000")["codes"]
    assert labels[:, 0].tolist() == [str(code) for code in codes[start : start + len(labels), 0]]


# ---- Higgs Audio -----------------------------------------------------------------------------------------------


def higgs_layout(tokenizer, row: dict, reference: dict) -> tuple[list[int], np.ndarray, np.ndarray, int]:
    """Ids, frames of reference and target, labels at the positions that predict them, first position of the target."""
    turns = [("system", "Generate audio following instruction."), ("scene", "Audio is recorded from a quiet room.")]
    turns += [("user", reference["text"] + "."), ("assistant", None), ("user", row["text"] + "."), ("assistant", None)]
    chat = [
        {"role": role, "content": [{"type": "audio"} if text is None else {"type": "text", "text": text}]}
        for role, text in turns
    ]
    ids, frames = [], []
    codes = iter([reference["codes"], row["codes"]])
    placeholder, late = (tokenizer.convert_tokens_to_ids(t) for t in ("<|AUDIO_OUT|>", "<|reserved_special_token_6|>"))
    for number in tokenizer(tokenizer.apply_chat_template(chat, tokenize=False), add_special_tokens=False).input_ids:
        if number != placeholder:
            ids.append(number)
            continue
        code, begin = next(codes), len(ids)
        for t in range(len(code) + 9):
            frames.append([1024 if t <= k else code[t - k - 1, k] if t - k - 1 < len(code) else 1025 for k in range(8)])
        ids += [placeholder] * (len(code) + 2) + [late] * 7
    labels = np.full((len(ids), 8), IGNORE)
    for t in range(len(row["codes"]) + 1):
        for k in range(8):
            labels[begin + t + k, k] = row["codes"][t, k] if t < len(row["codes"]) else 1025
    return ids, np.array(frames), labels, begin


def test_higgs_shows_the_librarys_loss_and_predictions(higgs_demo):
    from transformers import AutoTokenizer, HiggsAudioV2ForConditionalGeneration

    tokens = higgs_demo / "tokens/train"
    row = read_row(tokens, "ada_004")
    reference = read_row(tokens, row["ref"])
    tokenizer = AutoTokenizer.from_pretrained(higgs_demo / "model")
    ids, frames, labels, begin = higgs_layout(tokenizer, row, reference)
    found = inspect("--recipe", "higgs_clone", "--model", higgs_demo / "model", "--data", tokens, "--clip", row["id"],
                    "--precision", "fp32", "--codebook-weights", "first")  # fmt: skip
    model = HiggsAudioV2ForConditionalGeneration.from_pretrained(higgs_demo / "model").eval()
    with torch.no_grad():
        output = model(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            audio_input_ids=torch.tensor(frames)[None],
            audio_input_ids_mask=torch.ones(1, len(frames), dtype=torch.bool),
            use_cache=False,
        )
    logits = output.logits[0].view(len(ids), 8, -1).permute(1, 0, 2).numpy()
    assert_codes(found, labels, [*logits], {1024: "BOS", 1025: "EOS"})
    ends = [F.cross_entropy(torch.tensor(logits[k][p]), torch.tensor(1025)) for p, k in np.argwhere(labels == 1025)]
    assert column(found["Loss"], "part")[-1] == "end" and column(found["Loss"], "targets")[-1] == str(len(ends)) == "8"
    assert float(column(found["Loss"], "loss")[-1]) == pytest.approx(float(sum(ends) / 8), abs=1e-4)
    reads = [number for number, _ in found["Tokens"].items]
    assert reads == [
        number for i, number in enumerate(ids) if not i or number != ids[i - 1] or number not in (266, 264)
    ]
    context = np.array(found["Labels"].rows)[:, 1:] == "-ctx"
    at = [p for p, number in enumerate(ids) if number in (266, 264) and p < begin]
    assert sorted(set(np.flatnonzero(context.any(1)))) == [p - 1 for p in at], "the reference is context"
    assert fact(found, "reference").startswith(f"{row['ref']}, {reference['frames']} frames")


def test_higgs_text_labels_are_the_tokens_after_the_reference(higgs_demo):
    from transformers import AutoTokenizer, HiggsAudioV2ForConditionalGeneration

    row = read_row(higgs_demo / "tokens/train", "ada_004")
    reference = read_row(higgs_demo / "tokens/train", row["ref"])
    tokenizer = AutoTokenizer.from_pretrained(higgs_demo / "model")
    ids, frames, _, begin = higgs_layout(tokenizer, row, reference)
    words = ["--model", higgs_demo / "model", "--data", higgs_demo / "tokens/train", "--precision", "fp32"]
    found = inspect("--recipe", "higgs_clone", *words, "--clip", row["id"], "--text-loss", 0.5)
    tokens, is_audio = np.array(ids), np.isin(ids, (266, 264))
    after = np.flatnonzero(is_audio[:begin])[-1] + 1
    expected = [tokens[p + 1] if p + 1 < len(ids) and p + 1 >= after and not is_audio[p + 1] else IGNORE
                for p in range(len(ids))]  # fmt: skip
    shown = column(found["Labels"], "text")
    assert [IGNORE if cell.startswith("-") else int(cell) for cell in shown] == expected
    model = HiggsAudioV2ForConditionalGeneration.from_pretrained(higgs_demo / "model", use_text_head=True).eval()
    with torch.no_grad():
        states = model.model(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            audio_input_ids=torch.tensor(frames)[None],
            audio_input_ids_mask=torch.ones(1, len(frames), dtype=torch.bool),
            use_cache=False,
        )[0][0]
        loss = F.cross_entropy(model.text_lm_head(states), torch.tensor(expected), ignore_index=IGNORE)
    row = column(found["Loss"], "part").index("text")
    assert float(column(found["Loss"], "loss")[row]) == pytest.approx(float(loss), abs=1e-4)
    assert column(found["Loss"], "weight")[row] == "0.5"


# ---- Llama MoT -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["flat", "delay"])
def test_mot_shows_the_loss_of_both_experts_on_every_token(demo_mot, layout):
    import llama_mot
    from common.runtime import Process
    from helpers import mot_support
    from models.mot.data import Tokenizer

    row = next(row for row in load_from_disk(str(demo_mot / "tokens")) if row["split"] == "train")
    codes = np.array(row["codes"]).reshape(-1, 4)
    words = ["--text-dropout", "0", "--codebook-weights", "1", "2", "1", "1", "--layout", layout]
    found = inspect("--recipe", "llama_mot", f"--clip={row['id']}", *words)
    text = Tokenizer(str(demo_mot / "llama"))([row["text"]])[0]
    ids, bos, eos = codes + 256 + 2048 * np.arange(4), 256 + 4 * 2048, 257 + 4 * 2048
    if layout == "delay":
        stream = np.full((len(codes) + 4, 4), eos)
        for t in range(len(stream)):
            for k in range(4):
                stream[t, k] = bos if t <= k else ids[t - k - 1, k] if t - k - 1 < len(codes) else eos
        inputs, wanted = stream[:-1], np.where(stream[1:] < bos, stream[1:], IGNORE)
        wanted[len(codes), 0] = eos
        books = np.where(inputs < bos, np.arange(4), 4)
    else:
        inputs = np.append(bos, ids.ravel())[:, None]
        books = np.append(4, np.tile(np.arange(4), len(codes)))[:, None]
        wanted = np.full((len(inputs), 4), IGNORE)
        for p in range(len(inputs)):
            wanted[p, p % 4] = ids.ravel()[p] if p < ids.size else eos
    before = np.repeat(text[:, None], inputs.shape[1], axis=1)
    labels = np.concatenate([np.full((len(text), 4), IGNORE), wanted])
    whole = np.concatenate([before, inputs])
    batch = {"input_ids": torch.tensor(whole)[None], "mask": torch.ones(1, len(whole), dtype=torch.long)}
    batch["codebooks"] = torch.tensor(np.concatenate([np.zeros_like(before), books]))[None]

    config = {
        "model": str(demo_mot / "llama"),
        "musicgen": str(demo_mot / "musicgen"),
        "data": str(demo_mot / "tokens"),
    }
    config |= {"text_dropout": 0.0, "samples": 0, "layout": layout}
    config = llama_mot.Config(**llama_mot.DEMO | config)
    model = llama_mot.build_model(config, WHOLE)
    clips = llama_mot.build_data(
        config.data, model, Tokenizer(config.model), config, Process(0, 1, torch.device("cpu")), train=True
    )
    llama_mot.init_adapter(model, config, clips)
    with torch.no_grad():
        states = mot_support.reference_states(model, batch)[0]
        table = torch.cat([model.llama.lm_head.weight, model.head.weight])
        every = (states @ table.T).numpy()
    logits = [np.full_like(every, -np.inf) for _ in range(4)]  # only the codebook's own classes can be predicted
    for k, row_logits in enumerate(logits):
        own = slice(256 + 2048 * k, 256 + 2048 * (k + 1))
        row_logits[:, own] = every[:, own]
    logits[0][:, eos] = every[:, eos]
    assert_codes(found, labels, logits, {bos: "A_BOS", eos: "A_EOS"})
    assert [number for number, _ in found["Tokens"].items] == text.tolist()
    shown = [[cell for cell in line[2:]] for line in found["Inputs"].rows]
    assert shown == [[{bos: "A_BOS", eos: "A_EOS"}.get(i, str(i)) for i in line] for line in whole.tolist()]


# ---- enhancers -------------------------------------------------------------------------------------------------


def decibels(wave: np.ndarray) -> float:
    return 10 * np.log10(np.mean(np.square(wave)))


def assert_levels(table, noisy: np.ndarray, clean: np.ndarray) -> None:
    levels = [float(value) for value in column(table, "RMS dBFS")]
    assert levels[:3] == pytest.approx(
        [decibels(noisy), decibels(clean), decibels(noisy - clean)], abs=0.011
    )  # a gain is shown to 0.01 dB
    ratio = 10 * np.log10(np.sum(clean**2) / np.sum((noisy - clean) ** 2))
    assert float(column(table, "SNR dB")[0]) == pytest.approx(ratio, abs=0.006)


def test_cmgan_shows_the_crop_and_the_terms_of_the_paper(pairs, tmp_path):
    import cmgan
    from models.cmgan.network import Discriminator, TSCNet
    from models.cmgan.weights import write_export

    torch.manual_seed(3)
    generator, discriminator = TSCNet(8).eval(), Discriminator(4).eval()
    flags = {"data": str(pairs), "seconds": 0.5, "seed": 5, "w_gan": 0.07}
    write_export(tmp_path / "export", generator.state_dict(), discriminator.state_dict(),
                 {"recipe": "cmgan", "training_config": flags})  # fmt: skip
    found = inspect("--model", tmp_path / "export", "--clip", "ben_002", "--epoch", 3)
    row = next(row for row in load_from_disk(str(pairs)) if row["id"] == "ben_002")
    crop = fact(found, "crop")
    assert crop.startswith("0.500 s (8000 samples)")
    start = int(crop.split("(sample ")[1].split(")")[0])
    noisy, clean = (np.array(row[side][start : start + 8000]) / 32768 for side in ("noisy", "clean"))
    assert_levels(found["Levels of the crop"], noisy, clean)

    scale = 1 / np.sqrt(np.mean(noisy**2))
    noisy_n, clean_n = (torch.tensor(side * scale, dtype=torch.float32)[None] for side in (noisy, clean))

    def compressed(wave):
        bins = torch.stft(wave, 400, 100, window=torch.hamming_window(400), return_complex=True).transpose(1, 2)
        return torch.polar(bins.abs() ** 0.3, bins.angle())

    with torch.no_grad():
        spec = generator(torch.stack([compressed(noisy_n).real, compressed(noisy_n).imag], 1))
        spec = torch.complex(spec[:, 0], spec[:, 1])
        wave = torch.istft(torch.polar(spec.abs() ** (1 / 0.3), spec.angle()).transpose(1, 2), 400, 100,
                           window=torch.hamming_window(400), length=8000)  # fmt: skip
        target = compressed(clean_n)
        judged = discriminator(target.abs().transpose(1, 2)[:, None], spec.abs().transpose(1, 2)[:, None])
    terms = {
        "ri": ((spec.real - target.real) ** 2).mean() + ((spec.imag - target.imag) ** 2).mean(),
        "mag": ((spec.abs() - target.abs()) ** 2).mean(),
        "time": (wave - clean_n).abs().mean(),
        "gan": ((judged - 1) ** 2).mean(),
    }
    weights = {"ri": 0.1, "mag": 0.9, "time": 0.2, "gan": 0.07}
    loss = found["Loss"]
    assert column(loss, "term") == list(terms)
    assert [float(value) for value in column(loss, "value")] == pytest.approx(
        [float(t) for t in terms.values()], abs=1e-4
    )
    weighted = [weights[name] * float(term) for name, term in terms.items()]
    assert [float(value) for value in column(loss, "weighted")] == pytest.approx(weighted, abs=1e-4)
    assert float(fact(found, "loss")) == pytest.approx(sum(weighted), abs=1e-4)
    enhanced = wave[0].double().numpy() / scale
    assert column(found["Levels of the crop"], "sound") == ["noisy", "clean", "noise", "enhanced"]
    assert float(column(found["Levels of the crop"], "RMS dBFS")[3]) == pytest.approx(decibels(enhanced), abs=0.01)
    assert cmgan.Config().seconds != 0.5, "the export's own flags were used"


def test_diffusion_buffer_shows_the_crop_and_the_loss_of_the_paper(pairs, tmp_path):
    import diffusion_buffer
    from common.pairs import PairDataset
    from models.diffusion_buffer.data import Clips
    from models.diffusion_buffer.network import build_network
    from models.diffusion_buffer.weights import spec_of, write_export

    flags = diffusion_buffer.DEMO | {"data": str(pairs), "seed": 2}
    config = diffusion_buffer.Config(**flags)
    spec = spec_of(config)
    torch.manual_seed(1)
    network = build_network(spec.network, spec.width, spec.block).eval()
    with torch.no_grad():
        for parameter in network.parameters():  # its last layer begins at zero
            parameter.add_(0.02 * torch.randn(parameter.shape))
    write_export(tmp_path / "export", network, spec, {"recipe": "diffusion_buffer", "training_config": flags})
    found = inspect("--model", tmp_path / "export", "--clip", "ben_002", "--epoch", 1)

    dataset = PairDataset(str(pairs), 16000)
    [row] = dataset.rows_starting(["ben_002"])
    item = Clips(dataset, np.array([row]), spec, config.seed).batch([(1, 0)])
    first = int(fact(found, "crop").split("(sample ")[1].split(")")[0])
    gain = 10 ** (float(fact(found, "random gain").split()[0]) / 20) / 32768
    source = next(r for r in load_from_disk(str(pairs)) if r["id"] == "ben_002")
    length = 15 * 256 + 510
    sides = {}
    for side in ("noisy", "clean"):
        padded = np.concatenate([np.zeros(length), source[side], np.zeros(length)]) * gain
        sides[side] = padded[first + length : first + 2 * length]
        assert item[side][0].numpy() == pytest.approx(sides[side], rel=2e-3, abs=1e-6)
    assert_levels(found["Levels of the crop"], sides["noisy"], sides["clean"])
    assert column(found["Buffer"], "frame") == [str(frame) for frame in range(8, 16)]
    assert [float(t) for t in column(found["Buffer"], "t")] == pytest.approx(item["t"][0].tolist(), abs=1e-4)

    def spectra(wave):
        bins = torch.stft(wave, 510, 256, window=torch.hann_window(510), center=False, return_complex=True)
        return torch.polar(0.15 * bins.abs().sqrt(), bins.angle())

    clean, noisy = spectra(item["clean"]), spectra(item["noisy"])
    t, sigma, z = item["t"][:, None], item["sigma"][:, None], item["z"]
    buffer = (1 - t) * clean[..., 8:] + t * noisy[..., 8:] + sigma * z
    with torch.no_grad():
        times = network.embed(torch.cat([torch.zeros(1, 8), item["t"]], 1))
        output = network(torch.cat([clean[..., :8], buffer], -1), noisy, times, torch.ones(1, 16))
    squares = (output - clean)[..., 8:].abs().square()
    assert float(fact(found, "loss")) == pytest.approx(float(squares.mean()), abs=2e-5)
    quarters = [float(squares[..., 2 * q : 2 * q + 2].mean()) for q in range(4)]
    assert [float(value) for value in column(found["Loss"], "value")[:4]] == pytest.approx(quarters, abs=2e-5)


def test_without_a_model_nothing_is_enhanced_and_a_held_out_clip_is_refused():
    for recipe in ("cmgan", "diffusion_buffer"):
        found = inspect("--recipe", recipe)
        assert "Loss" not in found and column(found["Levels of the crop"], "sound") == ["noisy", "clean", "noise"]
        with pytest.raises(UserError, match="--clip dov_000 is in .* but not trained on: it is held out"):
            inspect("--recipe", recipe, "--clip", "dov_000")


# ---- terminal and mistakes -------------------------------------------------------------------------------------


def test_the_terminal_gets_no_control_characters(demo, tmp_path, capsys):
    assert inspection.visible("a\x1b[31m\u202eb\nü") == "a\\x1b[31m\\u202eb\\nü"
    codes = np.random.default_rng(0).integers(0, 1024, (9, 9))
    data = support.write_tokens(tmp_path / "tokens", [{"id": "a", "text": "[S1] a\x9b2J.", "codes": codes}])
    inspect("--recipe", "dia_lora", "--data", data, "--text-dropout", 0)
    printed = capsys.readouterr().out
    assert "\x9b" not in printed and "[S1] a\\x9b2J." in printed


def test_tables_are_aligned_and_cut_to_the_width_and_prose_is_wrapped():
    table = inspection.Table(
        "Labels", ["position", "0", "1"], [["0", "-bos", "17"], ["10", "1024", "-pad"]], "of a clip"
    )
    clip = inspection.facts("Clip", {"id": "a", "text": "one two three four"})
    tokens = inspection.Tokens("Tokens", [(1, "[S1]"), (32, " "), (104, "h")])
    assert inspection.to_text([clip, table, tokens], 18).splitlines() == [
        "Clip", "  id    a", "  text  one two", "        three four", "",
        "Labels: of a clip", "  position     0", "  0         -bos", "  10        1024", "",
        "Tokens", "  1:[S1] 32:_", "  104:h",
    ]  # fmt: skip
    assert inspection.to_text([table], 1000).splitlines()[2:] == ["  0         -bos    17", "  10        1024  -pad"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "give --recipe, or --run with a run folder"),
        (["--recipe", "dia_lora", "--clip", "train256-slt-00"], r"no such clip; did you mean train256-slt-\d+-\d or"),
        (["--recipe", "dia_lora", "--clip", "zzz"], "has no such clip; its first is 'train256-slt-000-0'"),
        (["--recipe", "dia_lora", "--text-dropuot", "1"], "unknown flag --text-dropuot; did you mean --text-dropout"),
        (["--recipe", "dia_lora", "--text-dropout", "2"], "--text-dropout 2.0 is out of range"),
        (["--recipe", "dia_lora", "--data", "nowhere"], "nowhere"),
        (["--recipe", "llama_mot", "--data", "x"], "--recipe llama_mot needs --model for its tokenizer"),
        (["--run", "nowhere"], "--run nowhere is not a run folder"),
    ],
)
def test_mistakes_are_one_sentence(words, sentence):
    with pytest.raises(UserError, match=sentence):
        inspect(*words)


def test_a_run_without_an_export_shows_no_predictions(lora_run, tmp_path, capsys):
    (tmp_path / "config.json").write_text((lora_run / "config.json").read_text())
    found = inspect("--run", tmp_path)
    assert "Predictions" not in found and "has no export yet" in capsys.readouterr().out
    with pytest.raises(UserError, match="was made by dia_lora, not by --recipe cmgan"):
        inspect("--run", tmp_path, "--recipe", "cmgan")


def test_no_predictions_reads_no_weights(higgs_demo, tmp_path):
    for file in (higgs_demo / "model").iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    words = ["--recipe", "higgs_clone", "--model", tmp_path, "--data", higgs_demo / "tokens/train", "--no-predictions"]
    assert "Predictions" not in inspect(*words)
    with pytest.raises(UserError, match="--model"):
        inspect(*words[:-1])
