"""What a user asks: a prompt, and up to five pieces of audio in order.

Conventions: `<audio>` in a prompt marks where a source goes, the k-th marker the k-th source. Without markers the
family places the sources before the prompt. Samples are floats at full scale 1.0, one channel, `sample_rate` in Hz.
Everything that can be checked without opening a file is checked when the object is made.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import AudioError, RequestError

if TYPE_CHECKING:
    import torch

MARKER = "<audio>"
MAX_SOURCES = 5
MIN_RATE, MAX_RATE = 1_000, 768_000

# `https://...`, `file:///...`, and `https:/...`, which is what pathlib leaves of it; one-letter schemes are drives.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/|data:[\w.+-]+/", re.ASCII)


@dataclass(frozen=True, eq=False)
class Waveform:
    """One channel of samples in memory, instead of a file.

    Parameters: `samples` [N], a numpy array or torch tensor of real floats (float16, bfloat16, float32, float64; any
    device, stride or byte order); `sample_rate` in Hz, a whole number in 1,000-768,000 (16000.0 counts as whole).
    The samples are copied to a read-only float32 array on the CPU; the caller's array is never written to.

    Raises: AudioError with code `bad_dtype`, `bad_shape`, `empty`, `non_finite` or `bad_rate`.
    """

    samples: np.ndarray
    sample_rate: int

    def __init__(self, samples: np.ndarray | torch.Tensor, sample_rate: int) -> None:
        object.__setattr__(self, "samples", _float32_copy(samples))
        object.__setattr__(self, "sample_rate", check_rate(sample_rate, "Waveform(sample_rate)"))

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return len(self.samples) / self.sample_rate

    def __repr__(self) -> str:
        return f"Waveform({len(self.samples)} samples, {self.sample_rate} Hz, {self.duration_s:.3f} s)"


@dataclass(frozen=True)
class Request:
    """A prompt and its audio.

    Parameters: `prompt`, any Unicode text; `audios`, a list or tuple of 0-5 local paths (str or Path, a leading `~`
    stands for the home folder) or `Waveform`s, in the order of the markers. The number of `<audio>` markers is zero
    or the number of sources. A prompt that is empty or only white space needs at least one source.

    Raises: RequestError with code `bad_prompt`, `too_many_sources` or `bad_argument`; AudioError with code
    `not_found` for a URL, an empty path or one that holds a NUL character.
    """

    prompt: str
    audios: tuple[str | Path | Waveform, ...] = ()

    def __init__(self, prompt: str, audios: Sequence[str | Path | Waveform] = ()) -> None:
        object.__setattr__(self, "prompt", _checked_prompt(prompt))
        object.__setattr__(self, "audios", _checked_audios(audios))
        _check_fit(self.prompt, len(self.audios))

    @property
    def n_markers(self) -> int:
        """How many `<audio>` markers the prompt itself holds."""
        return self.prompt.count(MARKER)


def check_rate(rate: object, what: str, source: object = None) -> int:
    """Return `rate` as an int, or raise AudioError `bad_rate`; whole floats and numpy integers are taken.

    `what` names it in the message, `source` is what is at fault (by default `what`).
    """
    source = what if source is None else source
    number = isinstance(rate, (int, np.integer)) and not isinstance(rate, bool)
    whole = isinstance(rate, (float, np.floating)) and math.isfinite(rate) and int(rate) == rate
    if not number and not whole:
        raise AudioError(
            f"{what} is {rate!r}; a sample rate is a whole number of Hz, such as 44100",
            code="bad_rate",
            source=source,
        )
    if not MIN_RATE <= int(rate) <= MAX_RATE:  # type: ignore[call-overload]
        raise AudioError(
            f"{what} is {rate} Hz, outside {MIN_RATE:,}-{MAX_RATE:,} Hz; check the unit (Hz, not kHz)",
            code="bad_rate",
            source=source,
        )
    return int(rate)  # type: ignore[call-overload]


def _float32_copy(samples: object) -> np.ndarray:
    """Any real floating 1-D array or tensor -> a contiguous read-only float32 copy [N]."""
    where = "Waveform(samples)"
    array = _as_numpy(samples, where)
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        raise AudioError(
            f"{where} has dtype {array.dtype}; pass floats at full scale 1.0, for 16-bit integers `x / 32768`",
            code="bad_dtype",
            source=where,
        )
    if array.ndim != 1:
        raise AudioError(
            f"{where} has shape {array.shape}; one channel [N] is needed: `x.mean(axis)` over the channel axis, "
            "or `x[0]` for shape (1, N)",
            code="bad_shape",
            source=where,
        )
    if array.size == 0:
        raise AudioError(f"{where} holds no samples", code="empty", source=where)
    bad = np.flatnonzero(~np.isfinite(array))
    if bad.size:
        raise AudioError(
            f"{where}[{bad[0]}] is {array[bad[0]]} ({bad.size} non-finite of {array.size}); repair or drop them first",
            code="non_finite",
            source=where,
        )
    with np.errstate(over="ignore"):
        copy = np.array(array, dtype=np.float32, order="C", copy=True)
    if not np.isfinite(copy).all():
        at = int(np.flatnonzero(~np.isfinite(copy))[0])
        raise AudioError(f"{where}[{at}] is {array[at]}, past float32", code="non_finite", source=where)
    copy.setflags(write=False)
    return copy


def _as_numpy(samples: Any, where: str) -> np.ndarray:
    if isinstance(samples, np.ndarray):
        return samples
    if hasattr(samples, "detach") and hasattr(samples, "cpu"):
        import torch

        if samples.is_meta or samples.layout is not torch.strided:
            raise AudioError(
                f"{where} is a {'meta' if samples.is_meta else 'sparse'} tensor; pass a dense one that holds values",
                code="bad_dtype",
                source=where,
            )
        tensor = samples.detach().cpu().resolve_conj().resolve_neg()
        if tensor.dtype in (torch.float16, torch.bfloat16):
            return tensor.float().numpy()
        if tensor.is_floating_point() and tensor.dtype not in (torch.float32, torch.float64):
            raise AudioError(
                f"{where} has dtype {tensor.dtype}; pass `x.float()`, at full scale 1.0", code="bad_dtype", source=where
            )
        return tensor.numpy()
    raise AudioError(
        f"{where} is a {type(samples).__name__}; pass a numpy array or torch tensor [N], e.g. "
        "`numpy.asarray(x, dtype='float32')`, or a path as the source itself",
        code="bad_dtype",
        source=where,
    )


def _checked_prompt(prompt: object) -> str:
    if not isinstance(prompt, str):
        raise RequestError(
            f"the prompt is a {type(prompt).__name__}; it must be one str, the user's turn",
            code="bad_prompt",
            source="prompt",
        )
    for offset, char in enumerate(prompt):
        if "\ud800" <= char <= "\udfff":
            raise RequestError(
                f"the prompt holds a lone surrogate {char!r} at character {offset}, which is not text; decode the "
                "input as UTF-8 or drop it",
                code="bad_prompt",
                source=f"prompt[{offset}]",
            )
    return prompt


def _checked_audios(audios: object) -> tuple[str | Path | Waveform, ...]:
    if isinstance(audios, (str, Path, Waveform)) or not isinstance(audios, Sequence):
        raise RequestError(
            f"audios is a {type(audios).__name__}; pass a list, even for one source: Request(prompt, [source])",
            code="bad_argument",
            source="audios",
        )
    if len(audios) > MAX_SOURCES:
        raise RequestError(
            f"{len(audios)} sources; a request holds at most {MAX_SOURCES}: send the others in another request",
            code="too_many_sources",
            source="audios",
        )
    return tuple(_checked_audio(audio, f"audios[{k}]") for k, audio in enumerate(audios))


def _checked_audio(audio: object, where: str) -> str | Path | Waveform:
    if isinstance(audio, Waveform):
        return audio
    if not isinstance(audio, (str, Path)):
        raise RequestError(
            f"{where} is a {type(audio).__name__}; pass a path (str or Path) or Waveform(samples, sample_rate)",
            code="bad_argument",
            source=where,
        )
    text = str(audio)
    if not text or "\0" in text:
        raise AudioError(f"{where} is {text!r}, which is no path", code="not_found", source=where)
    if _URL.match(text):
        raise AudioError(
            f"{where} is the URL {text!r}; nothing is fetched here: download the file and pass its path",
            code="not_found",
            source=text,
        )
    return audio


def _check_fit(prompt: str, n_sources: int) -> None:
    n_markers = prompt.count(MARKER)
    if n_markers and n_markers != n_sources:
        raise RequestError(
            f"the prompt holds {n_markers} {MARKER} marker(s) for {n_sources} source(s); write one a source, or none "
            "and they are placed before the prompt",
            code="bad_prompt",
            source="prompt",
        )
    if not prompt.strip() and not n_sources:
        raise RequestError(
            "the prompt is empty and there is no source; ask something", code="bad_prompt", source="prompt"
        )
