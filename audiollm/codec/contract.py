"""What a codec model says of itself: the loom contract, and metadata by key.

The keys of `contract` are those that the loom door gives, also where they mean nothing for a codec, so that code which
reads them keeps working.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from gguf.constants import GGUFValueType

from ..errors import ArgumentError
from ..vendor.moss_audio_tokenizer import CodecConfig
from ..vendor.moss_audio_tokenizer.config import MODEL_TYPE
from .errors import CodecError
from .gguf_file import KINDS, GgufFile, Value

DOOR = "codes2speech"
_UNUSED = {
    "clip_samples": 0,
    "max_input_tokens": 0,
    "text_frontend": "",
    "phoneme_alphabet": "",
    "phonemizer_ruleset": "",
    "languages": [],
    "entry_points": [],
    "default_steps": 0,
    "voices": [],
    "labels": [],
    "output_granularity": "",
    "frame_rate": 0.0,
    "frame_offset": 0.0,
    "embedding_dim": 0,
}

SNAPSHOT_DRIVER = """\
-- A published snapshot folder carries no driver script. model.infer takes:
--   codes   flat frame-major ids, n_codebooks per frame; codebook_size stands for an absent code
-- and returns interleaved samples. model.codes2speech.infer takes rows, arrays and tensors as well.
"""


def contract_from(metadata: Mapping[str, Value]) -> dict:
    """The contract of a file's or snapshot's metadata; `declared` tells whether it states its task itself."""
    task, source, target = (_text(metadata, f"loom.{key}") for key in ("task", "input.kind", "output.kind"))
    channels = metadata.get("loom.channels")
    rate = metadata.get("loom.sample_rate")
    return {
        "declared": bool(task and source and target),
        "task": task,
        "input_kind": source,
        "output_kind": target,
        "interface": DOOR,
        "sample_rate": 0 if rate is None else rate.value,
        "channels": 1 if channels is None else channels.value,
        **{key: list(value) if isinstance(value, list) else value for key, value in _UNUSED.items()},
    }


def snapshot_metadata(config: CodecConfig) -> dict[str, Value]:
    """The metadata that a GGUF of this snapshot would carry; absent is the id after the last."""

    def u32(number: int) -> Value:
        return Value(GGUFValueType.UINT32, number)

    def text(words: str) -> Value:
        return Value(GGUFValueType.STRING, words)

    return {
        "loom.architecture": text(MODEL_TYPE),
        "loom.task": text("audio-codec"),
        "loom.input.kind": text("audio_codes"),
        "loom.output.kind": text("audio"),
        "loom.codec.n_codebooks": u32(config.n_codebooks),
        "loom.codec.codebook_size": u32(config.codebook_size),
        "loom.codec.frame_rate": Value(GGUFValueType.FLOAT32, config.frame_rate),
        "loom.sample_rate": u32(config.sample_rate),
        "loom.channels": u32(config.channels),
        "loom.codec.absent_code": u32(config.codebook_size),
        "model.driver_script": text(SNAPSHOT_DRIVER),
    }


def hparam(metadata: Mapping[str, Value], key: str, kind: str) -> int | float | str:
    """One `loom.*` value by key (without "loom.") and stored kind.

    Raises: ArgumentError for an unknown kind; CodecError `bad_argument` for a missing key or one of another kind.
    """
    if kind not in KINDS:
        raise ArgumentError(
            f"unknown hparam kind {kind!r}; expected one of {sorted(KINDS)}", code="bad_argument", source="kind"
        )
    entry = metadata.get(f"loom.{key}")
    if entry is None:
        known = sorted(name.removeprefix("loom.") for name in metadata if name.startswith("loom."))
        close = difflib.get_close_matches(key, known, n=3)
        hint = f"; did you mean {', '.join(close)}?" if close else f"; it has {', '.join(known)}"
        raise CodecError(f"this model has no loom.{key}{hint}", code="bad_argument", source=key)
    if entry.kind not in KINDS[kind] or entry.value is None:
        fits = [name for name, kinds in KINDS.items() if entry.kind in kinds]
        hint = f"; read it with kind={fits[0]!r}" if fits else ""
        raise CodecError(
            f"loom.{key} is stored as {entry.kind.name}, not as {kind}{hint}", code="bad_argument", source=key
        )
    return entry.value  # type: ignore[return-value]


def gguf_contract(file: GgufFile) -> dict:
    """The contract of a GGUF of any architecture, from its header alone."""
    contract = contract_from(file.metadata)
    if (contract["input_kind"], contract["output_kind"]) != ("audio_codes", "audio"):
        contract["interface"] = ""
    return contract


def _text(metadata: Mapping[str, Value], key: str) -> str:
    entry = metadata.get(key)
    return str(entry.value) if entry is not None and entry.kind == GGUFValueType.STRING else ""
