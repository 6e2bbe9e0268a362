"""Audio files for people to choose from: what a folder holds, and a few seconds of a source to listen to."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import soundfile

from ..audio import Header, read_header
from ..errors import ArgumentError, AudioError
from ..paths import local_path
from ..request import Waveform

LONGEST_S = 30.0
# A preview is sent to the browser whole, so that many channels or a high rate shorten it.
_MOST_BYTES = 12 * 2**20
# Other endings of the containers that libsndfile names.
_ALSO = {
    "AIFF": (".aif", ".aifc"),
    "AU": (".snd",),
    "IRCAM": (".sf",),
    "MAT5": (".mat",),
    "MP3": (".mp2",),
    "MPC2K": (".snd",),
    "NIST": (".sph",),
    "OGG": (".oga", ".opus"),
    "SVX": (".iff", ".8svx"),
    "WAV": (".wave", ".bwf"),
}


def readable_suffixes() -> tuple[str, ...]:
    """Endings of files that the installed libsndfile reads, sorted: ".aif", ".aiff", ...

    >>> from audiollm.widgets.audio_files import readable_suffixes
    >>> {".wav", ".flac", ".mp3", ".opus"} <= set(readable_suffixes())
    True
    """
    names = set(soundfile.available_formats()) - {"RAW"}
    own = {f".{name.lower()}" for name in names}
    return tuple(sorted(own.union(*(_ALSO.get(name, ()) for name in names))))


def checked_folder(folder: str | Path) -> Path:
    """The absolute path of a folder. Raises: ArgumentError for what is no folder that can be read."""
    path = Path(os.path.abspath(local_path(folder, "folder")))  # noqa: PTH100  `..` taken away, links kept
    try:
        is_folder = path.is_dir() and os.access(path, os.R_OK | os.X_OK)
    except (OSError, ValueError):
        is_folder = False
    if not is_folder:
        raise ArgumentError(
            f"{printable(path)} is not a folder that can be read; pass one that exists",
            code="bad_argument",
            source="folder",
        )
    return path


def entries(folder: str | Path, having: str = "") -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """The folders in a folder, and the files whose ending libsndfile reads, each sorted by name; hidden ones left out.

    `having` keeps names that contain it, in any case. Raises: ArgumentError for what is no folder that can be read.
    """
    path, part = checked_folder(folder), having.strip().casefold()
    folders, files, suffixes = [], [], readable_suffixes()
    with os.scandir(path) as found:
        for entry in found:
            if entry.name.startswith(".") or part not in entry.name.casefold():
                continue
            if _is_folder(entry):
                folders.append(path / entry.name)
            elif os.path.splitext(entry.name)[1].lower() in suffixes:  # noqa: PTH122
                files.append(path / entry.name)
    return tuple(sorted(folders, key=_by_name)), tuple(sorted(files, key=_by_name))


def preview(audio: str | Path | Waveform, start_s: float = 0.0, length_s: float = LONGEST_S) -> tuple[bytes, float]:
    """A stretch of a source as a 16-bit WAV at its own rate, and its length in seconds. Only that stretch is decoded.

    Full scale 1.0 is 32768, as in 16-bit files; what is louder is clipped, and nothing is ever scaled. One or two channels
    are kept, more are averaged, as the model hears them. At most 30 s, and at most 12 MiB.
    Raises: ArgumentError for a start outside the source; AudioError as `read_header`, `corrupt` or `non_finite`.
    """
    header = read_header(audio)
    if not 0 <= start_s < header.duration_s or not length_s > 0:
        raise ArgumentError(
            f"second {start_s:g} does not lie in {printable(header.name)}, which is {header.duration_s:.3f} s long",
            code="bad_argument",
            source="start_s",
        )
    first = int(start_s * header.sample_rate)
    bytes_per_frame = 2 * min(header.channels, 2)
    count = min(int(np.ceil(min(length_s, LONGEST_S) * header.sample_rate)), _MOST_BYTES // bytes_per_frame)
    samples = _samples(audio, header, first, count)
    if samples.shape[1] > 2:
        samples = samples.mean(axis=1, keepdims=True)
    if not np.isfinite(samples).all():
        raise AudioError(
            f"{printable(header.name)} holds NaN or infinity at {start_s:g} s or soon after; repair it first",
            code="non_finite",
            source=header.path or header.name,
        )
    pcm = np.clip(np.rint(samples * 32768.0), -32768, 32767).astype(np.int16)
    target = io.BytesIO()
    soundfile.write(target, pcm, header.sample_rate, format="WAV", subtype="PCM_16")
    return target.getvalue(), len(pcm) / header.sample_rate


def printable(text: str | Path) -> str:
    """A name as text that a browser takes: bytes of a file name that are no UTF-8 become question marks."""
    return str(text).encode("utf-8", "replace").decode("utf-8")


def from_folder(folder: Path, text: str) -> Path | None:
    """The path that a text means, seen from a folder; None where nothing is there."""
    try:
        path = folder / local_path(text, "path")
        return path if path.exists() else None
    except (OSError, ValueError):
        return None


def write_files(folder: Path, files: Sequence[tuple[str, bytes | memoryview]]) -> list[Path]:
    """Write (name, bytes) as a browser sent them, each in a new folder of its own below `folder`, whatever it is called."""
    paths = [folder / str(k) / _plain(name) for k, (name, _) in enumerate(files)]
    for path, (_, content) in zip(paths, files, strict=True):
        path.parent.mkdir()
        path.write_bytes(content)
    return paths


def _samples(audio: str | Path | Waveform, header: Header, first: int, count: int) -> np.ndarray:
    """Native samples [frames, channels], float32."""
    if isinstance(audio, Waveform):
        return audio.samples[first : first + count, None]
    assert header.path is not None
    try:
        name = os.fsencode(header.path) if os.name == "posix" else header.path
        with soundfile.SoundFile(name) as file:
            file.seek(first)
            samples = file.read(count, dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise AudioError(
            f"{printable(header.path)} cannot be decoded at {first / header.sample_rate:g} s: {error.error_string}",
            code="corrupt",
            source=header.path,
        ) from None
    if not len(samples):
        raise AudioError(
            f"{printable(header.path)} holds no samples at {first / header.sample_rate:g} s, although its header says so",
            code="corrupt",
            source=header.path,
        )
    return samples


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _by_name(path: Path) -> tuple[str, str]:
    return path.name.casefold(), path.name


def _plain(name: str) -> str:
    """The last part of a name that a browser sent, without what would lead elsewhere; at most 100 characters, ending kept."""
    last = re.split(r"[\\/]", name)[-1].replace("\0", "").lstrip(".")
    return last[-100:] or "upload"
