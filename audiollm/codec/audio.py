"""Decoded audio: samples that keep their rate and channels.

Conventions: float32 at full scale 1.0, interleaved (L R L R ...) as the model makes them and never clamped; `len`
counts floats of all channels, `duration` is in seconds.
"""

from __future__ import annotations

import base64
import html
import io
import os
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from ..errors import ArgumentError, AudioError

# A player holds its sound inside the notebook file, so only so much of it.
PLAYER_SECONDS = 120
_WAV_BYTES_MAX = 2**32 - 64
_BLOCK = 1 << 20


@dataclass(frozen=True, eq=False, repr=False)
class Audio:
    """A waveform with its rate attached.

    Parameters: `samples` [frames * channels] float32, interleaved (any sequence is copied to a read-only array);
    `sample_rate` in Hz, 0 for unknown; `channels`.
    `numpy.asarray(audio)` is [frames, channels], or [frames] for one channel, as soundfile lays it out.

    Raises: ArgumentError when the samples are not one-dimensional or do not split into the channels.
    """

    samples: np.ndarray
    sample_rate: int
    channels: int = 1

    def __init__(self, samples: Sequence[float] | np.ndarray, sample_rate: int, channels: int = 1) -> None:
        array = np.asarray(samples, dtype=np.float32)
        if array.ndim != 1 or channels < 1 or array.size % channels:
            raise ArgumentError(
                f"samples have shape {array.shape}; {channels} interleaved channels are one flat row of whole frames",
                code="bad_argument",
                source="samples",
            )
        array = array.view()
        array.setflags(write=False)
        object.__setattr__(self, "samples", array)
        object.__setattr__(self, "sample_rate", int(sample_rate))
        object.__setattr__(self, "channels", int(channels))

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def duration(self) -> float:
        """Seconds, or 0.0 for an Audio made by hand without a rate."""
        return len(self.samples) / self.channels / self.sample_rate if self.sample_rate else 0.0

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        array = self.samples.reshape(-1, self.channels) if self.channels > 1 else self.samples
        if dtype is not None and np.dtype(dtype) != array.dtype:  # type: ignore[call-overload]
            if copy is False:
                raise ValueError(f"samples are {array.dtype}; another dtype needs a copy")
            return array.astype(dtype)  # type: ignore[call-overload]
        return array.copy() if copy else array

    def save(self, path: str | os.PathLike) -> None:
        """Write a 16-bit PCM WAV: clipped to [-1, 1], then int(s * 32767), truncated toward zero.

        Raises: AudioError `non_finite` for NaN or infinity, `bad_rate` without a sample rate, `unsupported` past the
        4 GiB that a WAV can hold; OSError from the file system.
        """
        with WavWriter(path, self.sample_rate, self.channels, expected=len(self.samples)) as out:
            out.write(self.samples)

    def __repr__(self) -> str:
        return (
            f"Audio({len(self.samples) // self.channels} frames, {self.channels} channels, "
            f"{self.sample_rate} Hz, {self.duration:.3f} s)"
        )

    def _repr_html_(self) -> str:
        """A player at the level the samples have: nothing is normalised; past full scale is clipped as in `save`."""
        title = html.escape(repr(self))
        if not self.sample_rate or not len(self.samples):
            return f"<p>{title}</p>"
        kept = min(len(self.samples), PLAYER_SECONDS * self.sample_rate * self.channels)
        buffer = io.BytesIO()
        with WavWriter(buffer, self.sample_rate, self.channels, expected=kept) as out:
            out.write(self.samples[:kept])
        data = base64.b64encode(buffer.getvalue()).decode("ascii")
        cut = "" if kept == len(self.samples) else f"; the first {PLAYER_SECONDS} s are played here, save() writes all"
        peak = float(np.abs(self.samples).max())
        loud = f"; {peak:.2f} of full scale at its peak" + (", clipped when played" if peak > 1 else "")
        return (
            f'<figure style="margin:0"><audio controls preload="metadata" src="data:audio/wav;base64,{data}"></audio>'
            f"<figcaption>{title}{loud}{cut}</figcaption></figure>"
        )


class WavWriter:
    """Write a 16-bit WAV piece by piece, so that a long clip need not be held whole.

    `expected` is the number of floats to come, checked against what a WAV can hold before anything is written.
    """

    def __init__(
        self, target: str | os.PathLike | BinaryIO, sample_rate: int, channels: int, expected: int = 0
    ) -> None:
        if not sample_rate:
            raise AudioError(
                "this Audio has no sample rate, so it cannot be written as sound; give it one",
                code="bad_rate",
                source="sample_rate",
            )
        if expected * 2 > _WAV_BYTES_MAX:
            raise AudioError(
                f"{expected} samples do not fit into a WAV file (4 GiB); save parts of it",
                code="unsupported",
                source="samples",
            )
        if isinstance(target, (str, os.PathLike)):
            target = os.fspath(target)
        self._file = wave.open(target, "wb")  # noqa: SIM115  closed in __exit__
        self._file.setnchannels(channels)
        self._file.setsampwidth(2)
        self._file.setframerate(sample_rate)

    def write(self, samples: np.ndarray) -> None:
        """Append interleaved samples."""
        for start in range(0, len(samples), _BLOCK):
            self._file.writeframesraw(pcm16(samples[start : start + _BLOCK]).tobytes())

    def __enter__(self) -> WavWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def pcm16(samples: np.ndarray) -> np.ndarray:
    """Floats -> little-endian int16 as the loom door writes them: clip to [-1, 1], truncate s * 32767 toward zero.

    Raises: AudioError `non_finite`.
    """
    wide = np.asarray(samples, dtype=np.float64)
    if not np.isfinite(wide).all():
        raise AudioError(
            "the samples hold NaN or infinity and cannot be written as sound", code="non_finite", source="samples"
        )
    return (np.clip(wide, -1.0, 1.0) * 32767.0).astype("<i2")
