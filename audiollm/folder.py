"""A folder of files to choose from, and the first seconds of one to listen to."""

from __future__ import annotations

import fnmatch
import io
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from .audio import read_header
from .errors import ArgumentError
from .paths import local_path
from .request import Waveform

# Endings that files of libsndfile's formats carry beside the format's own name.
_ENDINGS = {
    "AIFF": ("aif", "aifc"),
    "AU": ("snd",),
    "IRCAM": ("sf",),
    "MP3": ("mp2", "mpga"),
    "NIST": ("sph",),
    "OGG": ("oga", "opus"),
    "SVX": ("iff", "8svx"),
    "WAV": ("wave",),
}
# Containers of measurements, not of music: a folder of them is no folder of audio.
_NOT_OFFERED = ("RAW", "MAT4", "MAT5", "HTK")
MOST_LISTED = 2_000
PREVIEW_S = 30.0


@dataclass(frozen=True)
class Folder:
    """What of a folder can be chosen: `folders` and `files` that libsndfile may read, by name; `left_out`, how many more."""

    path: Path
    folders: tuple[Path, ...]
    files: tuple[Path, ...]
    left_out: int = 0


@lru_cache(maxsize=1)
def audio_endings() -> frozenset[str]:
    """Endings, in small letters without the dot, of files that the installed libsndfile reads."""
    import soundfile

    formats = [name for name in soundfile.available_formats() if name not in _NOT_OFFERED]
    return frozenset(ending for name in formats for ending in (name.lower(), *_ENDINGS.get(name, ())))


def look_in(folder: str | Path, pattern: str = "") -> Folder:
    """The folders and audio files of a folder, hidden ones not; none is opened, the ending tells.

    `pattern` keeps files whose name holds it, or matches it where it has `*` or `?`; capitals do not matter. At most
    2,000 of each are listed. Raises: ArgumentError where there is no such folder, or it cannot be read.
    """
    path = local_path(folder, "folder")
    try:
        inside = sorted((p for p in path.iterdir() if not p.name.startswith(".")), key=lambda p: p.name.casefold())
        folders = [p for p in inside if p.is_dir()]
        files = [
            p for p in inside if p.suffix[1:].lower() in audio_endings() and p.is_file() and _fits(p.name, pattern)
        ]
    except OSError as error:
        raise ArgumentError(
            f"folder {str(folder)!r} cannot be listed ({error.strerror or error}); pass a folder that is there",
            code="bad_argument",
            source="folder",
        ) from None
    left_out = max(0, len(folders) - MOST_LISTED) + max(0, len(files) - MOST_LISTED)
    return Folder(path.resolve(), tuple(folders[:MOST_LISTED]), tuple(files[:MOST_LISTED]), left_out)


def _fits(name: str, pattern: str) -> bool:
    name, pattern = name.casefold(), pattern.strip().casefold()
    return fnmatch.fnmatchcase(name, pattern if any(c in pattern for c in "*?") else f"*{_spelled(pattern)}*")


def _spelled(text: str) -> str:
    return text.replace("[", "[[]")


def preview(audio: str | Path | Waveform, start_s: float = 0.0, max_s: float = PREVIEW_S) -> bytes:
    """At most `max_s` seconds of a source from `start_s` on, as a 16-bit WAV file at its own rate and true level.

    Full scale stays full scale: nothing is normalised, what is louder is clipped. One or two channels are kept, more are
    averaged. Only these frames are read.

    Raises: AudioError as `read_header`; ArgumentError for a start outside the source or seconds that are not positive.
    """
    import soundfile

    header = read_header(audio)
    if not max_s > 0 or not 0 <= start_s < header.duration_s:
        raise ArgumentError(
            f"{start_s!r} s is no place in {header.name} of {header.duration_s:.3f} s to play {max_s!r} s from",
            code="bad_argument",
            source="start_s",
        )
    first, count = int(start_s * header.sample_rate), max(1, round(max_s * header.sample_rate))
    if isinstance(audio, Waveform):
        samples = audio.samples[first : first + count, None]
    else:
        with soundfile.SoundFile(str(header.path)) as file:
            file.seek(first)
            samples = file.read(count, dtype="float32", always_2d=True)
    if samples.shape[1] > 2:
        samples = samples.mean(axis=1, keepdims=True)
    whole = np.round(np.clip(np.nan_to_num(samples), -1, 1) * 32767).astype(np.int16)
    buffer = io.BytesIO()
    soundfile.write(buffer, whole, header.sample_rate, format="WAV", subtype="PCM_16")
    return buffer.getvalue()
