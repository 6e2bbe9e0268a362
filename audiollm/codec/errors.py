"""What can go wrong in the codec, under the project's own tree.

`LoomError` is the name that scripts written for the loom package catch; here it is the same class as `CodecError`.
Each class is also the builtin exception that the loom door raises in that place, so `except ValueError`,
`except FileNotFoundError` and `except NotImplementedError` go on working.
"""

from __future__ import annotations

from ..errors import ArgumentError, AudioLLMError, SnapshotError


class CodecError(AudioLLMError, RuntimeError):
    """A model file, codes or a call that the codec refuses."""


LoomError = CodecError


class CodesError(CodecError, ValueError):
    """Codes of the wrong width, type or range; code `bad_codes` or `too_many_frames`."""


class ModelFileError(CodecError, SnapshotError, ValueError):
    """A GGUF or snapshot that must not load; code `bad_weights` or `unsupported`."""


class ModelNotFoundError(CodecError, FileNotFoundError):
    """No model at that path or in the local cache; code `not_found` or `not_a_file`."""

    def __str__(self) -> str:
        return str(self.args[0])


class UnsupportedTask(AudioLLMError, NotImplementedError):
    """A door that this model does not have; code `unsupported`. The message names the one it has."""


class KeywordError(ArgumentError, TypeError):
    """A keyword that the call does not take; code `bad_argument`."""
