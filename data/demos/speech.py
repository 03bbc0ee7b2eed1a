"""The demo of both Dia recipes: a tiny Dia that speaks, and recordings of a voice that it has never heard.

    python data/demo.py --out demo-speech --model speech

demo-speech/dia             a tiny Dia, trained on two other voices (data/assets/dia)
demo-speech/codec           its codec (data/assets/codec)
demo-speech/tokens/<split>  the new voice, encoded
demo-speech/audio           recordings of some evaluation sentences
demo-speech/grammar.jsgf    all sentences that can be said, for a recogniser

Copies data/assets, which tools/make_assets made: files name their codec and recordings by absolute paths.
"""

import itertools
import json
import random
import shutil
from pathlib import Path

from lib.store import write_json, write_jsonl

ASSETS = Path(__file__).resolve().parents[1] / "assets"
WORDS = (  # of the sentences, such as "bring seven yellow candles"
    "bring show hide sell wash".split(),
    "two three five seven nine".split(),
    "red blue green yellow purple".split(),
    "apples bottles candles tigers windows".split(),
)


def sentences() -> list[str]:
    """All sentences, in an order in which any part has words of every kind."""
    everything = [" ".join(words) for words in itertools.product(*WORDS)]
    random.Random(0).shuffle(everything)
    return everything


def build_parts(folder: Path, final: Path) -> None:
    """Build everything in `folder`, which is then renamed to `final`: paths inside the files must name `final`."""
    shutil.copytree(ASSETS / "codec", folder / "codec")
    shutil.copytree(ASSETS / "dia", folder / "dia")
    shutil.copytree(ASSETS / "voice", folder, dirs_exist_ok=True)
    set_paths(folder, final, "dia")


def set_paths(folder: Path, final: Path, model: str, **facts) -> None:
    """Name the codec and the recordings by their paths in `final`. `facts`: more for each dataset.json."""
    processor = json.loads((folder / model / "processor_config.json").read_text())
    processor["audio_tokenizer"]["audio_tokenizer_name_or_path"] = str(final / "codec")
    write_json(folder / model / "processor_config.json", processor)
    for tokens in (folder / "tokens").iterdir():
        info = json.loads((tokens / "dataset.json").read_text())
        write_json(tokens / "dataset.json", info | {"weights": str(final / "codec")} | facts)
        sources = [json.loads(line) for line in (tokens / "sources.jsonl").read_text().splitlines()]
        write_jsonl(tokens / "sources.jsonl", [[str(final / "audio" / place), *rest] for place, *rest in sources])
