"""One row -> what the model is asked and hears: paths are opened, start and end are cut, samples are at the model's rate.

A cut is made at the file's own rate, before anything is resampled: frames [round(start_s * rate), round(end_s * rate)),
so a clip is what a file of just those frames would be. An end past the file's takes what there is.
"""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from ..audio import Header, decode, read_header
from ..errors import AudioError, AudioLLMError, RequestError
from ..request import Request, Waveform
from .manifest import Row

_BLOCK_FRAMES = 1 << 18


@dataclass(frozen=True)
class Heard:
    """What is known of a row that can be asked: `names`, the sources' file names.

    `offsets_s` and `durations_s`, one a source: where the clip begins in its file, and how much of it is used; `warning`,
    what there was to say about the files, or None.
    """

    row: Row
    names: tuple[str, ...]
    offsets_s: tuple[float, ...]
    durations_s: tuple[float, ...]
    warning: str | None


@dataclass(frozen=True)
class Failure:
    """A row that cannot be used, with what the engine said: `code`, `message`."""

    row: Row
    code: str
    message: str

    @classmethod
    def of(cls, row: Row, error: AudioLLMError) -> Failure:
        """The failure that an error of this package is."""
        return cls(row, error.code, str(error))


def hear(row: Row, prompt: str, sample_rate: int, max_s: float | None) -> tuple[Heard, Request]:
    """Open and decode a row's sources, each cut to the row's start and end; the request has them at `sample_rate` Hz.

    Parameters: `prompt` where the row has none; `max_s`, the model's longest audio in seconds, or None.
    Raises: AudioError and RequestError as `Session.prepare`; RequestError `bad_argument` for a row without audio, and
    for seconds that are none or lie past the file.
    """
    if not row.audios:
        raise RequestError(f"the row {row.id!r} has no audio", code="bad_argument", source="audio")
    start_s, end_s = _bounds(row)
    waves, offsets = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(len(row.audios)):
            wave, offset = _source(row.path(k), start_s, end_s, sample_rate, max_s)
            waves.append(wave)
            offsets.append(offset)
    said = "; ".join(dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, UserWarning)))
    heard = Heard(
        row=row,
        names=tuple(row.path(k).name for k in range(len(row.audios))),
        offsets_s=tuple(offsets),
        durations_s=tuple(wave.duration_s for wave in waves),
        warning=said or None,
    )
    return heard, Request(row.prompt or prompt, waves)


def frames_of(row: Row, header: Header) -> tuple[int, int]:
    """[first, end) frames of a source that a row asks for, at the file's rate.

    Raises: RequestError `bad_argument` for a start or end that is no number of seconds, an end that is not after its
    start, or a start past the file.
    """
    start_s, end_s = _bounds(row)
    return _frames(start_s, end_s, header)


def _frames(start_s: float, end_s: float | None, header: Header) -> tuple[int, int]:
    first = round(start_s * header.sample_rate)
    end = header.frames if end_s is None else min(round(end_s * header.sample_rate), header.frames)
    if first >= header.frames:
        raise RequestError(
            f"{header.name} is {header.duration_s:.3f} s long and start_s is {start_s:g}; start within the file",
            code="bad_argument",
            source="start_s",
        )
    return first, max(end, first)


def _source(
    path: Path, start_s: float, end_s: float | None, sample_rate: int, max_s: float | None
) -> tuple[Waveform, float]:
    """A source's samples at the model's rate, and the second of the file that they begin at."""
    if start_s == 0 and end_s is None:
        return Waveform(decode(path, sample_rate, max_s).samples, sample_rate), 0.0
    header = read_header(path)
    first, end = _frames(start_s, end_s, header)
    mono = _cut(path, header, first, None if end_s is None else end)
    try:
        wave = Waveform(mono, header.sample_rate)
        heard = decode(wave, sample_rate, max_s, f"{header.name} from {start_s:g} s")
    except AudioError as error:
        raise AudioError(f"{path} from {start_s:g} s: {error}", code=error.code, source=path) from None
    return Waveform(heard.samples, sample_rate), first / header.sample_rate


def _cut(path: Path, header: Header, first: int, end: int | None) -> np.ndarray:
    """The mean over channels [N] float32 of frames [first, end), or to the last one there is.

    Raises: AudioError `corrupt` where the file cannot be decoded there, `empty` where it ends before. Warns where it holds
    fewer frames than its header declares.
    """
    blocks: list[np.ndarray] = []
    frames = 0
    try:
        with soundfile.SoundFile(os.fsencode(path) if os.name == "posix" else path) as file:
            file.seek(first)
            while end is None or frames < end - first:
                step = _BLOCK_FRAMES if end is None else min(end - first - frames, _BLOCK_FRAMES)
                block = file.read(step, dtype="float32", always_2d=True)
                if not len(block):
                    break
                blocks.append(block.mean(axis=1))
                frames += len(block)
    except soundfile.LibsndfileError as error:
        raise AudioError(
            f"{path} cannot be decoded from frame {first} on: {error.error_string}", code="corrupt", source=path
        ) from None
    if not blocks:
        raise AudioError(f"{path} holds no samples from frame {first} on", code="empty", source=path)
    if end is not None and frames < end - first:
        warnings.warn(
            f"{path.name}: the header declares {header.frames:,} frames and {first + frames:,} could be decoded; the file "
            "may be cut",
            stacklevel=2,
        )
    return np.concatenate(blocks)


def _bounds(row: Row) -> tuple[float, float | None]:
    start_s, end_s = _seconds(row.start_s, "start_s"), _seconds(row.end_s, "end_s")
    if end_s is not None and end_s <= (start_s or 0.0):
        raise RequestError(
            f"end_s is {end_s:g} and start_s {start_s or 0:g}; a clip ends after it starts (seconds of the file)",
            code="bad_argument",
            source="end_s",
        )
    return start_s or 0.0, end_s


def _seconds(value: Any, name: str) -> float | None:
    if value is None or value == "":
        return None
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise RequestError(
            f"{name} is {value!r}; write seconds of the file, 0 or more", code="bad_argument", source=name
        )
    return seconds
