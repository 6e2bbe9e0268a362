"""What can go wrong, as one small tree.

Every error carries two attributes besides its message:

`code`    one word a program can branch on, such as ``"too_short"`` or ``"bad_weights"``; the words are listed in
          `CODES` with what they mean.
`source`  what is at fault: a file path, the name of an argument, or a position such as ``"requests[1].audios[0]"``;
          None where the message alone says it.

The message names the thing at fault and the cure, and is raised before a model runs.
"""

from __future__ import annotations

CODES = {
    "bad_argument": "an argument has a value that this call does not take",
    "bad_codes": "codec codes of the wrong width, type or range",
    "bad_device": "the device is not one that torch can use here",
    "bad_dtype": "a waveform is not a real floating dtype",
    "bad_manifest": "a table of clips that cannot be used",
    "bad_prompt": "the prompt is not usable text, or its markers do not fit its sources",
    "bad_rate": "a sample rate is not a positive whole number in a sane range",
    "bad_run": "a run folder that does not fit the call, or is damaged",
    "bad_shape": "a waveform is not one-dimensional",
    "bad_version": "an installed library is outside the supported range",
    "bad_weights": "a snapshot or model file that must not load",
    "busy": "the session is in the middle of another call",
    "control_token": "the prompt holds one of the model's own control tokens",
    "corrupt": "the file claims to be audio but cannot be decoded",
    "disk_full": "no room for what is to be written",
    "empty": "no samples at all",
    "locked": "another process is writing the run",
    "non_finite": "NaN, infinity, or a level past 1e12 among the samples",
    "not_a_file": "a directory, device, pipe or socket",
    "not_found": "no such path, or a URL",
    "too_large": "a result of more bytes than the limit of the call",
    "too_long": "more tokens than the context holds",
    "too_many_frames": "more codec frames than the ceiling",
    "too_many_sources": "more audio sources than a request may hold",
    "too_short": "samples, but not enough for one audio token",
    "unsupported": "not a format or a feature that can be used here",
    "worker_died": "the process that worked on it died",
}


class AudioLLMError(Exception):
    """Base of every error that this package raises on purpose.

    Parameters: `message` for people, `code` one of `CODES`, `source` what is at fault (converted to str, or None).
    """

    def __init__(self, message: str, *, code: str, source: object = None) -> None:
        if code not in CODES:
            raise ValueError(f"{code!r} is not an error code; add it to CODES")
        super().__init__(message)
        self.code = code
        self.source = None if source is None else str(source)

    def __reduce__(self) -> tuple:
        return _rebuild, (type(self), str(self), self.code, self.source)


def _rebuild(kind: type[AudioLLMError], message: str, code: str, source: str | None) -> AudioLLMError:
    """Unpickle an error: worker processes hand them back whole."""
    return kind(message, code=code, source=source)


class AudioError(AudioLLMError):
    """A file or waveform that cannot be heard as it is."""


class RequestError(AudioLLMError):
    """A prompt, or a combination of prompt and sources, that the model cannot be asked."""


class SnapshotError(AudioLLMError):
    """A model folder that must not be loaded."""


class SessionBusyError(AudioLLMError):
    """A call on a Session that is in the middle of another one, from another thread or from inside a hook."""


class ArgumentError(AudioLLMError, ValueError):
    """An argument outside what the call takes."""
