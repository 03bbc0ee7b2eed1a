"""Embeddings of sounds and captions, and what is computed from them: Fréchet distance and caption agreement."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.errors import UserError

WINDOW_SECONDS = 10.0  # of sound per embedding, unless the model says otherwise


class Embedder(NamedTuple):
    rate: int  # Hz
    sound: Callable  # samples -> (windows, D)
    caption: Callable | None  # text -> (D,), in the same space; None if the model reads no text


def load_embedder(folder: str) -> Embedder:
    """A local model in transformers format: one with get_audio_features (CLAP), or any audio encoder, whose hidden
    states are averaged over time."""
    import torch
    from transformers import AutoModel, AutoProcessor

    if not Path(folder).is_dir():
        raise UserError(f"--embedder {folder} is not a local folder")
    try:
        model = AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True).eval()
        processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"--embedder {folder} cannot be loaded: {str(error).splitlines()[0]}") from None
    extractor = getattr(processor, "feature_extractor", processor)
    rate = extractor.sampling_rate
    # Longer sounds are cut here: CLAP's extractor would take a random part of them.
    window = int(getattr(extractor, "max_length_s", WINDOW_SECONDS) * rate)
    shared_space = hasattr(model, "get_audio_features")

    @torch.inference_mode()
    def sound(wave: np.ndarray) -> np.ndarray:
        pieces = [wave[start : start + window] for start in range(0, len(wave), window)]
        if len(pieces) > 1 and len(pieces[-1]) < window // 2:
            pieces.pop()  # a short rest says little about the sound
        rows = []
        for piece in pieces:
            inputs = extractor(piece, sampling_rate=rate, return_tensors="pt")
            if shared_space:
                rows.append(_tensor(model.get_audio_features(**inputs))[0])
            else:
                rows.append(model(**inputs).last_hidden_state[0].mean(0))
        return torch.stack(rows).float().numpy()

    @torch.inference_mode()
    def caption(text: str) -> np.ndarray:
        inputs = processor.tokenizer(text, return_tensors="pt", truncation=True)
        return _tensor(model.get_text_features(**inputs))[0].float().numpy()

    return Embedder(rate, sound, caption if shared_space else None)


def _tensor(output):
    """transformers returns the features alone, or as pooler_output."""
    return getattr(output, "pooler_output", output)


def agreement(sound: np.ndarray, caption: np.ndarray) -> float:
    """Cosine similarity of a caption and the mean direction of a sound's windows, (windows, D)."""
    directions = sound / np.linalg.norm(sound, axis=1, keepdims=True)
    mean = directions.mean(axis=0)
    return float(mean @ caption / (np.linalg.norm(mean) * np.linalg.norm(caption)))


def frechet(a: np.ndarray, b: np.ndarray) -> float:
    """Fréchet distance between Gaussians fitted to two sets of embeddings, (n, D) each; 0 if they are the same."""
    import torch
    from torchaudio.functional import frechet_distance

    gaussians = []
    for rows in (a, b):
        rows = torch.from_numpy(rows).double()
        # One row has no covariance.
        gaussians += [rows.mean(0), rows.T.cov(correction=min(1, len(rows) - 1))]
    return float(frechet_distance(*gaussians))
