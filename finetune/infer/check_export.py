"""Compare an exported artifact with the training engine: what common/export_check.py runs after every export.

    python finetune/infer/check_export.py EXPORT PROBE

PROBE is a safetensors file with one clip and the engine's outputs for it. It prints JSON last: "problem", which
is null if the export is what was trained, a sentence, and the differences that were measured.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finetune/, as for the recipes

import torch

from common import hub
from common.runtime import forbid_codec_imports

# Differences are relative to the size of the outputs. In fp32 only the order of sums differs, which is about 1e-6 here
# and 1e-5 in deep networks. What bf16 rounds away is measured on the export itself; the engine rounds at other places.
FP32, BF16_FACTOR, QUANTISED = 1e-3, 3.0, 0.05
OTHER_CODES = 0.1  # share of the codes that rounding may change: the engine generates with other kernels than it trains


# ---- what an artifact computes -----------------------------------------------------------------------------------
# Each yields (name, outputs) of the artifact in all forms that people use, of the "base" that it was trained from, and,
# for a model that was trained in bf16, of the artifact "in bf16".


def dia(folder: Path, flags: dict, inputs: dict) -> Iterator[tuple[str, torch.Tensor]]:
    from transformers import DiaForConditionalGeneration

    text = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    sequences = [ids for ids in (inputs["decoder_input_ids"], inputs["said_input_ids"]) if ids.shape[1]]

    def outputs(model) -> torch.Tensor:
        logits_clv = [model(**text, decoder_input_ids=ids, use_cache=False).logits for ids in sequences]
        return torch.cat([logits.transpose(0, 1).flatten(0, 1).float() for logits in logits_clv])

    def widened(base):
        if flags.get("channels"):
            from models.dia.weights import needs_widening, widen

            if needs_widening(flags["model"], flags["channels"]):
                widen(base, {"zero_optimization": {"stage": 0}})
        return base

    yield from language_model(DiaForConditionalGeneration, folder, flags, outputs, ["logits_dense"], widened)


def higgs(folder: Path, flags: dict, inputs: dict) -> Iterator[tuple[str, torch.Tensor]]:
    from transformers import HiggsAudioV2ForConditionalGeneration

    said = {name.removeprefix("said_"): value for name, value in inputs.items() if name.startswith("said_")}
    sequences = [{name: value for name, value in inputs.items() if not name.startswith("said_")}]
    sequences += [said] if said else []
    targets = [sequence.pop("target_at") for sequence in sequences]

    def outputs(model) -> torch.Tensor:
        logits = [model(**sequence, use_cache=False).logits.flatten(0, 1) for sequence in sequences]
        logits_nv = torch.cat([rows[at] for rows, at in zip(logits, targets, strict=True)])
        return logits_nv.unflatten(-1, (model.config.num_codebooks, -1)).flatten(0, 1).float()

    heads = ["audio_lm_head", "text_lm_head"]
    yield from language_model(HiggsAudioV2ForConditionalGeneration, folder, flags, outputs, heads)


def language_model(model_class, folder: Path, flags: dict, outputs, heads: list[str], prepared=lambda base: base):
    """`heads`: modules that are never quantised; `prepared(base)`: the base as the training starts with it."""
    adapter = folder / "adapter_config.json"
    quantize, options = flags.get("quantize", "none"), {}
    if quantize != "none":
        from common.lora import quantization_config

        options["quantization_config"] = quantization_config(quantize, torch.float32, heads)
    if adapter.is_file():
        from peft import PeftModel

        config = json.loads(adapter.read_text(encoding="utf-8"))
        base = model_class.from_pretrained(
            config["base_model_name_or_path"], revision=config.get("revision"), dtype=torch.float32, **options
        )
        model = PeftModel.from_pretrained(prepared(base), str(folder)).eval()
        yield "adapter", outputs(model)
        with model.disable_adapter():
            yield "base", outputs(model)
        if quantize != "none":
            return  # merging rounds once more: people merge into the base in full precision
        model = model.merge_and_unload().eval()
        yield "merged", outputs(model)
    else:
        model = model_class.from_pretrained(str(folder), dtype=torch.float32).eval()
        yield "model", outputs(model)
    if flags["precision"] == "bf16":
        yield "in bf16", outputs(in_bf16(model))
    if not adapter.is_file():
        del model
        revision = flags.get("revision") or None
        yield (
            "base",
            outputs(prepared(model_class.from_pretrained(flags["model"], revision=revision, dtype=torch.float32))),
        )


def mot(folder: Path, flags: dict, inputs: dict) -> Iterator[tuple[str, torch.Tensor]]:
    from common.lora import quantization_config
    from models.mot.build import load_llama
    from models.mot.evaluate import probe_outputs
    from models.mot.weights import load_adapter, read_description

    description, quantize = read_description(folder), flags.get("quantize", "none")
    base = description["base_model_name_or_path"]
    hub.fetch(base, None, description.get("revision") or "")
    quantization = quantization_config(quantize, torch.float32, ["lm_head"])
    model, _ = load_adapter(folder, None, torch.float32, load_llama(base, torch.float32, quantization=quantization))
    yield "adapter", probe_outputs(model, inputs)
    if flags["precision"] == "bf16" and quantize == "none":
        yield "in bf16", probe_outputs(in_bf16(model), inputs)


def diffusion_buffer(folder: Path, flags: dict, inputs: dict) -> Iterator[tuple[str, torch.Tensor]]:
    from models.diffusion_buffer.evaluate import probe_outputs
    from models.diffusion_buffer.weights import load_network

    network, spec = load_network(str(folder))
    yield "model", probe_outputs(network.eval(), spec, inputs["noisy"])


def cmgan(folder: Path, flags: dict, inputs: dict) -> Iterator[tuple[str, torch.Tensor]]:
    from models.cmgan.evaluate import probe_outputs
    from models.cmgan.weights import load_networks

    generator = load_networks(str(folder))[0].eval()
    generator.set_compute(False, False)
    yield "model", probe_outputs(generator, inputs["noisy"])
    if flags["precision"] == "bf16":
        generator.set_compute(False, True)
        yield "in bf16", probe_outputs(generator, inputs["noisy"])


RECIPES = {
    "dia_lora": dia,
    "dia_full": dia,
    "higgs_clone": higgs,
    "llama_mot": mot,
    "diffusion_buffer": diffusion_buffer,
    "cmgan": cmgan,
}


def in_bf16(model):
    """The model with rounded parameters. Its buffers stay fp32: RoPE's angles would be wrong by radians."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


# ---- the verdict -------------------------------------------------------------------------------------------------


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Root mean square of the difference, in the row where it is largest."""
    return float((a - b).square().mean(-1).max().sqrt())


def lead_over(codes: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """By how much the most likely code exceeds the one that was said, per row; 0 where nothing was said."""
    return torch.where(codes < 0, 0, logits.max(-1).values - logits.gather(-1, codes.clamp(min=0)[:, None])[:, 0])


def judge(engine: torch.Tensor, made: dict[str, torch.Tensor], flags: dict, codes=None, code_count: int = 0) -> dict:
    """`engine`: outputs (rows, values) of the training engine; `made`: those of the artifact in its forms.

    `codes` (rows), for a model of codes, of which there are `code_count`: what the engine said, always the most likely
    code given what it had said before; -1: nothing. The artifact must choose the same, but where two are as likely.
    """
    forms = {name: value for name, value in made.items() if name not in ("base", "in bf16")}
    base = made.get("base")
    is_quantised = flags.get("quantize", "none") != "none"
    size = float(engine.square().mean().sqrt())
    tolerance = size * (QUANTISED if is_quantised else FP32)
    if "in bf16" in made:
        tolerance = max(tolerance, BF16_FACTOR * distance(made["in bf16"], list(forms.values())[-1]))
    other_share = OTHER_CODES if is_quantised or "in bf16" in made else 0.0
    differences = {name: distance(value, engine) for name, value in forms.items()}
    facts = {"tolerance": tolerance, "size": size, "differences": differences, "problem": None}
    for name, value in forms.items():
        if not differences[name] <= tolerance:  # NaN too
            facts["problem"] = f"the outputs of its {name} differ from the engine's by {differences[name]:.2g}, where"
            facts["problem"] += f" {tolerance:.2g} is allowed"
            if base is not None and distance(value, base) <= tolerance:
                facts["problem"] += ", and are those of the base"
        elif codes is not None:
            facts["problem"] = other_codes(name, value, engine, codes, code_count, tolerance, other_share)
        if facts["problem"]:
            return facts
    listed = ", ".join(f"{name} {value:.2g}" for name, value in differences.items())
    facts["sentence"] = f"outputs of {size:.3g} differ by {listed} (allowed: {tolerance:.2g})"
    if codes is not None:
        facts["codes"] = float((codes >= 0).sum())
        facts["sentence"] += f", {facts['codes']:.0f} codes that it says are the same"
    if base is not None:
        facts["base"] = distance(base, engine)
        facts["sentence"] += f", those of the base by {facts['base']:.2g}"
        if facts["base"] <= tolerance:
            facts["sentence"] += ": the training changed less than this check can see"
    return facts


def other_codes(
    name: str, value: torch.Tensor, engine: torch.Tensor, codes, code_count: int, tolerance: float, other_share: float
) -> str | None:
    """What is wrong with the codes that this form of the artifact would choose; None if nothing is."""
    doubt = 2 * max(tolerance, float((value - engine).abs().max()))  # codes that lead by less count as equally likely
    best, second = engine.topk(2).values.unbind(-1)
    is_clear = best - second > doubt
    if bool((value.argmax(-1) != engine.argmax(-1))[is_clear].any()):
        return f"the most likely codes of its {name} are not the engine's"
    is_said = codes >= 0
    others = int((lead_over(codes, value[:, :code_count]) > doubt)[is_said].sum())
    if others > other_share * int(is_said.sum()):
        return f"its {name} would say other codes than the engine, {others} of {int(is_said.sum())}"
    return None


def read_facts(folder: Path) -> tuple[str, dict]:
    """The recipe that made an export, and its flags."""
    for name in ("training_config.json", "adapter_config.json", "config.json"):
        if (folder / name).is_file():
            facts = json.loads((folder / name).read_text(encoding="utf-8"))
            if "recipe" in facts:
                return facts["recipe"], facts.get("training_config") or facts.get("training") or facts
    raise ValueError(f"{folder} does not name its recipe")


def check(folder: Path, probe: Path) -> dict:
    from safetensors.torch import load_file

    inputs = load_file(probe)
    engine, codes, code_count = (inputs.pop(name, None) for name in ("outputs", "codes", "code_count"))
    recipe, flags = read_facts(folder)
    if flags.get("revision"):
        hub.fetch(flags["model"], None, flags["revision"])
    if recipe not in ("cmgan", "diffusion_buffer"):
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
    with torch.no_grad():
        made = dict(RECIPES[recipe](folder, flags, inputs))
    return judge(engine, made, flags, codes, 0 if code_count is None else int(code_count))


def main() -> None:
    forbid_codec_imports()
    print(json.dumps(check(Path(sys.argv[1]), Path(sys.argv[2]))))


if __name__ == "__main__":
    main()
