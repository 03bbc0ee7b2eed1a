"""How well speech survives data/assets/codec: word error rate and speaker similarity, recordings against resynthesis.

    python data/demos/voices.py --out voices
    python tests/bench/bench_codec.py --voices voices

Needs flite for the first, and for the second: pip install --no-deps pocketsphinx resemblyzer webrtcvad-wheels.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "data")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--voices", type=Path, required=True, help="folder made by data/demos/voices.py")
    parser.add_argument("--codec", type=Path, default=ROOT / "data/assets/codec", help="folder of a DacModel")
    parser.add_argument("--sentences", type=int, default=40, help="sentences per voice")
    args = parser.parse_args()

    import numpy as np
    import torch
    from pocketsphinx import Decoder
    from score import cosine, load_embedder, read_mono, word_error_rate
    from transformers import DacModel

    from demos.voices import VOICES

    codec = DacModel.from_pretrained(args.codec, dtype=torch.float32).eval()
    recogniser = Decoder(jsgf=str(args.voices / "grammar.jsgf"), loglevel="FATAL")
    embed = load_embedder("resemblyzer")

    def resynthesise(wave):
        with torch.no_grad():
            codes = codec.encode(torch.from_numpy(wave)[None, None]).audio_codes
            return codec.decode(audio_codes=codes).audio_values[0].numpy()

    def hear(wave) -> str:
        recogniser.start_utt()
        recogniser.process_raw((wave.clip(-1, 1) * 32767).astype("int16").tobytes(), full_utt=True)
        recogniser.end_utt()
        return recogniser.hyp().hypstr if recogniser.hyp() else ""

    print("| voice | word error rate, recordings | through the codec | similarity, recordings | through the codec |")
    print("|---|---|---|---|---|")
    for voice in VOICES:
        files = sorted((args.voices / voice).glob("*.wav"))[: args.sentences]
        texts = [file.with_suffix(".txt").read_text() for file in files]
        waves = [read_mono(file) for file in files]
        again = [resynthesise(wave) for wave in waves]
        errors = [
            np.mean([word_error_rate(text, hear(wave)) for text, wave in zip(texts, side, strict=True)])
            for side in (waves, again)
        ]
        other = embed(np.concatenate(waves[8:16]))
        alike = [cosine(embed(np.concatenate(side[:8])), other) for side in (waves, again)]
        print(f"| {voice} | {errors[0]:.1%} | {errors[1]:.1%} | {alike[0]:.3f} | {alike[1]:.3f} |", flush=True)


if __name__ == "__main__":
    main()
