"""Export a checkpoint of any run, finished or not, exactly as the run itself would have; needs no GPU and no ranks.

    python finetune/infer/convert.py --run runs/my-voice                              the best, to runs/my-voice/export
    python finetune/infer/convert.py --run runs/my-voice --step 400 --out voice-400   another one, to another folder
    python finetune/infer/convert.py --model official.ckpt --out live --spec live.json
    python finetune/infer/convert.py --model runs/live/export --onnx --out live.onnx
    python finetune/infer/convert.py --model best_ckpt/ckpt --recipe cmgan --onnx --out generator.onnx

The third converts a Lightning file of the official Diffusion Buffer code, with the settings that the file contains;
--spec sets the others. --onnx writes CMGAN's generator, or the network of a Diffusion Buffer's
stream, for onnxruntime (packages onnx and onnxscript).

./launch.sh convert does the same; ./launch.sh convert native, stereo and average (dia_convert.py) make Dia models from
other formats.
"""

import importlib
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finetune/, as for the recipes

from common.artifacts import find_recipe
from common.errors import UserError, command_parser, run_command
from common.runtime import forbid_codec_imports

ENHANCERS = ("cmgan", "diffusion_buffer")


def parse_args():
    parser = command_parser(__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--run", type=Path, help="run folder of any recipe")
    what.add_argument(
        "--model",
        type=Path,
        help="Lightning file of the official Diffusion Buffer code; with --onnx also an export or CMGAN's weights",
    )
    parser.add_argument(
        "--onnx", action="store_true", help="write an ONNX file of a CMGAN or Diffusion Buffer --model to --out"
    )
    parser.add_argument(
        "--recipe", choices=ENHANCERS, help="with --onnx, only for a file of weights that has no config.json"
    )
    parser.add_argument(
        "--spec", default="", help="JSON file of Diffusion Buffer settings that an official --model does not contain"
    )
    parser.add_argument(
        "--step",
        default="best",
        help="which checkpoint: a step, last, or best by the recipe's score (default: %(default)s; the last if no"
        " evaluation gave a score)",
    )
    parser.add_argument("--out", type=Path, help="folder to write (default: RUN/export)")
    args = parser.parse_args()
    if args.spec and not args.model:
        parser.error("--spec is for a --model of the Diffusion Buffer.")
    if args.model and not args.out:
        parser.error("--model needs --out, the folder or file to write.")
    if args.onnx and not args.model:
        parser.error("--onnx needs --model; RUN/export is the model of a run.")
    if args.recipe and not args.onnx:
        parser.error("--recipe is for --onnx.")
    return args


def convert_onnx(args) -> None:
    """The network of an enhancer as an ONNX file."""
    if find_recipe(args.model, args.recipe, ENHANCERS) == "cmgan":
        if args.spec:
            raise UserError("--spec is for the Diffusion Buffer, and this is a cmgan model.")
        from models.cmgan.onnx_export import write_onnx
        from models.cmgan.weights import load_networks

        generator, _ = load_networks(str(args.model))
        write_onnx(args.out, generator)
    else:
        from models.diffusion_buffer.onnx_export import write_onnx
        from models.diffusion_buffer.weights import load_network

        write_onnx(args.out, *load_network(str(args.model), args.spec))
    print(f"ONNX file {args.out}")


def convert_official(args) -> None:
    """A file of the official Diffusion Buffer code as an export of diffusion_buffer.py."""
    if not args.model.is_file():
        raise UserError(f"--model {args.model} is not a file; a run of this project is converted with --run.")
    from models.diffusion_buffer.weights import load_network, write_export

    network, spec = load_network(str(args.model), args.spec)
    write_export(args.out, network, spec, {"recipe": "diffusion_buffer", "checkpoint": {"file": args.model.name}})
    print(f"export in {args.out}: " + ", ".join(f"{name} {value}" for name, value in vars(spec).items()))


def convert(args) -> None:
    from infer.dispatch import read_recipe

    out = args.out or args.run / "export"
    if out.exists():
        raise UserError(f"{out} exists already: name another folder with --out.")
    if args.model:
        return convert_onnx(args) if args.onnx else convert_official(args)
    name = read_recipe(str(args.run))
    entry = choose(args.run, args.step)
    import torch

    from common import checkpoint, hub
    from common.artifacts import build_config
    from common.ema import Ema
    from common.runs import chosen_facts
    from common.runtime import Process

    recipe, record = importlib.import_module(name), json.loads((args.run / "config.json").read_text(encoding="utf-8"))
    config, process = build_config(recipe.Config, record["config"]), Process(0, 1, torch.device("cpu"))
    config = hub.pin(config, process)
    print(f"exporting step {entry['step']} of {args.run}", flush=True)
    facts = chosen_facts(entry["step"], entry["score"], config)
    if args.step != "best":
        facts["why"] = f"asked for with --step {args.step}"
    path = args.run / "checkpoints" / entry["name"]
    networks, more = rebuild(recipe, config, record, process)
    for tag, network in networks.items():
        averaged = bool(config.ema) and tag != "d"  # CMGAN's discriminator has no average
        fill(network, checkpoint.masters(path, tag, averaged), path)
    model = networks if len(networks) > 1 else networks[checkpoint.TAG]
    recipe.export(model, Ema(None, 0.0), config, out, checkpoint=facts, process=process, **more)
    print(f"export in {out}")


def choose(run: Path, step: str) -> dict:
    """The entry of index.json that --step means."""
    from common.checkpoint import read_index

    entries = read_index(run / "checkpoints")
    if not entries:
        raise UserError(f"{run} holds no checkpoints.")
    if step == "last":
        return entries[-1]
    scored = [entry for entry in entries if entry["score"] is not None and math.isfinite(entry["score"])]
    if step == "best":
        return min(scored, key=lambda entry: entry["score"]) if scored else entries[-1]
    for entry in entries:
        if str(entry["step"]) == step:
            return entry
    listed = ", ".join(str(entry["step"]) for entry in entries)
    raise UserError(f"--step {step}: {run} holds no such checkpoint; write best, last or one of {listed}.")


def rebuild(recipe, config, record: dict, process) -> tuple[dict, dict]:
    """The networks as the recipe builds them, by the names of their parts of a checkpoint, and what else its `export`
    needs. Whole and in one process, whatever the run's ZeRO stage."""
    from common.checkpoint import TAG
    from common.ds_config import WHOLE

    if recipe.__name__ in ("dia_lora", "dia_full"):
        tag_map = record["identity"]["fingerprint"]["tag_map"]
        more = {"tag_map": tag_map, "codec": record.get("codec") or {}}
        return {TAG: recipe.build_model(config, WHOLE, tag_map)}, more
    if recipe.__name__ == "llama_mot":  # parts that are not trained are not in the checkpoint: they are made again
        model = recipe.build_model(config, WHOLE)
        clips = recipe.build_data(config.data, model, recipe.Tokenizer(config.model), config, process, train=True)
        recipe.init_adapter(model, config, clips)
        return {TAG: model}, {"clips": clips}
    if recipe.__name__ == "diffusion_buffer":
        model, spec = recipe.build_model(config, WHOLE)
        return {TAG: model}, {"spec": spec}
    if recipe.__name__ == "cmgan":
        return dict(zip("gd", recipe.build_model(config, WHOLE), strict=True)), {}
    return {TAG: recipe.build_model(config, WHOLE)}, {"codec": record.get("codec") or {}}


def fill(network, weights: dict, path: Path) -> None:
    """Puts a checkpoint's weights and buffers into a network. Trained weights become fp32, even in a bf16 model."""
    trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
    places = trained | dict(network.named_buffers())
    wrong = sorted(set(trained) - set(weights)) + sorted(set(weights) - set(places))
    wrong = wrong or [name for name in weights if weights[name].shape != places[name].shape]
    if wrong:
        raise UserError(
            f"checkpoint {path} does not fit the model of its run: {len(wrong)} weights, such as {wrong[0]}."
        )
    for name, value in weights.items():
        places[name].data = value if name in trained else value.to(places[name].dtype)


def main() -> None:
    forbid_codec_imports()
    run_command(convert, parse_args())


if __name__ == "__main__":
    main()
