"""Synthetic speech for tiny models: four voices that say commands such as "bring seven yellow candles".

    python tools/make_assets/voices.py --out voices

voices/<voice>/<number>.wav and .txt: every voice says all 625 sentences of five verbs, numbers, colours and things. The
words are chosen so that a speech recogniser with this grammar (voices/grammar.jsgf) mistakes few of them. Needs flite
(Debian, Ubuntu: apt-get install flite), which is free software, as are its voices (CMU, BSD-style licences); nothing
else of the project does.
"""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "data"), str(ROOT / "finetune")]

from common.errors import UserError, command_parser, run_command
from demos.speech import WORDS, sentences
from lib.store import refuse_existing

VOICES = ("kal16", "awb", "rms", "slt")


def grammar() -> str:
    """The sentences as a JSpeech grammar, which pocketsphinx reads."""
    parts = " ".join(f"({' | '.join(words)})" for words in WORDS)
    return f"#JSGF V1.0;\ngrammar commands;\npublic <command> = {parts};\n"


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--out", required=True, type=Path, help="folder for the recordings")
    out = parser.parse_args().out
    refuse_existing(out)
    if not shutil.which("flite"):
        raise UserError("flite is not installed, which makes the voices (Debian, Ubuntu: apt-get install flite).")
    draft = out.with_name(out.name + ".tmp")
    shutil.rmtree(draft, ignore_errors=True)
    jobs = []
    for voice in VOICES:
        (draft / voice).mkdir(parents=True)
        for number, text in enumerate(sentences()):
            (draft / voice / f"{number:03d}.txt").write_text(text + "\n")
            jobs.append((voice, text, draft / voice / f"{number:03d}.wav"))
    (draft / "grammar.jsgf").write_text(grammar())
    with ThreadPoolExecutor() as pool:
        for count, _ in enumerate(pool.map(lambda job: speak(*job), jobs), 1):
            if count % 500 == 0:
                print(f"{count} of {len(jobs)} sentences spoken", flush=True)
    draft.rename(out)
    print(out)


def speak(voice: str, text: str, file: Path, *options: str) -> None:
    subprocess.run(["flite", "-voice", voice, *options, "-t", text, "-o", file], check=True)


if __name__ == "__main__":
    run_command(main)
