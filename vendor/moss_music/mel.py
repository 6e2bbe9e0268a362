"""Log-mel spectrograms as Whisper defines them, in float64 over a whole source.

16 kHz, 25 ms periodic Hann windows every 10 ms around reflected edges, 128 Slaney mel bins from 0 to 8 kHz, log10,
clamped to 8 below the maximum of the whole source, then (x + 4) / 4. Source of the numbers: openai/whisper.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from transformers.audio_utils import mel_filter_bank, window_function

SAMPLE_RATE = 16_000
N_FFT = 400
HOP_LENGTH = 160
N_MELS = 128
_BLOCK = 4096  # frames transformed at a time, to bound memory


def n_frames(n_samples: int) -> int:
    """Mel frames of `n_samples` samples at 16 kHz: one each whole 10 ms."""
    return n_samples // HOP_LENGTH


@functools.cache
def _filters() -> np.ndarray:
    """Mel weights [N_FFT // 2 + 1, N_MELS], float64."""
    return mel_filter_bank(
        num_frequency_bins=N_FFT // 2 + 1,
        num_mel_filters=N_MELS,
        min_frequency=0.0,
        max_frequency=SAMPLE_RATE / 2,
        sampling_rate=SAMPLE_RATE,
        norm="slaney",
        mel_scale="slaney",
    )


def log_mel(waveform: np.ndarray | torch.Tensor) -> torch.Tensor:
    """The log-mel [128, F] of mono samples [N] at 16 kHz, F = N // 160, as float32 on the CPU.

    Raises `ValueError` for another shape, and under 160 samples, where there is no frame.
    """
    if isinstance(waveform, torch.Tensor):
        waveform = waveform.detach().to("cpu", torch.float64).numpy()
    samples = np.asarray(waveform, dtype=np.float64)
    if samples.ndim != 1:
        raise ValueError(f"waveform has shape {samples.shape}; give mono samples [N] at {SAMPLE_RATE} Hz")
    frames = n_frames(len(samples))
    if frames < 1:
        raise ValueError(f"waveform has {len(samples)} samples; one mel frame needs {HOP_LENGTH} ({SAMPLE_RATE} Hz)")
    padded = np.pad(samples, N_FFT // 2, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, N_FFT)[::HOP_LENGTH][:frames]
    hann = window_function(N_FFT, "hann")
    log_spec = np.empty((N_MELS, frames))
    for start in range(0, frames, _BLOCK):
        power = np.abs(np.fft.rfft(windows[start : start + _BLOCK] * hann)) ** 2  # [block, N_FFT // 2 + 1]
        log_spec[:, start : start + _BLOCK] = np.log10(np.maximum(power @ _filters(), 1e-10)).T
    log_spec = np.maximum(log_spec, log_spec.max() - 8.0)
    return torch.from_numpy((log_spec + 4.0) / 4.0).to(torch.float32)
