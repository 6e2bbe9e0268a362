"""MOSS-Audio-Tokenizer v2: codec codes to 48 kHz stereo and back.

    from audiollm import codec
    model = codec.Model.from_file("moss-audio-tokenizer-v2.gguf")               # a loom GGUF, or
    model = codec.Model.from_pretrained("/models/MOSS-Audio-Tokenizer-v2")      # the published snapshot folder
    model.codes2speech.infer(codes).save("out.wav")

The names follow the loom package, so `from audiollm import codec as loom` runs a script written for it. Modules load
when a name is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .audio import Audio
    from .capture import Capture
    from .codes import MAX_FRAMES, CodeSpace
    from .device import devices
    from .doors import Codes2Speech, LiveDecoder, Speech2Codes
    from .errors import (
        CodecError,
        CodesError,
        KeywordError,
        LoomError,
        ModelFileError,
        ModelNotFoundError,
        UnsupportedTask,
    )
    from .example import CodecDemo, demo_codes, demo_model, run_demo
    from .measures import (
        CodebookEnergy,
        CodebookUsage,
        PrefixDifference,
        codebook_energy,
        codebook_usage,
        prefix_difference,
    )
    from .model import Model, contract_of

_HOME = {
    "MAX_FRAMES": "codes",
    "Audio": "audio",
    "Capture": "capture",
    "CodeSpace": "codes",
    "CodebookEnergy": "measures",
    "CodebookUsage": "measures",
    "CodecDemo": "example",
    "CodecError": "errors",
    "Codes2Speech": "doors",
    "CodesError": "errors",
    "KeywordError": "errors",
    "LiveDecoder": "doors",
    "LoomError": "errors",
    "Model": "model",
    "ModelFileError": "errors",
    "ModelNotFoundError": "errors",
    "PrefixDifference": "measures",
    "Speech2Codes": "doors",
    "UnsupportedTask": "errors",
    "codebook_energy": "measures",
    "codebook_usage": "measures",
    "contract_of": "model",
    "demo_codes": "example",
    "demo_model": "example",
    "devices": "device",
    "prefix_difference": "measures",
    "run_demo": "example",
}

__all__ = [
    "MAX_FRAMES",
    "Audio",
    "Capture",
    "CodeSpace",
    "CodebookEnergy",
    "CodebookUsage",
    "CodecDemo",
    "CodecError",
    "Codes2Speech",
    "CodesError",
    "KeywordError",
    "LiveDecoder",
    "LoomError",
    "Model",
    "ModelFileError",
    "ModelNotFoundError",
    "PrefixDifference",
    "Speech2Codes",
    "UnsupportedTask",
    "codebook_energy",
    "codebook_usage",
    "contract_of",
    "demo_codes",
    "demo_model",
    "devices",
    "prefix_difference",
    "run_demo",
]


__getattr__, __dir__ = lazy_names(__name__, _HOME)
