"""Train the small DAC codec of the demos.

    python tools/make_assets/train_codec.py --source voices --out codec

The result is a `DacModel` folder of transformers. Training takes two phases, because a quantizer that starts from
random codebooks collapses before encoder and decoder have learned anything:

1. encoder and decoder alone, an autoencoder without a quantizer (SHARE of the steps);
2. each codebook is initialised from the residual of the ones before it (principal directions, k-means), then
   everything is trained together.

The loss compares log-mel spectra at four resolutions, the waveform, and in phase 2 the latents with their codes. There
is no discriminator, so the sound is a little buzzy. Stop it at any time: the same command continues where it stopped.
"""

import math
import shutil
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "data"), str(ROOT / "finetune")]

from common.errors import UserError, command_parser, run_command
from lib.clips import AUDIO_SUFFIXES, walk
from lib.store import hash_file, refuse_existing, versions, write_json
from lib.waveform import Reject, prepare, read_samples

RATE = 16000  # Hz
STRIDES = (5, 4, 4, 4)  # of the encoder's stages: 50 frames per second
ENCODER_WIDTH, DECODER_WIDTH = 8, 256
CODEBOOKS, CODEBOOK_SIZE, CODEBOOK_DIM = 9, 256, 8  # nine, as in Dia
STEPS, BATCH, LR, SEED = 6000, 4, 1e-3, 0
SHARE = 0.35  # of the steps without quantizer
CROP = round(0.5 * RATE / math.prod(STRIDES)) * math.prod(STRIDES)  # samples
HELD_OUT = 16  # clips kept for evaluation
# Windows of the mel spectra in samples, and how many mel bands each resolves; a hop is a quarter of the window.
MELS = {256: 24, 512: 48, 1024: 80, 2048: 80}
SAVE_EVERY, EVAL_EVERY = 200, 500


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--source", required=True, type=Path, help="folder with audio files, searched recursively")
    parser.add_argument("--out", required=True, type=Path, help="folder for the codec")
    args = parser.parse_args()
    if not args.source.is_dir():
        raise UserError(f"--source {args.source} is not a folder with audio files.")
    refuse_existing(args.out)
    # Heavy imports only now: --help and mistakes answer at once.
    import torch

    waves = read_waves(args.source)
    if len(waves) <= HELD_OUT:
        raise UserError(f"--source {args.source} has {len(waves)} usable clips, and {HELD_OUT} are held out.")
    order = torch.randperm(len(waves), generator=torch.Generator().manual_seed(SEED)).tolist()
    held_out = [waves[i] for i in order[:HELD_OUT]]
    waves = [waves[i] for i in order[HELD_OUT:]]
    minutes = sum(wave.numel() for wave in waves) / RATE / 60
    print(f"{minutes:.1f} minutes of audio in {len(waves)} clips, {len(held_out)} clips held out", flush=True)

    work = args.out.with_name(args.out.name + ".training")
    model, figures = train(work, waves, held_out)
    save(model, args.out, figures, minutes)
    shutil.rmtree(work, ignore_errors=True)
    print(f"codec in {args.out}: {figures}")


def read_waves(source: Path) -> list:
    """Mono clips, each at least one crop long."""
    import torch

    files = sorted(file for file in walk(source) if file.suffix.lower() in AUDIO_SUFFIXES)
    waves = []
    for file in files:
        try:
            samples, rate = read_samples(file.read_bytes(), None, None)
            wave = prepare(samples, rate, RATE, stereo=False, min_seconds=0.05, max_seconds=3600)[0]
        except Reject as reason:
            print(f"left out {file}: {reason}", flush=True)
            continue
        waves.append(torch.nn.functional.pad(wave, (0, max(0, CROP - len(wave)))))
    if not waves:
        raise UserError(f"--source {source} has no usable audio files.")
    return waves


# ---- model -----------------------------------------------------------------------------------------------------


def build_model():
    """A DacModel whose convolutions keep the variance of their input: the library's 0.02 is for much wider layers."""
    import torch
    from transformers import DacConfig, DacModel

    torch.manual_seed(SEED)
    config = DacConfig(
        encoder_hidden_size=ENCODER_WIDTH,
        decoder_hidden_size=DECODER_WIDTH,
        downsampling_ratios=list(STRIDES),
        upsampling_ratios=list(STRIDES[::-1]),
        n_codebooks=CODEBOOKS,
        codebook_size=CODEBOOK_SIZE,
        codebook_dim=CODEBOOK_DIM,
        sampling_rate=RATE,
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


def set_codebooks(model, waves: list) -> float:
    """Set each codebook from what the ones before it left of the latents; returns the share of energy left at the end.

    A codebook looks at codebook_dim directions of the residual and compares by angle, so k-means does too.
    """
    import torch

    generator = torch.Generator().manual_seed(SEED)
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


def mel_filters() -> dict:
    from torchaudio.functional import melscale_fbanks

    return {size: melscale_fbanks(size // 2 + 1, 0.0, RATE / 2, bands, RATE) for size, bands in MELS.items()}


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


def train(folder: Path, waves: list, held_out: list) -> tuple:
    import torch

    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.8, 0.99), weight_decay=0.0)
    filters = mel_filters()
    first_quantized = round(SHARE * STEPS)
    step = load_state(folder, model, optimizer)
    begin, began_at = time.monotonic(), step

    while step < STEPS:
        if step == first_quantized:
            left = set_codebooks(model.eval(), waves[:200])
            print(f"step {step}: codebooks set, {left:.1%} of the latents' energy left", flush=True)
        quantized = step >= first_quantized
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, first_quantized)
        crops_bt = draw_crops(waves, step)
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
            left = f"{seconds:.2f} s/step, {seconds * (STEPS - step) / 60:.0f} minutes left"
            print(f"step {step}/{STEPS}: mel distance {mel.item():.4f}, {left}", flush=True)
        if step % EVAL_EVERY == 0 and step < STEPS:
            print(f"step {step} held out: {evaluate(model, held_out, step >= first_quantized)}", flush=True)
        if step % SAVE_EVERY == 0:
            save_state(folder, model, optimizer, step)
    return model, evaluate(model, held_out, True)


def learning_rate(step: int, first_quantized: int) -> float:
    """A short warm-up in both phases, then a straight line down to a tenth."""
    start = 0 if step < first_quantized else first_quantized
    return LR * min(1.0, (step - start + 1) / 50) * (1 - 0.9 * step / STEPS)


def draw_crops(waves: list, step: int):
    """The crops of this step, whatever was drawn before: a resumed training continues exactly."""
    import torch

    generator = torch.Generator().manual_seed(SEED * 1_000_003 + step)
    crops = []
    for number in torch.randint(len(waves), (BATCH,), generator=generator).tolist():
        start = int(torch.randint(len(waves[number]) - CROP + 1, (1,), generator=generator))
        crops.append(waves[number][start : start + CROP])
    return torch.stack(crops)


def evaluate(model, waves: list, quantized: bool) -> dict[str, float]:
    """Mean STOI (intelligibility, 1 is perfect) and mel distance of resynthesised clips."""
    import torch
    from pystoi import stoi

    filters, scores, distances = mel_filters(), [], []
    model.eval()
    with torch.no_grad():
        for wave in waves:
            latents = model.encoder(wave[None, None])
            if quantized:
                latents = model.quantizer(latents)[0]
            guess = model.decoder(latents)[0, 0]
            length = min(len(guess), len(wave))
            scores.append(float(stoi(wave[:length].numpy(), guess[:length].numpy(), RATE)))
            distances.append(float(mel_distance(guess[None, :length], wave[None, :length], filters)))
    return {"stoi": round(sum(scores) / len(scores), 3), "mel": round(sum(distances) / len(distances), 4)}


# ---- files -----------------------------------------------------------------------------------------------------


def save_state(folder: Path, model, optimizer, step: int) -> None:
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, folder / "state.tmp")
    (folder / "state.tmp").rename(folder / "state.pt")


def load_state(folder: Path, model, optimizer) -> int:
    """The step to go on from."""
    import torch

    if not (folder / "state.pt").exists():
        return 0
    state = torch.load(folder / "state.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    print(f"continuing at step {state['step']}", flush=True)
    return state["step"]


def save(model, out: Path, figures: dict, minutes: float) -> None:
    """Half precision on disk: transformers loads it in single precision again when asked for."""
    from transformers import DacFeatureExtractor

    temporary = out.with_name(out.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    model.half().save_pretrained(temporary)
    DacFeatureExtractor(sampling_rate=RATE, hop_length=model.config.hop_length).save_pretrained(temporary)
    card = {
        "what": f"DacModel, {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M weights",
        "minutes of audio": round(minutes, 1),
        "held out": figures,
        "sha256": hash_file(temporary / "model.safetensors"),
        "versions": versions("torch", "transformers"),
    }
    write_json(temporary / "training.json", card)
    temporary.rename(out)


if __name__ == "__main__":
    run_command(main)
