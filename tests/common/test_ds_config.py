"""The DeepSpeed JSON against the flags."""

import json
from pathlib import Path

import pytest

from common.config import RunConfig
from common.ds_config import fit_buckets, offloads_optimizer, resolve_ds, stage_of
from common.errors import UserError

FILES = sorted((Path(__file__).resolve().parents[2] / "ds_configs").glob("*.json"))


def resolve(tmp_path, content, world=2, **flags):
    path = tmp_path / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return resolve_ds(str(path), RunConfig(**flags), world)


def leaves(value, path=""):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}")
    else:
        yield path, value


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_every_shipped_file_resolves_with_no_auto_left(file, precision):
    ds = resolve_ds(str(file), RunConfig(precision=precision, accumulation=3, max_grad_norm=0.5), 4)
    assert not [path for path, value in leaves(ds) if value == "auto"]
    assert ds["train_batch_size"] == 12 and ds["gradient_accumulation_steps"] == 3
    assert ds["train_micro_batch_size_per_gpu"] == 1
    assert ds["gradient_clipping"] == 0.5
    assert ds["bf16"]["enabled"] is (precision == "bf16") and ds["fp16"]["enabled"] is False
    assert stage_of(ds) == int(file.stem[4]) and offloads_optimizer(ds) == ("offload" in file.stem)


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_deepspeed_itself_accepts_the_resolved_file(file):
    from deepspeed.runtime.config import DeepSpeedConfig

    ds = DeepSpeedConfig(resolve_ds(str(file), RunConfig(precision="bf16"), 1))
    assert ds.zero_config.stage == int(file.stem[4])


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_the_hf_trainer_fills_the_same_files(file, tmp_path):
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    arguments = TrainingArguments(output_dir=str(tmp_path), per_device_train_batch_size=2, use_cpu=True)
    ds = HfTrainerDeepSpeedConfig(str(file))
    ds.trainer_config_process(arguments)
    assert ds.config["train_micro_batch_size_per_gpu"] == 2
    assert ds.is_zero3() == ("zero3" in file.stem)


def test_repository_files_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert stage_of(resolve_ds("ds_configs/zero3.json", RunConfig(), 1)) == 3


def test_a_missing_file_is_named():
    with pytest.raises(UserError, match="--ds nowhere/x.json: no such file"):
        resolve_ds("nowhere/x.json", RunConfig(), 1)


@pytest.mark.parametrize("content", ['{"bf16": ', "", "[1, 2]", "3", "\x00\x01"])
def test_a_file_that_is_no_json_object_is_refused(content, tmp_path):
    with pytest.raises(UserError, match="ds.json (is not valid JSON|must hold a JSON object)"):
        resolve(tmp_path, content)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"gradient_accumulation_steps": 4}, ["gradient_accumulation_steps to 4", "--accumulation 2"]),
        ({"gradient_clipping": 0.1}, ["gradient_clipping to 0.1", "--max-grad-norm 1"]),
        ({"bf16": {"enabled": False}}, ["bf16.enabled to false", "--precision bf16"]),
        ({"fp16": {"enabled": True}}, ["fp16.enabled to true", "--precision bf16"]),
        ({"train_batch_size": 32}, ["train_batch_size to 32", "--accumulation x 2 ranks", "4"]),
        ({"train_micro_batch_size_per_gpu": 8}, ["train_micro_batch_size_per_gpu to 8", "--micro-tokens"]),
    ],
)
def test_a_contradiction_names_both_sides(content, words, tmp_path):
    with pytest.raises(UserError) as error:
        resolve(tmp_path, content, accumulation=2)
    assert all(word in str(error.value) for word in words), error.value


def test_a_value_that_agrees_with_the_flags_is_accepted(tmp_path):
    content = {"gradient_accumulation_steps": 2, "gradient_clipping": 1, "bf16": {"enabled": True}}
    content |= {"train_batch_size": 4, "zero_optimization": {"stage": 2}}
    assert resolve(tmp_path, content, accumulation=2)["gradient_clipping"] == 1


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_a_section_that_the_flags_decide_is_refused(section, tmp_path):
    with pytest.raises(UserError, match=f"section '{section}'"):
        resolve(tmp_path, {section: {"type": "AdamW"}})
    assert section not in resolve(tmp_path, {section: "auto"}, precision="fp32")


@pytest.mark.parametrize("stage", [4, -1, "two", None, 2.5])
def test_a_stage_that_does_not_exist_is_refused(stage, tmp_path):
    with pytest.raises(UserError, match="zero_optimization.stage"):
        resolve(tmp_path, {"zero_optimization": {"stage": stage}})


@pytest.mark.parametrize("content", [{"bf16": True}, {"zero_optimization": 2}, {"fp16": None}])
def test_a_section_that_is_no_object_is_named(content, tmp_path):
    with pytest.raises(UserError, match=next(iter(content))):
        resolve(tmp_path, content)


def test_without_a_zero_section_nothing_is_sharded(tmp_path):
    assert stage_of(resolve(tmp_path, {}, precision="fp32")) == 0


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_would_lose_gradients_in_bf16_is_refused(stage, tmp_path):
    """DeepSpeed's stage 1 adds micro-batches up in bf16, or, told to use fp32, has other checkpoints than stage 2."""
    with pytest.raises(UserError, match=f"stage {stage}, which .*: use stage 2 or 3, or --precision fp32"):
        resolve(tmp_path, {"zero_optimization": {"stage": stage}}, precision="bf16")
    assert stage_of(resolve(tmp_path, {"zero_optimization": {"stage": stage}}, precision="fp32")) == stage


# ---- precision and size of gradient sums --------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [2, 3])
def test_bf16_gradients_are_added_up_and_sent_in_fp32(stage, tmp_path):
    from deepspeed.runtime.config import DeepSpeedConfig

    found = DeepSpeedConfig(resolve(tmp_path, {"zero_optimization": {"stage": stage}}, world=1))
    assert found.grad_accum_dtype == "fp32" and str(found.communication_data_type) == "torch.float32"
    assert "data_types" not in resolve(tmp_path, {"zero_optimization": {"stage": stage}}, precision="fp32")


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_the_shipped_files_say_so_themselves(file):
    """The HF Trainer reads them too, without what `resolve_ds` fills in."""
    ds = json.loads(file.read_text())
    assert ds["data_types"]["grad_accum_dtype"] == ds["communication_data_type"] == "fp32"


def test_a_users_own_precision_of_sums_stays(tmp_path):
    content = {"zero_optimization": {"stage": 2}, "data_types": {"grad_accum_dtype": "bf16"}}
    found = resolve(tmp_path, content | {"communication_data_type": "bf16"}, world=64)
    assert found["data_types"]["grad_accum_dtype"] == found["communication_data_type"] == "bf16"


def zero_of(ds, trained, device="cuda"):
    return fit_buckets(ds, trained, device)["zero_optimization"]


def test_a_bucket_is_no_larger_than_all_gradients_and_then_nothing_overlaps():
    shipped = resolve_ds("ds_configs/zero2.json", RunConfig(), 2)
    before = json.dumps(shipped)
    small, large = zero_of(shipped, 10_000_000), zero_of(shipped, 10**9)
    assert small["reduce_bucket_size"] == 10_000_000 and small["overlap_comm"] is False
    assert large["reduce_bucket_size"] == 200_000_000 and large["overlap_comm"] is True
    assert json.dumps(shipped) == before, "the original stays"
    sharded = zero_of(resolve_ds("ds_configs/zero3.json", RunConfig(), 2), 10_000_000)
    assert sharded["reduce_bucket_size"] == 10_000_000
    assert sharded["overlap_comm"] is True, "ZeRO-3 gathers weights ahead with it"


def test_what_the_file_sets_stays(tmp_path):
    own = {"stage": 2, "overlap_comm": True, "reduce_scatter": True, "allgather_partitions": True}
    ds = resolve(tmp_path, {"zero_optimization": own})
    assert zero_of(ds, 100, "cpu") == own | {"reduce_bucket_size": 100}


def test_only_a_cpu_gets_the_settings_of_gloo():
    ds = resolve_ds("ds_configs/zero2.json", RunConfig(), 2)
    assert not {"reduce_scatter", "allgather_partitions"} & set(zero_of(ds, 100))
    assert zero_of(ds, 100, "cpu")["reduce_scatter"] is zero_of(ds, 100, "cpu")["allgather_partitions"] is False
