"""What the flags of the CMGAN recipe do, each shown on a short run of one rank in this process."""

import contextlib
import json
import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

import cmgan
from common import engine, optim
from common.artifacts import build_config
from common.ds_config import resolve_ds
from common.errors import UserError
from common.pairs import PairDataset
from common.runs import Run
from common.scorer import Scorer
from helpers import support
from helpers.cmgan_support import SMALL
from infer import enhance as infer_enhance
from models.cmgan import evaluate as evaluate_module
from models.cmgan import labels as labels_module
from models.cmgan import watch
from models.cmgan.diagnose import diagnose
from models.cmgan.enhance import enhance, enhance_run
from models.cmgan.network import TSCNet
from models.cmgan.weights import load_networks

TINY = {**SMALL, "channels": 4, "seconds": 0.35, "accumulation": 1, "steps": 2, "warmup": 0.0}
TINY |= {"hold_out": ["dov"]}


@pytest.fixture(scope="module")
def ranks(only_rank):
    return only_rank


@pytest.fixture(scope="module")
def scorer():
    scorer = Scorer(1)
    yield scorer
    scorer.close()


@pytest.fixture(scope="module")
def pairs(pairs, tmp_path_factory):
    return support.cut_pairs(pairs, tmp_path_factory.mktemp("cut") / "pairs", held_out=2)


@pytest.fixture(scope="module", autouse=True)
def small_probe():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"PROBE": 8, "RAMP": 4}.items():
            patch.setattr(watch, name, value)
        patch.setattr(cmgan, "PROBE_EVERY", 2)
        yield


@pytest.fixture
def trained(pairs, ranks, scorer, tmp_path):
    """Trains a good configuration with these changes; returns the engines and the run folder."""

    def run(**changes):
        folder = Path(changes.pop("out", tmp_path / "run"))
        config = cmgan.Config(**{**TINY, "data": str(pairs), "out": str(folder), **changes})
        return cmgan.train(config, ranks, resolve_ds(config.ds, config, 1), scorer), folder

    return run


@pytest.fixture(scope="module")
def finished(pairs, ranks, scorer, tmp_path_factory):
    """A run with everything on that a user would look at."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    config = cmgan.Config(
        **{**TINY, "data": str(pairs), "out": str(folder), "samples": 1, "ema": 0.9}
        | {"steps": 3, "eval_every": 1, "save_every": 2}
    )
    data = PairDataset(str(pairs), 16000)
    held_out = data.rows_starting(config.hold_out)[:2]
    config.test_data = str(support.write_pairs(folder.parent / "test", [row(data, i) for i in held_out]))
    cmgan.train(config, ranks, resolve_ds(config.ds, config, 1), scorer)
    return folder


def row(data, i) -> dict:
    return {"id": data.id(i), "noisy": data.noisy(i), "clean": data.clean(i)}


def weights(engines, name) -> dict:
    return {key: value.clone() for key, value in engines[name].module.model.state_dict().items()}


# ---- the step ------------------------------------------------------------------------------------------------------


def test_the_generators_step_leaves_nothing_in_the_discriminator(trained, tmp_path, monkeypatch):
    """test_cmgan.py has the frozen one against plain PyTorch. Unfrozen, its first step has the gradient of both."""
    options = {"steps": 1, "hold_out": [], "ds": support.stage_file(tmp_path, 0)}
    honest, _ = trained(**options)
    monkeypatch.setattr(engine, "frozen", lambda model: contextlib.nullcontext())
    unfrozen, _ = trained(**options, out=tmp_path / "unfrozen")
    first, other = (weights(engines, "d") for engines in (honest, unfrozen))
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_a_loss_with_another_target_does_not_even_start(trained, monkeypatch):
    right = cmgan.loss_terms
    monkeypatch.setattr(cmgan, "loss_terms", lambda est, d: {name: term + 0.5 for name, term in right(est, d).items()})
    with pytest.raises(UserError, match="a perfect estimate does not score 0"):
        trained()


def test_both_networks_move_once_a_step_and_crops_of_one_sound_train(trained):
    engines, run = trained(micro_batch=1, steps=2, hold_out=[])
    assert [engines[name].global_steps for name in ("g", "d")] == [2, 2]
    assert all(math.isfinite(r["loss"]) and r["grad_norm_d"] > 0 for r in support.step_records(run))


@pytest.mark.parametrize("network", ["compute_loss", "discriminator_loss"])
def test_a_micro_batch_that_does_not_fit_names_a_smaller_one(trained, monkeypatch, network):
    """In the forward or the backward pass, of either network."""
    loss = getattr(cmgan, network)

    def runs_out(gradient):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def too_large(*args, **kwargs):
        output = loss(*args, **kwargs)
        output.loss_sum.register_hook(runs_out)
        return output

    monkeypatch.setattr(cmgan, network, too_large)
    with pytest.raises(UserError, match="--micro-batch 2"):
        trained(micro_batch=4, hold_out=[])


def test_too_many_missing_labels_end_the_run_and_name_the_reason(trained, tmp_path, monkeypatch):
    rows = [{"id": f"a_{i}", "noisy": noise(i), "clean": np.zeros(9000, np.int16)} for i in range(4)]
    data = support.write_pairs(tmp_path / "silent", rows)
    monkeypatch.setattr(labels_module, "ENOUGH", 4)
    with pytest.raises(UserError, match=r"4 of the last 4 sounds have no PESQ \(\{'NoUtterancesError': 4\}"):
        trained(data=str(data), hold_out=[], steps=9, micro_batch=2)


def test_labels_that_begin_to_miss_are_not_hidden_by_a_good_past(ranks):
    """Each evaluation with enough labels starts to count anew."""
    run = Run.__new__(Run)
    run.config, run.process, run.pending, run.tracker = cmgan.Config(), ranks, None, Silent()
    loop_state = {"labels": 0, "missing": 0, "reasons": {}}
    for step in range(200):
        labels_module.count_missing(loop_state, [], 0, 4, step, run)
    labels_module.restart_count(loop_state)
    with pytest.raises(UserError, match="100 of the last 100 sounds"):
        for step in range(50):
            labels_module.count_missing(loop_state, ["a: NoUtterancesError"] * 4, 4, 4, step, run)


class Silent:
    def event(self, *_, **__) -> None:
        pass


def noise(seed) -> np.ndarray:
    return np.random.default_rng(seed).integers(-500, 500, 9000, dtype=np.int16)


def test_memorising_one_pair_the_ear_follows_the_loss(trained, tmp_path, pairs):
    seconds, steps = 0.35, 32
    data, samples = PairDataset(str(pairs), 16000), int(16000 * seconds)
    clean = data.clean(0)[:samples].astype(np.float64)
    hiss = np.random.default_rng(0).normal(size=samples)
    hiss *= np.sqrt((clean**2).mean() / (hiss**2).mean()) * 10 ** (-14 / 20)
    pair = {"id": "x_0", "noisy": np.round(clean + hiss).astype(np.int16), "clean": clean.astype(np.int16)}
    train = support.write_pairs(tmp_path / "train", [pair])
    judge = support.write_pairs(tmp_path / "judge", [pair | {"id": "y_0"}])
    _, run = trained(
        data=str(train), eval_data=str(judge), allow_overlap=True, hold_out=[], channels=8, steps=steps,
        seconds=seconds, micro_batch=1, lr=5e-3, schedule="cosine", eval_every=steps // 4,
    )  # fmt: skip
    evals = [record for record in support.metrics(run) if record.get("event") == "eval"]
    losses, scores = ([record[name] for record in evals] for name in ("loss", "pesq"))
    assert evals[-1]["si_sdr"] > 16, evals[-1]["si_sdr"]  # 80 steps reach 20 dB
    # Once the pair is known (measured: PESQ 1.0, 2.8, 3.1 at the first three) the adversarial term moves both a little.
    assert losses[0] > losses[1] > losses[2] and scores[0] < scores[1] < scores[2]
    assert losses[-1] < losses[0] / 5 and scores[-1] > 2
    assert abs(evals[-1]["gain"] - 1) < 0.1
    assert not [r for r in support.metrics(run) if "PESQ fell" in r.get("message", "")]


# ---- starting from published weights -------------------------------------------------------------------------------


@pytest.mark.long
def test_fine_tuning_a_bare_generator_holds_its_random_discriminator_back(trained, tmp_path, monkeypatch):
    torch.manual_seed(5)
    published = TSCNet(4)
    torch.save({f"module.{name}": value for name, value in published.state_dict().items()}, tmp_path / "ckpt")
    options = {"model": str(tmp_path / "ckpt"), "steps": 4}
    monkeypatch.setattr(watch, "OPENS", 1.0)
    engines, run = trained(**options)
    records = support.step_records(run)
    assert [r["gan_level"] for r in records] == [0, 0, 0, 0] and all(r["loss_gan"] == 0 for r in records)
    assert engines["d"].global_steps == 4  # it learns all the while
    assert all(r["loss_d_noisy"] > 0 for r in records)  # from noisy inputs too
    for record in records:
        parts = [record[f"loss_d_{name}"] for name in ("clean", "made", "noisy")]
        assert record["loss_d"] == pytest.approx(sum(parts)) and parts[0] > 0 and parts[1] > 0
    moved = weights(engines, "g")["mask_decoder.prelu_out.weight"] - published.mask_decoder.prelu_out.weight
    assert 0 < float(moved.abs().max()) <= 4.1 * SMALL["lr"]
    monkeypatch.setattr(watch, "OPENS", -1.0)
    monkeypatch.setattr(watch, "CLOSES", -1.0)
    _, run = trained(**options, out=tmp_path / "open")
    assert [r["gan_level"] for r in support.step_records(run)] == [0, 0, 0, 0.25]
    (event,) = [r for r in support.metrics(run) if r.get("event") == "gan_gate"]
    assert event["step"] == 2 and "the GAN loss is enabled" in event["message"]


def test_an_export_goes_on_with_its_own_discriminator(trained, finished):
    engines, run = trained(model=str(finished / "export"), steps=1, gan_gate="off", hold_out=[])
    assert support.step_records(run)[0]["gan_level"] == 1.0
    assert engines["d"].module.model.channels == 1
    with pytest.raises(UserError, match="--gan-gate needs held-out sounds"):
        trained(model=str(finished / "export"), hold_out=[], out=run.parent / "other")


# ---- evaluation ------------------------------------------------------------------------------------------------------


def test_every_evaluation_shows_what_the_discriminator_says_about_the_outputs(finished):
    records = support.metrics(finished)
    assert all(r["loss_d_noisy"] == 0 for r in support.step_records(finished))  # from scratch: without noisy inputs
    evals, events = ([r for r in records if r.get("event") == name] for name in ("eval", "discriminator"))
    assert [r["step"] for r in events] == [r["step"] for r in evals] == [0, 1, 2, 3]
    for evaluated, event in zip(evals, events, strict=True):
        points = np.array(event["points"])
        assert points.shape == (watch.PROBE, 2) and points.min() >= 0.99 and points.max() < 4.7
        assert event["d_made_pearson"] == evaluated["d_made_pearson"]
        assert event["d_made_mae"] == pytest.approx(np.abs(points[:, 0] - points[:, 1]).mean(), abs=1e-3)
        assert event["d_pearson"] == evaluated["d_pearson"]  # beside the probe's
        picture = finished / "samples" / "discriminator" / f"step-{event['step']:08d}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert (finished / "figures" / "discriminator.png").stat().st_size == picture.stat().st_size


@pytest.mark.long
def test_mutation_a_random_eval_crop_is_seen(pairs, ranks, scorer, monkeypatch):
    """Whole files give the same numbers every time; a random crop of them does not."""
    torch.manual_seed(0)
    nets = TSCNet(4), cmgan.Discriminator(2)
    data = PairDataset(str(pairs), 16000)
    rows = data.rows_starting(["dov"])[:2]
    files = evaluate_module.EvalFiles(data, rows, cmgan.loss_terms, scorer, ranks)
    loss_weights = cmgan.loss_weights(cmgan.Config(), 1.0)
    first, second = (files.measure(*nets, loss_weights) for _ in range(2))
    assert first == second and [r["samples"] for r in first] == [int(data.samples[i]) for i in rows]
    whole = evaluate_module.sounds

    def cropped(pairs, row):
        start = np.random.randint(0, 2000)
        return tuple(side[start : start + 8000] for side in whole(pairs, row))

    monkeypatch.setattr(evaluate_module, "sounds", cropped)
    third, fourth = (files.measure(*nets, loss_weights) for _ in range(2))
    assert third != fourth and first != third


def test_the_best_by_pesq_is_exported_and_the_test_set_chooses_nothing(finished):
    records = support.metrics(finished)
    evals = [record for record in records if record.get("event") == "eval" and record["step"]]
    best = max(evals, key=lambda record: record["pesq"])
    facts = json.loads((finished / "export" / "config.json").read_text())
    assert facts["checkpoint"]["step"] == best["step"] and facts["recipe"] == "cmgan"
    assert facts["checkpoint"]["score"] == pytest.approx(-best["pesq"])
    (test,) = [record for record in records if record.get("event") == "test"]
    assert {"pesq", "ssnr", "stoi"} <= set(test)
    assert len((finished / "evaluations" / "test.csv").read_text().splitlines()) == 3
    index = json.loads((finished / "checkpoints" / "index.json").read_text())["checkpoints"]
    scored = [entry["score"] for entry in index if entry["score"] is not None]
    assert scored and all(any(-s == pytest.approx(e["pesq"]) for e in evals) for s in scored)
    assert (finished / "samples" / "noisy" / "file-0000.wav").exists()
    page = (finished / "report.html").read_text()
    assert page.count("<audio") >= 3 and "level is" in page  # this one knows its level is wrong


# ---- diagnose --------------------------------------------------------------------------------------------------------


def trained_config(finished, **changes):
    return build_config(cmgan.Config, json.loads((finished / "config.json").read_text())["config"], **changes)


def ask(finished, ranks, scorer, place, **changes):
    config = trained_config(finished, **changes)
    return diagnose(str(place), config, cmgan.loss_terms, cmgan.loss_weights(config, 1.0), ranks, scorer)


def test_diagnose_checks_a_run_and_says_what_it_measured(finished, ranks, scorer, capsys):
    with contextlib.suppress(UserError):  # a model of three steps has a gain far from 1
        ask(finished, ranks, scorer, finished)
    lines = capsys.readouterr().out.splitlines()
    named = {line.split(":")[0].split("  ")[-1]: line for line in lines if line[:4] in ("PASS", "WARN", "FAIL")}
    assert {"weights", "PESQ labels", "memory", "gain", "pesq", "discriminator follows PESQ on noisy speech"} <= set(
        named
    )
    assert named["PESQ labels"].startswith("PASS")


def test_diagnose_checks_a_run_as_it_was_trained(finished):
    """Not with the flags of the embedded demo, nor with the recipe's defaults."""
    config = trained_config(finished)
    used = json.loads((finished / "config.json").read_text())["config"]
    assert config.seconds == used["seconds"] == TINY["seconds"]
    assert (config.data, config.hold_out) == (used["data"], ["dov"])
    assert trained_config(finished, eval_data="other").eval_data == "other"
    assert build_config(cmgan.Config, {"seconds": 1.0, "a_flag_of_old": 1}).seconds == 1.0


@pytest.mark.long
@pytest.mark.parametrize("place", ["export", "checkpoints/step-00000002", "export/generator.pt"])
def test_diagnose_takes_checkpoints_exports_and_bare_files(finished, pairs, ranks, scorer, place, capsys):
    with contextlib.suppress(UserError):
        ask(finished, ranks, scorer, finished / place, eval_data=str(pairs))
    printed = capsys.readouterr().out
    assert "PASS  weights" in printed and ("it has no discriminator" in printed) == place.endswith(".pt")


# ---- use -------------------------------------------------------------------------------------------------------------


def test_enhance_writes_what_the_model_hears(finished, pairs, tmp_path):
    data = PairDataset(str(pairs), 16000)
    noisy = data.noisy(0).astype(np.float32) / 32768
    (tmp_path / "in").mkdir()
    soundfile.write(tmp_path / "in" / "a.wav", noisy, 16000)
    model, _ = load_networks(str(finished / "export"))
    expected = enhance(model.eval(), noisy, 10**6, "cpu")
    enhance_run(str(finished / "export"), tmp_path / "in", tmp_path / "out", 16.0, no_padding=False)
    found, _ = soundfile.read(tmp_path / "out" / "a.wav", dtype="float32")
    assert np.abs(found - expected).max() < 1e-4


@pytest.mark.parametrize("place", ["", "export", "export/generator.pt", "checkpoints/step-00000003"])
def test_infer_enhance_finds_the_kind_of_model(finished, place, tmp_path):
    """A run, its export, a file in it, a checkpoint."""
    (tmp_path / "in").mkdir()
    soundfile.write(tmp_path / "in" / "a.wav", 0.1 * np.sin(np.arange(9000)), 16000)
    words = ["--model" if place else "--run", finished / place, "--source", tmp_path / "in", "--out", tmp_path / "out"]
    infer_enhance.enhance(infer_enhance.parse_args(list(map(str, words))))
    assert soundfile.info(tmp_path / "out" / "a.wav").frames == 9000


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--run RUN --delay 2", "--delay is for diffusion_buffer models, but this is a cmgan model"),
        ("--model BARE --recipe diffusion_buffer --no-padding", "--no-padding is for cmgan models"),
        ("--run RUN --window-seconds 1", "--window-seconds 1.0 is out of range"),
        ("--run RUN/nowhere", "nowhere does not exist"),
        ("--run RUN/checkpoints", "checkpoints has no export"),
        ("--model RUN --recipe diffusion_buffer", "was made by cmgan, not by --recipe diffusion_buffer"),
        ("--model BARE", "comes without a config.json: name its recipe with --recipe cmgan or diffusion_buffer"),
        ("--model RUN/export --source RUN/export", "is neither a recording nor a folder of them"),
    ],
)
def test_mistakes_of_infer_enhance_are_one_sentence(finished, tmp_path, words, sentence):
    shutil.copy(finished / "export" / "generator.pt", tmp_path / "ckpt")
    words = words.replace("RUN", str(finished)).replace("BARE", str(tmp_path / "ckpt")).split()
    words += [] if "--source" in words else ["--source", str(tmp_path)]
    with pytest.raises(UserError, match=sentence) as error:
        infer_enhance.enhance(infer_enhance.parse_args([*words, "--out", str(tmp_path / "out")]))
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


@pytest.mark.long
def test_infer_diagnose_prints_its_checks_and_fails_with_code_2(finished):
    done = support.run_script("infer/diagnose.py", "--run", finished)
    assert "PASS  weights" in done.stdout and "FAIL  gain" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 2 and done.stderr.startswith(f"error: {finished}: some checks failed: gain")


@pytest.mark.long
def test_infer_diagnose_of_a_recipe_needs_no_weights(pairs):
    small = "--channels 8 --micro-batch 1 --seconds 0.5".split()  # at full size it takes minutes here
    done = support.run_script("infer/diagnose.py", "--recipe", "cmgan", "--eval-data", pairs, *small)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS  PESQ labels" in done.stdout and "PASS  memory" in done.stdout and "gain" not in done.stdout


@pytest.mark.parametrize(
    ("script", "words", "sentence"),
    [
        ("diagnose.py", "--model nowhere", "error: nowhere does not exist."),
        ("diagnose.py", "--run tests", "error: tests comes without a config.json"),
        ("diagnose.py", "", "error: give --run, --model or --recipe; --help lists the flags."),
        ("enhance.py", "--model nowhere --source tests --out out", "error: nowhere does not exist."),
    ],
)
def test_mistakes_of_infer_commands_exit_with_2_without_a_traceback(script, words, sentence):
    done = support.run_script(f"infer/{script}", *words.split())
    assert done.returncode == 2 and sentence in done.stderr and "Traceback" not in done.stderr


def test_drops_are_torchs_step_lr_a_warm_up_comes_first_and_a_cosine_is_the_usual_one():
    config = cmgan.Config(lr=1e-3, warmup=5.0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.5)
    expected = []
    for _ in range(100):  # epochs of 7 steps
        expected += [optimizer.param_groups[0]["lr"]] * 7
        optimizer.step()
        schedule.step()
    found = [cmgan.learning_rate(step, 700, 7.0, config) for step in range(700)]
    assert found[:5] == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, 1e-3]) and found[5:] == pytest.approx(expected[5:])
    config.schedule = "cosine"
    usual = [optim.learning_rate(step, 700, config) for step in range(700)]
    assert [cmgan.learning_rate(step, 700, 7.0, config) for step in range(700)] == usual


def test_dry_run_prints_sizes_and_memory_and_writes_nothing(trained, capsys):
    _, run = trained(dry_run=True)
    printed = capsys.readouterr().out
    for part in ("parameters", "trained", "dry run: one step", "peak memory", "applied True"):
        assert part in printed
    assert not run.exists()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ds": "ds_configs/zero3.json"}, "ZeRO-3"),
        ({"channels": 6}, "multiple of 4"),
        ({"data": "", "model": "x"}, "--model without --data"),
        ({"model": "nowhere"}, "neither a checkpoint file nor a folder"),
        ({"hold_out": ["nobody"]}, "no id in"),
        ({"test_data": "nowhere"}, "nowhere"),
    ],
)
def test_mistakes_are_one_sentence(trained, changes, sentence):
    with pytest.raises(UserError, match=sentence) as error:
        trained(**changes)
    assert "\n" not in str(error.value)


def test_a_test_clip_that_is_trained_on_is_refused(trained, pairs, tmp_path):
    data = PairDataset(str(pairs), 16000)
    [first, *_] = [i for i in range(len(data)) if i not in data.rows_starting(TINY["hold_out"])]
    renamed = support.write_pairs(tmp_path / "test", [row(data, first) | {"id": "another"}])
    with pytest.raises(UserError, match="clip 'another' is trained on: its sound is that of clip"):
        trained(test_data=str(renamed))


@pytest.mark.distributed
def test_launch_sh_runs_the_embedded_demo(tmp_path):
    words = "--steps 2 --eval-every 0 --seconds 0.5 --samples 1".split()
    done = subprocess.run(
        [support.ROOT / "launch.sh", "cmgan", *words, "--out", tmp_path / "run"],
        env=support.environment(AUDIO_FINETUNE_ENV=support.VENV),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "embedded demo" in done.stdout and (tmp_path / "run" / "export" / "generator.safetensors").exists()
