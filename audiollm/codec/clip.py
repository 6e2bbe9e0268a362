"""A recording -> interleaved samples at the codec's rate and channels.

Conventions: float32 at full scale 1.0. One channel is duplicated, as many as the codec has are taken as they are, more
are refused: how to fold them down is the caller's choice. Other rates pass `scipy.signal.resample_poly` at the
gcd-reduced ratio with its default filter, as everywhere in this package. Nothing is clipped or normalised.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import soundfile
from scipy import signal

from ..audio import Header, read_header, resample_ratio
from ..errors import ArgumentError, AudioError
from ..request import Waveform, check_rate
from .audio import Audio

Source = str | os.PathLike | Audio | Waveform | np.ndarray


def load_clip(source: Source, sample_rate: int, channels: int, source_rate: int | None = None) -> np.ndarray:
    """A path, Audio, Waveform or array [frames] or [frames, channels] -> float32 [frames * channels].

    An array needs its own `source_rate` in Hz.

    Raises: AudioError as reading any source does, and `unsupported` for more channels than the codec has; ArgumentError.
    """
    name, frames, rate = _frames_of(source, source_rate)
    if frames.shape[1] not in (1, channels):
        raise AudioError(
            f"{name} has {frames.shape[1]} channels, the codec has {channels}; fold them down first, "
            f"e.g. `x.mean(axis=1)` of soundfile's [frames, channels]",
            code="unsupported",
            source=name,
        )
    if not np.isfinite(frames).all():
        at = int(np.flatnonzero(~np.isfinite(frames).all(axis=1))[0])
        raise AudioError(f"{name} holds NaN or infinity at sample {at}", code="non_finite", source=name)
    frames = _resampled(name, frames, rate, sample_rate)
    if frames.shape[1] != channels:
        frames = np.repeat(frames, channels, axis=1)
    return np.array(frames, dtype=np.float32, order="C").reshape(-1)


def _frames_of(source: object, source_rate: int | None) -> tuple[str, np.ndarray, int]:
    """(name, [frames, channels], rate in Hz)."""
    if isinstance(source, (str, os.PathLike)):
        path = Path(os.fspath(source)).expanduser()
        header = read_header(path)
        try:
            data, rate = soundfile.read(path, dtype="float32", always_2d=True)
        except soundfile.LibsndfileError as error:
            raise AudioError(f"{path} cannot be decoded: {error}", code="corrupt", source=path) from error
        if not len(data):
            raise AudioError(f"{path} holds no samples", code="empty", source=path)
        return header.name, data, rate
    if isinstance(source, Audio):
        return (
            "audio",
            source.samples.reshape(-1, source.channels),
            check_rate(source.sample_rate, "Audio(sample_rate)"),
        )
    if isinstance(source, Waveform):
        return "waveform", source.samples[:, None], source.sample_rate
    if hasattr(source, "detach") and hasattr(source, "cpu"):
        source = source.detach().cpu().float().numpy()
    if not isinstance(source, np.ndarray):
        raise ArgumentError(
            f"a clip is a path, an Audio, a Waveform or an array, not a {type(source).__name__}",
            code="bad_argument",
            source="clip",
        )
    if source_rate is None:
        raise ArgumentError("an array needs its rate: sample_rate=44100", code="bad_argument", source="sample_rate")
    if source.dtype.kind != "f":
        raise AudioError(
            f"the clip has dtype {source.dtype}; pass floats at full scale 1.0, for 16-bit integers `x / 32768`",
            code="bad_dtype",
            source="clip",
        )
    if source.ndim not in (1, 2) or source.size == 0:
        raise AudioError(
            f"the clip has shape {source.shape}; pass [frames] or [frames, channels]", code="bad_shape", source="clip"
        )
    data = source[:, None] if source.ndim == 1 else source
    return "clip", data.astype(np.float32), check_rate(source_rate, "sample_rate")


def _resampled(name: str, frames: np.ndarray, rate: int, sample_rate: int) -> np.ndarray:
    if rate == sample_rate:
        return frames
    up, down = resample_ratio(Header(name, None, len(frames), rate, frames.shape[1]), sample_rate)
    return signal.resample_poly(frames, up, down, axis=0).astype(np.float32)
