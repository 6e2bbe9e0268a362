"""What can go wrong with a corpus, under the project's own tree."""

from __future__ import annotations

from ..errors import ArgumentError, AudioLLMError


class ManifestError(AudioLLMError):
    """A table of clips that cannot be read; code `bad_manifest`, `not_found` or `unsupported`."""


class RunError(AudioLLMError):
    """A run folder that does not fit the call; code `bad_run`, `locked`, `disk_full`, `too_large` or `worker_died`."""


class UnknownClipError(ArgumentError, KeyError):
    """An id that a run does not hold; code `bad_argument`."""

    def __str__(self) -> str:
        return str(self.args[0])
