"""The codec's identity: compared with what a model needs, recorded, and found again."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from common import codec
from common.codec import codec_identity, find_codec, hash_weights, local_codec, recorded_codec, refuse_other_codec
from common.errors import UserError

DAC = {"codec": "dac", "sample_rate": 44100, "hop": 512, "weights": "some/dac", "weights_sha256": "1" * 64}


@dataclass
class Tokens:
    info: dict = field(default_factory=lambda: dict(DAC))
    folder: str = "tokens"


@pytest.fixture
def weights(tmp_path):
    """A codec's folder with two weight files."""
    folder = tmp_path / "dac"
    folder.mkdir()
    for name in ("b.safetensors", "a.safetensors", "config.json"):
        (folder / name).write_bytes(name.encode() * 1000)
    return folder


def test_the_hash_is_that_of_all_weight_files_in_the_order_of_their_names(weights):
    plain = hashlib.sha256(b"a.safetensors" * 1000 + b"b.safetensors" * 1000).hexdigest()
    assert hash_weights(weights) == plain
    assert hash_weights(weights / "config.json") == hashlib.sha256(b"config.json" * 1000).hexdigest()


@pytest.mark.parametrize("fact, value", [("name", "encodec"), ("sample_rate", 24000), ("hop", 320)])
def test_another_rate_hop_or_kind_is_refused_with_both_values(fact, value):
    expected = {"name": "dac", "sample_rate": 44100, "hop": 512}
    refuse_other_codec(Tokens(), expected, "--model m")
    with pytest.raises(UserError, match=f"{fact} = {codec_identity(DAC)[fact]!r} but --model m needs {value!r}"):
        refuse_other_codec(Tokens(), expected | {fact: value}, "--model m")


def test_other_weights_are_refused_wherever_their_hash_is_known(weights, capsys):
    refuse_other_codec(Tokens(), {"place": "some/dac", "sha256": "1" * 64}, "--data")
    with pytest.raises(UserError, match=r"\(some/dac, 1111\w+\) than those of --data \(some/dac, 2222"):
        refuse_other_codec(Tokens(), {"place": "some/dac", "sha256": "2" * 64}, "--data")
    with pytest.raises(UserError, match="encoded with other codec weights"):
        refuse_other_codec(Tokens(), {"place": str(weights)}, "--model m")
    own = Tokens(DAC | {"weights_sha256": hash_weights(weights)})
    refuse_other_codec(own, {"place": str(weights)}, "--model m")
    assert not capsys.readouterr().out, "the same weights in another place are no reason to warn"


def test_a_hub_id_is_compared_by_the_copy_in_the_cache(weights, monkeypatch):
    """Without a question to the hub."""
    asked = []

    def snapshot(place, revision, allow_patterns, local_files_only):
        asked.append((place, local_files_only))
        return str(weights)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(UserError, match="other codec weights"):
        refuse_other_codec(Tokens(), {"place": "other/dac"}, "--model m")
    assert asked == [("other/dac", True)]


def test_weights_that_cannot_be_compared_are_only_a_warning(capsys, monkeypatch):
    monkeypatch.setattr(codec, "local_codec", lambda place: None)
    refuse_other_codec(Tokens(), {"place": "some/dac"}, "--model m")
    assert not capsys.readouterr().out
    refuse_other_codec(Tokens(), {"place": "other/dac"}, "--model m")
    assert "encoded with the codec some/dac, --model m names other/dac" in capsys.readouterr().out
    # One codec in two formats: no byte is the same.
    refuse_other_codec(Tokens(), {"place": "w.pth", "sha256": "2" * 64}, "--model m")
    assert "warning" in capsys.readouterr().out


def test_the_record_of_an_export_a_run_and_a_checkpoint(tmp_path):
    identity = codec_identity(DAC)
    run = tmp_path / "run"
    export, checkpoint = run / "export", run / "checkpoints/step-1"
    for folder in (export, checkpoint):
        folder.mkdir(parents=True)
    (export / "config.json").write_text('{"model_type": "dia"}')
    assert recorded_codec(export) == recorded_codec(checkpoint) == {}
    (run / "config.json").write_text(json.dumps({"codec": identity}))
    assert recorded_codec(run) == recorded_codec(checkpoint) == recorded_codec(export) == identity
    (export / "codec.json").write_text(json.dumps(identity | {"hop": 7}))
    assert recorded_codec(export)["hop"] == 7


def test_a_codec_is_found_again_or_named(weights, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    record = {"place": str(weights), "sha256": hash_weights(weights)}
    assert find_codec(None, record) == weights and find_codec(None, {"place": str(weights)}) == weights
    (weights / "a.safetensors").write_bytes(b"trained further")
    with pytest.raises(UserError, match=rf"{weights} \(SHA-256 {record['sha256'][:12]}\) is no longer the one"):
        find_codec(None, record)
    assert find_codec(str(weights), record) == weights and "is not the file" in capsys.readouterr().err
    for place in (str(tmp_path / "gone"), "some/hub-id"):
        with pytest.raises(UserError, match=f"codec {place} .* not on this machine; give it as --codec: {place} "):
            find_codec(None, record | {"place": place})
    with pytest.raises(UserError, match="--codec is needed"):
        find_codec(None, {})


def test_a_path_is_never_asked_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **b: pytest.fail("asked"))
    for place in (str(tmp_path / "gone"), "./gone/codec", "runs/gone/codec", "gone.pth", "", None):
        assert local_codec(place) is None
    assert local_codec(str(tmp_path)) == Path(tmp_path)
