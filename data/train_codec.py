"""Train a small DAC codec on your own audio, for speech or sounds that no public codec suits.

    python data/train_codec.py --source my_clips --out codec
    python data/encode.py --codec dac --codec-weights codec --source my_clips --out tokens/train

The result is a `DacModel` folder of transformers. Training takes two phases, because a quantizer that starts from
random codebooks collapses before encoder and decoder have learned anything:

1. encoder and decoder alone, an autoencoder without a quantizer (--share of the steps);
2. each codebook is initialised from the residual of the ones before it (principal directions, k-means), then
   everything is trained together.

The loss compares log-mel spectra at four resolutions, the waveform, and in phase 2 the latents with their codes. There
is no discriminator, so the sound is a little buzzy. Stop it at any time: the same command continues where it stopped.
"""

import argparse
import math
import shutil
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "finetune"))  # for common/

from common.errors import UserError, between, command_parser, run_command
from lib.clips import AUDIO_SUFFIXES, walk
from lib.store import hash_file, refuse_existing, versions, write_json
from lib.waveform import Reject, prepare, read_samples

# Windows of the mel spectra in samples, and how many mel bands each resolves; a hop is a quarter of the window.
MELS = {256: 24, 512: 48, 1024: 80, 2048: 80}
SAVE_EVERY = 200


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser(__doc__)
    parser.add_argument("--source", required=True, type=Path, help="folder with audio files, searched recursively")
    parser.add_argument("--out", required=True, type=Path, help="folder for the codec")
    parser.add_argument("--rate", type=between(int, 1), default=16000, help="sample rate in Hz (default: 16000)")
    parser.add_argument(
        "--strides",
        type=between(int, 2),
        nargs="+",
        default=[5, 4, 4, 4],
        help="downsampling of the encoder's stages; their product is the hop (default: 5 4 4 4, 50 frames/s at 16 kHz)",
    )
    parser.add_argument(
        "--encoder-width", type=between(int, 1), default=8, help="channels in the encoder's first stage (default: 8)"
    )
    parser.add_argument(
        "--decoder-width",
        type=between(int, 1),
        default=256,
        help="channels before the decoder's first stage (default: 256)",
    )
    parser.add_argument(
        "--codebooks", type=between(int, 1), default=9, help="number of codebooks (default: 9, as in Dia)"
    )
    parser.add_argument(
        "--codebook-size", type=between(int, 1), default=256, help="entries per codebook (default: 256)"
    )
    parser.add_argument("--codebook-dim", type=between(int, 1), default=8, help="dimensions of an entry (default: 8)")
    parser.add_argument("--steps", type=between(int, 1), default=6000, help="training steps (default: 6000)")
    parser.add_argument("--share", type=float, default=0.4, help="fraction of steps without quantizer (default: 0.4)")
    parser.add_argument("--batch", type=between(int, 1), default=8, help="crops per step (default: 8)")
    parser.add_argument(
        "--crop", type=between(float, 0, above=True), default=0.5, help="seconds per crop (default: 0.5)"
    )
    parser.add_argument(
        "--lr",
        type=between(float, 0, above=True),
        default=1e-3,
        help="peak learning rate; falls to a tenth (default: 0.001)",
    )
    parser.add_argument("--held-out", type=between(int, 1), default=16, help="clips kept for evaluation (default: 16)")
    parser.add_argument(
        "--eval-every", type=between(int, 1), default=500, help="steps between evaluations (default: 500)"
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed of weights and crops (default: 0)")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    check_args(args)
    # Heavy imports only now: --help and mistakes answer at once.
    import torch

    waves = read_waves(args.source, args.rate, args.crop)
    if len(waves) <= args.held_out:
        raise UserError(f"--source {args.source} has {len(waves)} usable clips: --held-out {args.held_out} needs more.")
    order = torch.randperm(len(waves), generator=torch.Generator().manual_seed(args.seed)).tolist()
    held_out = [waves[i] for i in order[: args.held_out]]
    waves = [waves[i] for i in order[args.held_out :]]
    minutes = sum(wave.numel() for wave in waves) / args.rate / 60
    print(f"{minutes:.1f} minutes of audio in {len(waves)} clips, {len(held_out)} clips held out", flush=True)

    model, figures = train(args, waves, held_out)
    save(model, args, figures, minutes)
    print(f"codec in {args.out}: {figures}")


def check_args(args: argparse.Namespace) -> None:
    if not args.source.is_dir():
        raise UserError(f"--source {args.source} is not a folder with audio files.")
    refuse_existing(args.out)
    if not 0 < args.share < 1:
        raise UserError("--share must lie between 0 and 1.")
    if args.decoder_width % 2 ** len(args.strides):
        raise UserError(f"--decoder-width must be divisible by {2 ** len(args.strides)}: each stage halves it.")


def read_waves(source: Path, rate: int, crop: float) -> list:
    """Mono clips at `rate`, each at least one crop long."""
    import torch

    files = sorted(file for file in walk(source) if file.suffix.lower() in AUDIO_SUFFIXES)
    waves = []
    for file in files:
        try:
            samples, its_rate = read_samples(file.read_bytes(), None, None)
            wave = prepare(samples, its_rate, rate, stereo=False, min_seconds=0.05, max_seconds=3600)[0]
        except Reject as reason:
            print(f"left out {file}: {reason}", flush=True)
            continue
        waves.append(torch.nn.functional.pad(wave, (0, max(0, round(crop * rate) - len(wave)))))
    if not waves:
        raise UserError(f"--source {source} has no usable audio files.")
    return waves


# ---- model -----------------------------------------------------------------------------------------------------


def build_model(args: argparse.Namespace):
    """A DacModel whose convolutions keep the variance of their input: the library's 0.02 is for much wider layers."""
    import torch
    from transformers import DacConfig, DacModel

    torch.manual_seed(args.seed)
    config = DacConfig(
        encoder_hidden_size=args.encoder_width,
        decoder_hidden_size=args.decoder_width,
        downsampling_ratios=args.strides,
        upsampling_ratios=args.strides[::-1],
        n_codebooks=args.codebooks,
        codebook_size=args.codebook_size,
        codebook_dim=args.codebook_dim,
        sampling_rate=args.rate,
    )
    model = DacModel(config)
    for module in model.modules():
        if isinstance(module, torch.nn.ConvTranspose1d):
            fan_in = module.in_channels * module.kernel_size[0] / module.stride[0]
        elif isinstance(module, torch.nn.Conv1d):
            fan_in = module.in_channels * module.kernel_size[0]
        else:
            continue
        torch.nn.init.normal_(module.weight, std=fan_in**-0.5)
    for name, module in model.named_modules():
        if name.endswith(("res_unit1.conv2", "res_unit2.conv2", "res_unit3.conv2")):
            module.weight.data *= 0.3  # each residual unit starts near the identity
    return model


def set_codebooks(model, waves: list, seed: int) -> float:
    """Set each codebook from what the ones before it left of the latents; returns the share of energy left at the end.

    A codebook looks at codebook_dim directions of the residual and compares by angle, so k-means does too.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        latents = [model.encoder(wave[None, None])[0].T for wave in waves]
    residual_nd = torch.cat(latents)  # N frames, D dimensions
    residual_nd = residual_nd[torch.randperm(len(residual_nd), generator=generator)[:30000]]
    energy = residual_nd.square().sum()
    for quantizer in model.quantizer.quantizers:
        mean_d = residual_nd.mean(0)
        directions_dk = torch.linalg.svd(residual_nd - mean_d, full_matrices=False).Vh[: quantizer.codebook_dim].T
        projected_nk = (residual_nd - mean_d) @ directions_dk
        entries_ek = spherical_k_means(projected_nk, quantizer.codebook.num_embeddings, generator)
        with torch.no_grad():
            quantizer.in_proj.weight.copy_(directions_dk.T[..., None])
            quantizer.in_proj.bias.copy_(-mean_d @ directions_dk)
            quantizer.out_proj.weight.copy_(directions_dk[..., None])
            quantizer.out_proj.bias.copy_(mean_d)
            quantizer.codebook.weight.copy_(entries_ek)
            residual_nd = residual_nd - quantizer(residual_nd.T[None])[0][0].T
    return float(residual_nd.square().sum() / energy)


def spherical_k_means(points_nk, count: int, generator, rounds: int = 15):
    """Entries whose angle decides, and whose length is the mean length of their points."""
    import torch
    from torch.nn.functional import normalize

    start = torch.randint(len(points_nk), (count,), generator=generator)
    entries_ek = points_nk[start].clone()
    for _ in range(rounds):
        nearest_n = (normalize(points_nk) @ normalize(entries_ek).T).argmax(1)
        sums_ek = torch.zeros_like(entries_ek).index_add_(0, nearest_n, points_nk)
        counts_e = torch.bincount(nearest_n, minlength=count)
        empty_e = counts_e == 0
        entries_ek = sums_ek / counts_e.clamp(min=1)[:, None]
        entries_ek[empty_e] = points_nk[torch.randint(len(points_nk), (int(empty_e.sum()),), generator=generator)]
    return entries_ek


# ---- loss ------------------------------------------------------------------------------------------------------


def mel_filters(rate: int) -> dict:
    from torchaudio.functional import melscale_fbanks

    return {size: melscale_fbanks(size // 2 + 1, 0.0, rate / 2, bands, rate) for size, bands in MELS.items()}


def mel_distance(guess_bt, truth_bt, filters: dict):
    """Mean absolute difference of log10 mel magnitudes, over four resolutions."""
    import torch

    total = 0.0
    for size, filter_fm in filters.items():
        window = torch.hann_window(size)
        logs = []
        for wave_bt in (guess_bt, truth_bt):
            spectrum = torch.stft(wave_bt, size, size // 4, window=window, return_complex=True)
            magnitude_bfn = (spectrum.real.square() + spectrum.imag.square() + 1e-9).sqrt()
            mel_bnm = magnitude_bfn.transpose(1, 2) @ filter_fm
            logs.append(mel_bnm.clamp(min=1e-3).log10())
        total = total + (logs[0] - logs[1]).abs().mean()
    return total / len(filters)


# ---- training --------------------------------------------------------------------------------------------------


def train(args: argparse.Namespace, waves: list, held_out: list) -> tuple:
    import torch

    model = build_model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.8, 0.99), weight_decay=0.0)
    filters = mel_filters(args.rate)
    first_quantized = max(1, round(args.share * args.steps))
    folder = args.out.with_name(args.out.name + ".training")
    step = load_state(folder, args, model, optimizer)
    begin, began_at = time.monotonic(), step

    while step < args.steps:
        if step == first_quantized:
            left = set_codebooks(model.eval(), waves[:200], args.seed)
            print(f"step {step}: codebooks set, {left:.1%} of the latents' energy left", flush=True)
        quantized = step >= first_quantized
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        crops_bt = draw_crops(waves, step, args)
        model.train()

        # ---- one step ------------------------------------------------------------------------------------------
        latents = model.encoder(crops_bt[:, None])
        codes_loss = 0.0
        if quantized:
            latents, _, _, commitment, codebook = model.quantizer(latents)
            codes_loss = 0.25 * commitment.mean() + codebook.mean()
        guess_bt = model.decoder(latents)[:, 0]
        length = min(guess_bt.shape[1], crops_bt.shape[1])  # odd strides lose a few samples at the end
        guess_bt, crops_bt = guess_bt[:, :length], crops_bt[:, :length]
        mel = mel_distance(guess_bt, crops_bt, filters)
        loss = mel + 0.5 * (guess_bt - crops_bt).abs().mean() + codes_loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        # --------------------------------------------------------------------------------------------------------

        step += 1
        if step % 50 == 0:
            seconds = (time.monotonic() - begin) / (step - began_at)
            left = f"{seconds:.2f} s/step, {seconds * (args.steps - step) / 60:.0f} minutes left"
            print(f"step {step}/{args.steps}: mel distance {mel.item():.4f}, {left}", flush=True)
        if step % args.eval_every == 0 and step < args.steps:
            print(f"step {step} held out: {evaluate(model, held_out, args.rate, step >= first_quantized)}", flush=True)
        if step % SAVE_EVERY == 0:
            save_state(folder, args, model, optimizer, step)
    return model, evaluate(model, held_out, args.rate, True)


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """A short warm-up in both phases, then a straight line down to a tenth."""
    start = 0 if step < round(args.share * args.steps) else round(args.share * args.steps)
    return args.lr * min(1.0, (step - start + 1) / 50) * (1 - 0.9 * step / args.steps)


def draw_crops(waves: list, step: int, args: argparse.Namespace):
    """The crops of this step, whatever was drawn before: a resumed training continues exactly."""
    import torch

    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    hop = math.prod(args.strides)
    length = max(1, round(args.crop * args.rate / hop)) * hop
    crops = []
    for number in torch.randint(len(waves), (args.batch,), generator=generator).tolist():
        wave = torch.nn.functional.pad(waves[number], (0, max(0, length - len(waves[number]))))
        start = int(torch.randint(len(wave) - length + 1, (1,), generator=generator))
        crops.append(wave[start : start + length])
    return torch.stack(crops)


def evaluate(model, waves: list, rate: int, quantized: bool) -> dict[str, float]:
    """Mean STOI (intelligibility, 1 is perfect) and mel distance of resynthesised clips."""
    import torch
    from pystoi import stoi

    filters, scores, distances = mel_filters(rate), [], []
    model.eval()
    with torch.no_grad():
        for wave in waves:
            latents = model.encoder(wave[None, None])
            if quantized:
                latents = model.quantizer(latents)[0]
            guess = model.decoder(latents)[0, 0]
            length = min(len(guess), len(wave))
            scores.append(float(stoi(wave[:length].numpy(), guess[:length].numpy(), rate)))
            distances.append(float(mel_distance(guess[None, :length], wave[None, :length], filters)))
    return {"stoi": round(sum(scores) / len(scores), 3), "mel": round(sum(distances) / len(distances), 4)}


# ---- files -----------------------------------------------------------------------------------------------------


def save_state(folder: Path, args: argparse.Namespace, model, optimizer, step: int) -> None:
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "flags": flags_of(args)}
    torch.save(state, folder / "state.tmp")
    (folder / "state.tmp").rename(folder / "state.pt")


def load_state(folder: Path, args: argparse.Namespace, model, optimizer) -> int:
    """The step to go on from."""
    import torch

    if not (folder / "state.pt").exists():
        return 0
    state = torch.load(folder / "state.pt", weights_only=True)
    if state["flags"] != flags_of(args):
        raise UserError(f"{folder} was begun with other flags: use those, or delete it to start again.")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    print(f"continuing at step {state['step']}", flush=True)
    return state["step"]


def flags_of(args: argparse.Namespace) -> dict:
    return {name: str(value) for name, value in vars(args).items() if name not in ("out", "eval_every")}


def save(model, args: argparse.Namespace, figures: dict, minutes: float) -> None:
    """Half precision on disk: transformers loads it in single precision again when asked for."""
    from transformers import DacFeatureExtractor

    temporary = args.out.with_name(args.out.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    model.half().save_pretrained(temporary)
    DacFeatureExtractor(sampling_rate=args.rate, hop_length=model.config.hop_length).save_pretrained(temporary)
    card = {
        "what": f"DacModel, {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M weights",
        "minutes of audio": round(minutes, 1),
        "flags": flags_of(args),
        "held out": figures,
        "sha256": hash_file(temporary / "model.safetensors"),
        "versions": versions("torch", "transformers"),
    }
    write_json(temporary / "training.json", card)
    temporary.rename(args.out)
    shutil.rmtree(args.out.with_name(args.out.name + ".training"), ignore_errors=True)


if __name__ == "__main__":
    run_command(main)
