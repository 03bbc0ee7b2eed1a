"""What the demo's Dia says before and after fine-tuning, judged by a recogniser and a speaker encoder.

    ./launch.sh demo --out runs/spoken
    python tests/bench/bench_demo_speech.py --run runs/spoken

All 40 evaluation sentences, which no model was trained on; the most likely code each time if not sampled. Similarity is
to recordings of the new voice, but for that of the same sentence.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "data"), str(ROOT / "finetune")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="run folder of ./launch.sh demo; without it only the base is judged")
    args = parser.parse_args()

    from demo import ensure_demo

    from helpers import speech_judge

    demo = ensure_demo(ROOT / "runs" / "demo-assets-speech", "speech")
    judge = speech_judge.Judge(demo)

    def row(name: str, waves: dict, ended: str) -> None:
        errors, similarity = judge.word_errors(waves), judge.similarity(waves)
        print(f"| {name} | {errors:.1%} | {similarity:.3f} | {ended} |", flush=True)

    print("| speech | word error rate | similarity to the new voice | ended by itself |\n|---|---|---|---|")
    row("8 recordings of the new voice", judge.recordings, "")
    row("the new voice through the codec", speech_judge.through_codec(demo), "")
    base = speech_judge.load(demo)
    for tag in ("[S1]", "[S2]"):
        for how in ("", ", sampled with guidance"):
            waves, ended = speech_judge.speak(base, demo, range(40), tag, guided=bool(how))
            row(f"base, `{tag}`{how}", waves, f"{ended:.0%}")
    if args.run:
        waves, ended = speech_judge.speak(speech_judge.load(demo, args.run / "export"), demo, range(40))
        row("tuned, `[S1]`", waves, f"{ended:.0%}")


if __name__ == "__main__":
    main()
