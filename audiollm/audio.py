"""A file or array -> mono float32 samples at the model's rate.

Conventions: samples are float32 at full scale 1.0; `frames` counts samples of one channel; rates are in Hz. The way
is always the same: libsndfile decodes to float32, channels are averaged (arithmetic mean, no weights),
`scipy.signal.resample_poly` resamples at the gcd-reduced ratio with its default filter, then the model's cap cuts.
Nothing is clipped, normalised, centred or padded.
"""

from __future__ import annotations

import math
import os
import stat
import struct
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .errors import AudioError
from .paths import local_path
from .request import Waveform, check_rate

# A resampling filter has 20 * max(up, down) + 1 taps; past this the ratio is taken for a mistake.
MAX_FILTER_TAPS = 200_000
_BLOCK_SAMPLES = 1 << 20
# MP3 frame counts in headers are estimates; two MP3 frames of slack are no sign of damage.
_FRAME_SLACK = 2_304
# Past this level the power spectrum would leave float32; full scale is 1.0.
LOUDEST = 1e12
# What libsndfile gives for a length that it does not know is near 2**63.
_UNKNOWN_FRAMES = 1 << 48
# libsndfile's error numbers: format not recognised; not a regular file (what it says of text named .mp3).
_NOT_AUDIO = (1, 7)


@dataclass(frozen=True)
class Header:
    """What is known of a source before it is decoded.

    `name` for people, `path` or None for a waveform, `frames` as the header tells (exact for all but MP3),
    `sample_rate` in Hz, `channels`.
    """

    name: str
    path: Path | None
    frames: int
    sample_rate: int
    channels: int

    @property
    def duration_s(self) -> float:
        """Length in seconds, as the header tells it."""
        return self.frames / self.sample_rate


@dataclass(frozen=True, eq=False)
class Decoded:
    """One source as the model hears it.

    `samples` [N] float32 at `sample_rate`; `header` with the true native frame count; `duration_s` of the whole
    source and `used_s` of what was kept after the model's cap, both in seconds.
    """

    samples: np.ndarray
    sample_rate: int
    header: Header
    duration_s: float
    used_s: float


def read_header(audio: str | Path | Waveform, name: str | None = None) -> Header:
    """Look at a source without decoding it.

    Raises: AudioError with code `not_found`, `not_a_file`, `unsupported`, `corrupt`, `empty` or `bad_rate`.
    """
    if isinstance(audio, Waveform):
        return Header(name or "waveform", None, len(audio.samples), audio.sample_rate, 1)
    path = _checked_file(audio)
    with _opened(path) as file:
        rate = check_rate(file.samplerate, f"the sample rate of {path}", path)
        frames = file.frames if file.frames < _UNKNOWN_FRAMES else sum(len(block) for block in _blocks(file, path))
        if frames == 0:
            raise AudioError(f"{path} holds no samples that can be decoded", code="empty", source=path)
        return Header(name or path.name, path, frames, rate, file.channels)


def decode(
    audio: str | Path | Waveform, sample_rate: int, max_s: float | None = None, name: str | None = None
) -> Decoded:
    """Decode one source to mono float32 at `sample_rate` Hz, cut to `max_s` seconds with a warning.

    Only the part before the cap is resampled, so a long file costs no more than its cap in memory. File blocks are
    read one after the other, and a header's declared length is never allocated.

    Raises: AudioError as `read_header`, and `non_finite` (with the native frame) or `bad_rate` (a ratio to the model's
    rate that would need a filter longer than 200,000 taps).
    """
    header = read_header(audio, name)
    up, down = resample_ratio(header, sample_rate)
    keep = None if max_s is None else _native_frames(max_s, header.sample_rate, up, down)
    if isinstance(audio, Waveform):
        mono, frames = audio.samples[:keep], len(audio.samples)
        _check_level(mono[:, None], 0, header.name)
    else:
        assert header.path is not None
        mono, frames = _read_mono(header.path, header, keep)
    header = Header(header.name, header.path, frames, header.sample_rate, header.channels)
    samples = _resampled(mono, up, down)
    duration_s = header.duration_s
    if max_s is not None and len(samples) > round(max_s * sample_rate):
        samples = samples[: round(max_s * sample_rate)]
        warnings.warn(
            f"{header.name}: {duration_s:.2f} s is longer than the model takes; only the first {max_s:g} s are used",
            stacklevel=2,
        )
    return Decoded(np.ascontiguousarray(samples), sample_rate, header, duration_s, len(samples) / sample_rate)


def resample_ratio(header: Header, sample_rate: int) -> tuple[int, int]:
    """The gcd-reduced (up, down) from a source's rate to the model's.

    Raises: AudioError `bad_rate` where the polyphase filter, 20 * max(up, down) + 1 taps, would pass 200,000.
    """
    common = math.gcd(sample_rate, header.sample_rate)
    up, down = sample_rate // common, header.sample_rate // common
    if 20 * max(up, down) + 1 > MAX_FILTER_TAPS:
        raise AudioError(
            f"{header.name}: {header.sample_rate} Hz to {sample_rate} Hz is the ratio {up}/{down}, whose filter would have "
            f"{20 * max(up, down) + 1:,} taps; resample it to a common rate such as 44100 first",
            code="bad_rate",
            source=header.path or header.name,
        )
    return up, down


def resampled_length(frames: int, up: int, down: int) -> int:
    """Samples that `frames` native samples become: ceil(frames * up / down), as resample_poly does."""
    return -(-frames * up // down)


def readable_formats() -> str:
    """The container names that the installed libsndfile reads, for messages."""
    import soundfile

    return ", ".join(sorted(name for name in soundfile.available_formats() if name != "RAW"))


def _checked_file(audio: str | Path) -> Path:
    path = local_path(audio, "audio")
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError, RuntimeError) as error:
        what = "is a link to nothing" if os.path.islink(path) else f"cannot be found ({_reason(error)})"  # noqa: PTH114
        raise AudioError(f"{path} {what}; check the path", code="not_found", source=path) from None
    if not stat.S_ISREG(mode):
        what = "folder" if stat.S_ISDIR(mode) else "device, pipe or socket"
        raise AudioError(f"{path} is a {what}, not an audio file", code="not_a_file", source=path)
    if not os.access(path, os.R_OK):
        raise AudioError(f"{path} cannot be read: permission denied", code="not_found", source=path)
    if path.stat().st_size == 0:
        raise AudioError(f"{path} is a file of 0 bytes", code="empty", source=path)
    return path


def _reason(error: Exception) -> str:
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)


def _opened(path: Path):  # type: ignore[no-untyped-def]  # soundfile has no types
    import soundfile

    try:
        # As bytes, a name need not be UTF-8.
        file = soundfile.SoundFile(os.fsencode(path) if os.name == "posix" else path)
    except TypeError:  # a headerless file by its name: soundfile asks for rate and channels
        raise _unsupported(path) from None
    except soundfile.LibsndfileError as error:
        if error.code in _NOT_AUDIO:
            raise _unsupported(path) from None
        raise AudioError(
            f"{path} cannot be decoded: {error.error_string}; it may be cut or damaged: get it again or convert it to "
            "WAV or FLAC",
            code="corrupt",
            source=path,
        ) from None
    if file.frames == 0:
        size = path.stat().st_size
        file.close()
        raise AudioError(
            f"the header of {path} declares no samples, although the file is {size:,} bytes; a recorder that was "
            "stopped hard leaves such files: repair the header or convert it",
            code="empty",
            source=path,
        )
    return file


def _unsupported(path: Path) -> AudioError:
    with path.open("rb") as file:
        head = file.read(24)
    hint = ""
    if head.startswith(b"version https://git-lfs"):
        hint = " (a Git LFS pointer: run `git lfs pull`)"
    elif head[4:8] == b"ftyp":
        hint = " (an MP4/M4A container)"
    elif head.startswith(b"\x1aE\xdf\xa3"):
        hint = " (a WebM/Matroska container)"
    elif head.startswith(b"MThd"):
        hint = " (MIDI holds notes, not samples: render it first)"
    return AudioError(
        f"{path} is not in a format that can be read{hint}; convert it to WAV or FLAC. Readable: {readable_formats()}",
        code="unsupported",
        source=path,
    )


def _native_frames(max_s: float, native_rate: int, up: int, down: int) -> int:
    """Native frames whose resampling gives the first `max_s` seconds exactly, filter tail included, and one more."""
    return math.ceil(max_s * native_rate) + 10 * max(up, down) // up + 2


def _read_mono(path: Path, header: Header, keep: int | None) -> tuple[np.ndarray, int]:
    """The mean over channels of the first `keep` frames, and how many frames the file really holds."""
    blocks: list[np.ndarray] = []
    frames = 0
    with _opened(path) as file:
        for block in _blocks(file, path, keep):
            _check_level(block, frames, path)
            blocks.append(block.mean(axis=1))
            frames += len(block)
    if frames == 0:
        raise AudioError(f"{path} holds no samples that can be decoded", code="empty", source=path)
    if keep is not None and frames >= keep:
        frames = max(frames, header.frames)
    else:
        _warn_if_cut(path, header, frames)
    return np.concatenate(blocks), frames


def _blocks(file: Any, path: Path, keep: int | None = None) -> Iterator[np.ndarray]:
    """The first `keep` frames of an open file, or all, as arrays [frames, channels] of bounded size."""
    import soundfile

    step = max(1, _BLOCK_SAMPLES // file.channels)
    frames = 0
    while keep is None or frames < keep:
        try:
            block = file.read(step if keep is None else min(step, keep - frames), dtype="float32", always_2d=True)
        except soundfile.LibsndfileError as error:
            raise AudioError(
                f"{path} cannot be decoded past frame {frames}: {error.error_string}", code="corrupt", source=path
            ) from None
        if len(block) == 0:
            return
        frames += len(block)
        yield block


def _check_level(block: np.ndarray, first: int, name: str | Path) -> None:
    """Refuse NaN, infinity and levels past `LOUDEST` in samples [frames, channels] that begin at frame `first`."""
    bad = np.argwhere(~(np.abs(block) <= LOUDEST))
    if len(bad):
        frame, channel = (int(v) for v in bad[0])
        value = block[frame, channel]
        what = "is past any level that mel can hold; full scale is 1.0" if np.isfinite(value) else "repair it first"
        raise AudioError(
            f"{name} holds {value} at frame {first + frame}, channel {channel}: {what}",
            code="non_finite",
            source=f"{name}:{first + frame}",
        )


def _warn_if_cut(path: Path, header: Header, frames: int) -> None:
    """Say so where a file declares more than it holds: an interrupted copy is easily overlooked."""
    if header.frames - frames > _FRAME_SLACK:
        warnings.warn(
            f"{header.name}: the header declares {header.frames:,} frames and {frames:,} could be decoded; the file may be cut",
            stacklevel=4,
        )
        return
    missing = _missing_wav_bytes(path)
    if missing:
        warnings.warn(
            f"{header.name}: {missing:,} bytes of the declared samples are missing; the {frames:,} frames present are used",
            stacklevel=4,
        )


def _missing_wav_bytes(path: Path) -> int:
    """How many bytes of a RIFF file's data chunk lie past the end of the file; 0 for other files."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) != b"RIFF":
            return 0
        at = 12
        while at + 8 <= size:
            file.seek(at)
            name, length = struct.unpack("<4sI", file.read(8))
            if name == b"data":
                streamed = length == 0xFFFFFFFF
                return 0 if streamed else max(0, at + 8 + length - size)
            at += 8 + length + length % 2
    return 0


def _resampled(mono: np.ndarray, up: int, down: int) -> np.ndarray:
    from scipy.signal import resample_poly

    if up == down:
        return np.array(mono, dtype=np.float32)
    return resample_poly(mono, up, down).astype(np.float32, copy=False)
