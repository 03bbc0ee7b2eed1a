"""Checkpoints of a real DeepSpeed engine (ZeRO-2, one rank, CPU): whole or absent, and never dangerous."""

import hashlib
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from common import checkpoint, runtime
from common.config import RunConfig
from common.ds_config import resolve_ds
from common.errors import UserError
from helpers import support

IDENTITY = {"lr": 1e-3, "data_fingerprint": "abc", "lora_groups": ["attn"]}


def build(seed, ema=0.9):
    """An engine over a tiny network, one part of it frozen as LoRA's base is."""
    from common.contracts import LossOutput
    from common.ema import Ema
    from common.engine import start_engine
    from common.optim import build_optimizer, parameter_groups

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    model[0].bias.requires_grad_(False)
    config = RunConfig(precision="fp32", lr=1e-2, max_grad_norm=100.0)
    ds = resolve_ds("ds_configs/zero2.json", config, int(os.environ.get("WORLD_SIZE", "1")))
    optimizer = build_optimizer(parameter_groups(model, config.weight_decay, ("bias",)), config, ds)

    def loss_fn(net, batch):
        return LossOutput((net(batch[0]) - batch[1]).square().sum(), {})

    engine = start_engine(model, loss_fn, optimizer, ds)
    return engine, Ema(engine, ema)


def train(engine, average, steps):
    from common.engine import backward, take_step

    for step in steps:
        draw = torch.Generator().manual_seed(step)
        batch = torch.randn(6, 4, generator=draw), torch.randn(6, 3, generator=draw)
        backward(engine, engine(batch).loss_sum, 6.0, 1, last=True)
        assert take_step(engine)[0]
        average.update(step)


def weights(engine, average):
    from common.engine import full_weights

    with average.applied():
        averaged = full_weights(engine.module.model)
    return list(full_weights(engine.module.model).values()) + list(averaged.values())


@pytest.fixture(scope="module")
def trained(ranks):
    engine, average = build(0)
    train(engine, average, range(3))
    return engine, average


@pytest.fixture(scope="module")
def template(trained, ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    save(folder, *trained, ranks, 3)
    return folder


@pytest.fixture
def saved(template, tmp_path):
    """A checkpoint of step 3 to do harm to."""
    shutil.copytree(template, tmp_path / "checkpoints")
    return tmp_path / "checkpoints" / "step-00000003"


def save(folder, engine, average, ranks, step, keep=2, score=None, **more):
    return start_save(folder, engine, average, ranks, step, keep, score, background=False, **more).path


def start_save(folder, engine, average, ranks, step, keep=2, score=None, background=True, **more):
    state = {"step": step, "best": score, "identity": IDENTITY}
    return checkpoint.save(folder, engine, state, average, ranks, keep, score, background=background, **more)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def listed(folder):
    return [entry["name"] for entry in checkpoint.read_index(folder)]


# ---- saving and loading ----------------------------------------------------------------------------------------


def test_the_files_hold_nothing_that_loading_would_have_to_trust(saved):
    """Such as an enum, which Python 3.11.2 pickles as a call of getattr: nothing saved with it could be loaded."""
    unsafe = set()
    for file in saved.rglob("*.pt"):
        unsafe |= set(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    assert unsafe <= {
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.utils.tensor_fragment.fragment_address",
    }


def test_training_goes_on_bitwise_after_loading(saved, ranks):
    engine, average = build(0)
    train(engine, average, range(6))
    expected = weights(engine, average)
    engine, average = build(1)
    engine.module.model[0].load_state_dict(build(0)[0].module.model[0].state_dict())  # the frozen base is not saved
    state = checkpoint.load(saved, engine, average, ranks, IDENTITY)
    assert state["step"] == 3
    train(engine, average, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(weights(engine, average), expected, strict=True))


def test_frozen_weights_are_not_saved(saved):
    (file,) = saved.rglob("*model_states.pt")
    assert "model.0.bias" not in torch.load(file, weights_only=False)["module"]


def test_copies_are_what_they_were(saved):
    """Shapes stay shapes: DeepSpeed's own converters ask them for their size."""
    (file,) = saved.rglob("*model_states.pt")
    shapes = torch.load(file, weights_only=False)["param_shapes"]
    assert all(type(shape) is torch.Size for group in shapes for shape in group.values())


def test_nothing_but_the_checkpoint_and_the_index_is_left(template):
    assert names(template) == ["index.json", "step-00000003"]
    manifest = json.loads((template / "step-00000003" / "manifest.json").read_text())
    files = {str(p.relative_to(template / "step-00000003")) for p in (template / "step-00000003").rglob("*.*")}
    assert files == {*manifest, "manifest.json"}


def test_saving_a_step_again_replaces_it(saved, trained, ranks):
    save(saved.parent, *trained, ranks, 3, score=0.5)
    assert checkpoint.read_index(saved.parent) == [{"name": "step-00000003", "step": 3, "score": 0.5}]
    assert checkpoint._damage(saved) is None


# ---- retention -------------------------------------------------------------------------------------------------


def test_the_newest_and_the_best_are_kept_and_foreign_folders_untouched(trained, ranks, tmp_path):
    foreign = ["step-best", "step-00000099", ".step-00000002.tmp.old", "step-1", "other"]
    for name in foreign:
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").write_text("x")
    (tmp_path / "notes.txt").write_text("x")
    for step, score in enumerate([float("nan"), 0.2, 0.5, None, 0.9, 0.3], start=1):
        save(tmp_path, *trained, ranks, step, keep=2, score=score)
        mine = set(names(tmp_path)) - {*foreign, "notes.txt", "index.json"}
        assert mine == set(listed(tmp_path))
    assert listed(tmp_path) == ["step-00000002", "step-00000005", "step-00000006"]
    assert all((tmp_path / name / "precious").exists() for name in foreign)


def test_without_scores_exactly_keep_are_kept(trained, ranks, tmp_path):
    for step in range(1, 6):
        save(tmp_path, *trained, ranks, step, keep=3)
    assert listed(tmp_path) == [f"step-0000000{n}" for n in (3, 4, 5)]


def test_a_renamed_checkpoint_is_not_the_projects_any_more(saved, trained, ranks):
    saved.rename(saved.parent / "my-favourite")
    for step in (4, 5, 6):
        save(saved.parent, *trained, ranks, step)
    assert names(saved.parent) == ["index.json", "my-favourite", "step-00000005", "step-00000006"]


@pytest.mark.parametrize("name", ["../precious", "..", ".", "step-00000003/../../precious"])
def test_an_index_that_points_outside_deletes_nothing(saved, trained, ranks, name):
    precious = saved.parent.parent / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    index = saved.parent / "index.json"
    content = json.loads(index.read_text())
    content["checkpoints"].insert(0, {"name": name, "step": 1, "score": None})
    index.write_text(json.dumps(content))
    with pytest.raises(UserError, match="index.json"):
        for step in (4, 5, 6):
            save(saved.parent, *trained, ranks, step)
    assert (precious / "file").exists() and saved.exists()


KILLED = """
import os, signal, sys
sys.path[:0] = {path!r}
from test_checkpoint_helper import build, save
from pathlib import Path
from common import checkpoint
from common.runtime import init_process
ranks = init_process()
engine, average = build(0)
folder = Path({folder!r})
save(folder, engine, average, ranks, 1)
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
checkpoint.{victim} = die
save(folder, engine, average, ranks, 2)
"""


@pytest.mark.fault
def test_a_kill_before_the_index_is_written_leaves_the_older_one_in_charge(ranks, tmp_path):
    """Killed after the rename: the new folder is whole, but nothing vouches for it."""
    folder = tmp_path / "checkpoints"
    shutil.copy(__file__, tmp_path / "test_checkpoint_helper.py")
    code = KILLED.format(path=[str(tmp_path), *sys.path], folder=str(folder), victim="_retain")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"MASTER_PORT": port}, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]
    assert names(folder) == ["index.json", "step-00000001", "step-00000002"]
    assert checkpoint.choose("auto", folder, ranks) == folder / "step-00000001"
    engine, average = build(0)
    assert checkpoint.load(folder / "step-00000001", engine, average, ranks, IDENTITY)["step"] == 1
    save(folder, engine, average, ranks, 2)
    assert listed(folder) == ["step-00000001", "step-00000002"]


def test_a_draft_that_a_kill_left_behind_is_no_checkpoint(saved, trained, ranks):
    draft = saved.parent / ".step-00000004.tmp"
    draft.mkdir()
    (draft / "half").write_text("x")
    assert checkpoint.choose("auto", saved.parent, ranks) == saved
    final = save(saved.parent, *trained, ranks, 4)
    assert not draft.exists() and not (final / "half").exists()


# ---- choosing --------------------------------------------------------------------------------------------------


def test_auto_takes_the_newest_or_starts_afresh(saved, ranks, tmp_path):
    assert checkpoint.choose("auto", saved.parent, ranks) == saved
    assert checkpoint.choose("auto", tmp_path / "nowhere", ranks) is None


def test_never_refuses_a_folder_that_was_used(saved, ranks, tmp_path):
    assert checkpoint.choose("never", tmp_path / "nowhere", ranks) is None
    with pytest.raises(UserError, match="already holds checkpoints"):
        checkpoint.choose("never", saved.parent, ranks)


def test_a_path_must_be_a_complete_checkpoint(saved, ranks):
    assert checkpoint.choose(str(saved), Path("elsewhere"), ranks) == saved
    (saved / "manifest.json").unlink()
    for path in (saved, saved.parent, saved / "nowhere"):
        with pytest.raises(UserError, match=f"--resume {path} is not a complete checkpoint"):
            checkpoint.choose(str(path), saved.parent, ranks)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"checkpoints": [{}]}', '{"checkpoints": 3}', "null"])
def test_a_damaged_index_is_refused_by_name(saved, ranks, content):
    (saved.parent / "index.json").write_text(content)
    with pytest.raises(UserError, match="index.json"):
        checkpoint.choose("auto", saved.parent, ranks)


# ---- damage ----------------------------------------------------------------------------------------------------


def refused(path, ranks, words):
    with pytest.raises(UserError, match=words) as error:
        checkpoint.choose(str(path), path.parent, ranks)
    assert str(path) in str(error.value)


def do_harm(file, harm):
    data = bytearray(file.read_bytes())
    if harm == "delete":
        file.unlink()
    elif harm == "truncate":
        file.write_bytes(data[:-1])
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes(data)


@pytest.mark.fault
@pytest.mark.parametrize("harm", ["truncate", "flip", "delete"])
@pytest.mark.parametrize("pattern", ["*model_states.pt", "*optim_states.pt", "ema-*.pt", "trainer_state.json"])
def test_harm_to_any_file_is_found_and_named(saved, ranks, harm, pattern):
    (file,) = saved.rglob(pattern)
    do_harm(file, harm)
    refused(saved, ranks, file.name)


@pytest.mark.fault
@pytest.mark.parametrize("harm", ["truncate", "flip", "delete", "manifest", "folder"])
def test_auto_goes_back_to_the_newest_whole_one_and_says_so(saved, trained, ranks, capsys, harm):
    newest = save(saved.parent, *trained, ranks, 4)
    if harm == "folder":
        shutil.rmtree(newest)
    else:
        file = newest / "manifest.json" if harm == "manifest" else next(newest.rglob("*optim_states.pt"))
        do_harm(file, "delete" if harm == "manifest" else harm)
    assert checkpoint.choose("auto", saved.parent, ranks) == saved
    assert f"warning: checkpoint {newest} is damaged" in capsys.readouterr().out
    for step in (5, 6):  # what was damaged takes no place of the two that are kept
        save(saved.parent, *trained, ranks, step)
        assert len(listed(saved.parent)) == 2 and newest.name not in listed(saved.parent)


@pytest.mark.fault
def test_auto_never_starts_over_beside_checkpoints(saved, trained, ranks):
    """All are damaged, or the index is lost: an error, or the newest folder; not step 0."""
    (saved.parent / "index.json").unlink()
    (saved.parent / "step-00000009").mkdir()  # no manifest: never finished
    assert checkpoint.choose("auto", saved.parent, ranks) == saved
    do_harm(saved / "trainer_state.json", "flip")
    with pytest.raises(UserError, match="every checkpoint in .* is damaged"):
        checkpoint.choose("auto", saved.parent, ranks)


@pytest.mark.fault
@pytest.mark.parametrize("content", ["", "{", "{}", "[]", "null"])
def test_a_manifest_that_vouches_for_nothing_is_refused(saved, ranks, content):
    (saved / "manifest.json").write_text(content)
    refused(saved, ranks, "manifest.json")


@pytest.mark.fault
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("pattern", ["", "trainer_state.json", "*optim_states.pt"])
def test_what_belongs_to_another_user_is_refused_unless_forced(saved, ranks, pattern):
    file = next(saved.rglob(pattern)) if pattern else saved
    os.chown(file, 12345, -1)
    for resume in ("auto", str(saved)):
        with pytest.raises(UserError, match=f"{file} belongs to user 12345"):
            checkpoint.choose(resume, saved.parent, ranks)
        assert checkpoint.choose(resume, saved.parent, ranks, force=True) == saved


@pytest.mark.fault
@pytest.mark.parametrize("pattern", ["", "trainer_state.json", "*optim_states.pt"])
def test_a_symbolic_link_is_refused(saved, ranks, tmp_path, pattern):
    file = next(saved.rglob(pattern)) if pattern else saved
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=f"{file} is a symbolic link"):
        checkpoint.choose("auto", saved.parent, ranks)


class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.fault
@pytest.mark.parametrize("pattern", ["*model_states.pt", "*optim_states.pt", "ema-*.pt"])
def test_a_planted_pickle_never_runs_though_its_checksum_is_right(saved, ranks, tmp_path, pattern):
    (file,) = saved.rglob(pattern)
    marker = tmp_path / "it-ran"
    content = torch.load(file, weights_only=False)
    torch.save({"inside": Payload(marker), "rest": content} if pattern != "ema-*.pt" else [Payload(marker)], file)
    manifest = json.loads((saved / "manifest.json").read_text())
    manifest[str(file.relative_to(saved))] = hashlib.sha256(file.read_bytes()).hexdigest()
    (saved / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(pickle.UnpicklingError):
        checkpoint.load(saved, *build(0), ranks, IDENTITY)
    assert not marker.exists()


def test_the_payload_would_run_if_it_were_let(tmp_path):
    """Proof that the test above could fail."""
    pickle.loads(pickle.dumps(Payload(tmp_path / "it-ran")))
    assert (tmp_path / "it-ran").exists()


# ---- another run -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lr": 2e-3}, "lr: 0.001 then, 0.002 now"),
        ({"data_fingerprint": "xyz"}, "data_fingerprint: 'abc' then, 'xyz' now"),
        ({"new_flag": 1}, "new_flag: None then, 1 now"),
    ],
)
def test_another_run_is_refused_with_the_field_and_both_values_unless_forced(saved, ranks, capsys, change, words):
    engine, average = build(1)
    before = weights(engine, average)
    capsys.readouterr()
    with pytest.raises(UserError, match=words) as error:
        checkpoint.load(saved, engine, average, ranks, IDENTITY | change)
    assert str(saved) in str(error.value) and "--force-resume" in str(error.value)
    assert all(torch.equal(a, b) for a, b in zip(weights(engine, average), before, strict=True)), "nothing was loaded"
    state = checkpoint.load(saved, engine, average, ranks, IDENTITY | change, force=True)
    assert state["step"] == 3 and capsys.readouterr().out == ""
    checkpoint.warn_of_another_run(state, IDENTITY | change)
    assert words in capsys.readouterr().out
    assert not all(torch.equal(a, b) for a, b in zip(weights(engine, average), before, strict=True))


# ---- in the background -----------------------------------------------------------------------------------------


def slow_disk(monkeypatch):
    """Lets the test decide when files may be written."""
    go = threading.Event()
    real = torch.save
    monkeypatch.setattr(torch, "save", lambda *words: (go.wait(30), real(*words)))
    return go


def test_a_checkpoint_in_the_background_holds_the_step_it_was_asked_for(ranks, tmp_path, monkeypatch):
    engine, average = build(0)
    train(engine, average, range(3))
    go, state = slow_disk(monkeypatch), {"step": 3, "identity": IDENTITY, "loop_state": {"seen": [1, 2]}}
    pending = checkpoint.save(tmp_path, engine, state, average, ranks, 2, None, background=True)
    train(engine, average, range(3, 5))  # would be in the file if it were not copied
    state["loop_state"]["seen"].append(3)
    assert listed(tmp_path) == [] and pending.thread.is_alive()
    go.set()
    pending.wait()
    expected = weights(engine, average)
    again, its_average = build(0)
    loaded = checkpoint.load(checkpoint.choose("auto", tmp_path, ranks), again, its_average, ranks, IDENTITY)
    assert loaded["loop_state"] == {"seen": [1, 2]}
    train(again, its_average, range(3, 5))
    assert all(torch.equal(a, b) for a, b in zip(weights(again, its_average), expected, strict=True))


def test_without_room_for_a_copy_it_is_written_at_once(trained, ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "free_memory", lambda: 1000)
    pending = start_save(tmp_path, *trained, ranks, 3)
    assert listed(tmp_path) == [pending.path.name] and not pending.thread.is_alive()


@pytest.mark.fault
def test_a_file_that_cannot_be_written_is_an_error_where_it_is_waited_for(saved, trained, ranks, monkeypatch):
    monkeypatch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    pending = start_save(saved.parent, *trained, ranks, 4)
    with pytest.raises(UserError, match=r"could not be written \(.*No space left on device; [0-9.,]+ MB are free"):
        pending.wait()
    assert runtime.stop_requested(), "the training ends at its next step"
    assert names(saved.parent) == ["index.json", saved.name]
    assert checkpoint.choose("auto", saved.parent, ranks) == saved


TWO_RANKS = """
import os, sys
sys.path[:0] = {path!r}
import torch
from test_checkpoint_helper import build, start_save
from pathlib import Path
from common import checkpoint
from common.errors import UserError
from common.runtime import init_process
ranks = init_process()
engine, average = build(0)
folder = Path({folder!r})
start_save(folder, engine, average, ranks, 1).wait()
if ranks.rank == 1:
    write, real = {write}, checkpoint.write_json
    if write == "nothing":
        def full(*_):
            raise OSError(28, "No space left on device")
        torch.save = full
    else:  # to a disk that the first rank does not see
        checkpoint.write_json = lambda path, value: None if path.name.startswith("done-") else real(path, value)
checkpoint.VISIBLE_SECONDS = 2
try:
    start_save(folder, engine, average, ranks, 2).wait()
except UserError as error:
    print("refused:", error, flush=True)
os._exit(0)  # as the recipes end: at interpreter exit the ranks would tear down their process group against each other
"""


@pytest.mark.fault
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("write", "reason"), [("nothing", "No space left on device"), ("elsewhere", "all nodes must share --out")]
)
def test_what_one_rank_could_not_write_is_an_error_on_all_and_no_checkpoint(tmp_path, write, reason):
    shutil.copy(__file__, tmp_path / "test_checkpoint_helper.py")
    script, folder = tmp_path / "script.py", tmp_path / "checkpoints"
    script.write_text(TWO_RANKS.format(path=[str(tmp_path), *sys.path], folder=str(folder), write=repr(write)))
    codes, outputs = support.finish(support.start_ranks(script, []), timeout=300)
    assert codes == [0, 0], outputs[0][-2000:]
    for output in outputs:
        refused = output.splitlines()[-1]
        assert refused.startswith("refused: checkpoint") and reason in refused
    assert names(folder) == ["index.json", "step-00000001"] and listed(folder) == ["step-00000001"]


@pytest.mark.fault
@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount")
def test_a_full_disk_is_foreseen(trained, ranks, tmp_path):
    """A real file system of half a megabyte, room for the checkpoint of the tiny network but not for the rest."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", folder], check=True)
    try:
        with pytest.raises(UserError, match=r"needs 1.0 MB and 0.5 MB are free"):
            save(folder / "checkpoints", *trained, ranks, 3)
        assert list((folder / "checkpoints").iterdir()) == []
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        with pytest.raises(UserError, match=f"checkpoints cannot be written to {folder}.* .Read-only file system"):
            save(folder / "checkpoints", *trained, ranks, 3)
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.fault
def test_an_end_at_any_moment_leaves_the_old_or_the_new_checkpoint(trained, ranks, template, tmp_path, monkeypatch):
    """Every flush, rename and removal of a save in turn is its last; what a kill would leave is on the disk."""

    class Killed(BaseException):
        pass

    monkeypatch.setattr(threading, "excepthook", lambda *_: None)
    moments, chosen = 0, set()
    while True:
        folder = tmp_path / str(moments)
        shutil.copytree(template, folder)
        left = [moments]
        with monkeypatch.context() as patch:
            for module, name in ((os, "fsync"), (os, "replace"), (shutil, "rmtree")):
                real = getattr(module, name)

                def until(*words, real=real, left=left, **more):
                    left[0] -= 1
                    if left[0] < 0:
                        raise Killed
                    return real(*words, **more)

                patch.setattr(module, name, until)
            try:
                pending = start_save(folder, *trained, ranks, 4, keep=2)
                pending.thread.join()
                ended = left[0] < 0
            except Killed:
                ended = True
        path = checkpoint.choose("auto", folder, ranks)
        chosen.add(path.name)
        assert checkpoint._damage(path) is None
        save(folder, *trained, ranks, 4)
        assert listed(folder) == ["step-00000003", "step-00000004"]
        assert names(folder) == ["index.json", "step-00000003", "step-00000004"]
        if not ended:
            break
        moments += 1
    assert moments > 10 and chosen == {"step-00000003", "step-00000004"}


# ---- several engines -------------------------------------------------------------------------------------------


def test_two_engines_and_what_a_rank_holds_are_saved_and_go_on_together(ranks, tmp_path):
    (first, average), (second, other) = build(0), build(3)
    for engine, its_average in ((first, average), (second, other)):
        train(engine, its_average, range(2))
    state, mine = {"step": 2, "identity": IDENTITY}, {"past": torch.arange(3.0)}
    path = checkpoint.save(tmp_path, {"g": first, "d": second}, state, average, ranks, 2, None, mine).path
    assert {"g", "d"} <= {entry.name for entry in path.iterdir()}
    for engine, its_average in ((first, average), (second, other)):
        train(engine, its_average, range(2, 4))
    expected = weights(first, average) + [p.clone() for p in second.module.parameters()]

    (again, average), (partner, other) = build(0), build(3)
    checkpoint.load(path, {"g": again, "d": partner}, average, ranks, IDENTITY)
    [state] = checkpoint.rank_states(path)
    assert torch.equal(state["past"], mine["past"])
    for engine, its_average in ((again, average), (partner, other)):
        train(engine, its_average, range(2, 4))
    found = weights(again, average) + [p.clone() for p in partner.module.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
