"""Whose voice the demo's Higgs speaks with before and after fine-tuning, judged by a speaker encoder.

    ./launch.sh higgs_clone --out runs/cloned
    python tests/bench/bench_demo_clone.py --run runs/cloned

15 pairs of words that no model was trained on, with references of two voices that none was trained on; sampled.
"Right": closer to the voice of the reference than to the other one. The recogniser knows the grammar of all pairs.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "data"), str(ROOT / "finetune")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="run folder of ./launch.sh higgs_clone; default: only the base")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds to sample with (default: 1)")
    args = parser.parse_args()

    import numpy as np
    from demo import ensure_demo
    from score import load_recogniser, word_error_rate

    from helpers import clone_judge

    demo = ensure_demo(ROOT / "runs" / "demo-assets-clone", "clone")
    judge, hear = clone_judge.Judge(demo), load_recogniser(f"pocketsphinx:{demo}/grammar.jsgf")

    def row(name: str, waves: list, texts: list[str], voices: list[int]) -> None:
        f = judge.figures(waves, voices)
        errors = [word_error_rate(text, hear(wave)) for text, wave in zip(texts, waves, strict=True)]
        voice_errors = [np.mean([e for e, voice in zip(errors, voices, strict=True) if voice == v]) for v in (0, 1)]
        cells = [f"{f['right']:.0%}", f"{f['similarity']:.3f}", f"{f['similarity'] - f['margin']:.3f}"]
        print("| " + " | ".join([name, *cells, *(f"{error:.0%}" for error in voice_errors)]) + " |", flush=True)

    print("| speech | right | similarity to the reference's voice | to the other | word error rate,", end="")
    print(f" {judge.voices[0]} | {judge.voices[1]} |\n|---|---|---|---|---|---|")
    clips = [(clip["wave"], clip["text"], v) for v in (0, 1) for clip in judge.recorded[judge.voices[v]]]
    row("recordings through the codec", *map(list, zip(*clips, strict=True)))
    models = {"base": clone_judge.load(demo)}
    if args.run:
        models["tuned"] = clone_judge.load(demo, args.run / "export")
    for name, model in models.items():
        for seed in range(args.seeds):
            for how, options in (("", {}), (", no reference", {"mute": True})):
                jobs = judge.jobs(**options)
                texts, voices = [text for text, *_ in jobs], [voice for *_, voice in jobs]
                label = f"{name}{how}" + (f", seed {seed}" if args.seeds > 1 else "")
                row(label, judge.speak(model, jobs, seed), texts, voices)


if __name__ == "__main__":
    main()
