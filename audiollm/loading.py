"""From a folder to a Session: what is asked is checked, then an empty model is filled.

`load_model` is the only way in; `empty_model` and `checked_processor` also serve `audiollm inspect`, which looks at a
snapshot without loading it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from packaging.specifiers import SpecifierSet
from transformers import GenerationConfig

from .errors import ArgumentError, SnapshotError
from .families import Family, for_model_type, known_model_types
from .session import Session
from .snapshot import Snapshot, read_json

TRANSFORMERS = SpecifierSet(">=5.16,<5.25")
# What the libraries raise for a config.json that describes no model.
_CONFIG_ERRORS = (TypeError, ValueError, LookupError, AttributeError, RuntimeError, ArithmeticError, AssertionError)
ATTENTION = ("sdpa", "eager", "flash_attention_2")
DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)


def load_model(
    local_snapshot: str | Path,
    device: str | torch.device = "cuda:0",
    dtype: torch.dtype = torch.bfloat16,
    attention: str = "sdpa",
) -> Session:
    """Load a local model folder.

    Parameters: `local_snapshot`, a folder with config.json, safetensors weights and tokenizer files, recognised by its
    `model_type`; `device`, one torch device; `dtype` of the weights; `attention`, "sdpa", "eager" or
    "flash_attention_2". Nothing is downloaded, no code from the folder runs, nothing is unpickled.

    Raises: SnapshotError naming the file for anything that would not load exactly (see `Snapshot.check`);
    ArgumentError `bad_device`, `bad_argument` or `bad_version`. All before a weight is read, but for values that are
    not finite.
    """
    _check_versions()
    place = _checked_device(device)
    _check_dtype(dtype)
    _check_attention(attention, place, dtype)
    snapshot = Snapshot.open(local_snapshot)
    family = family_of(snapshot)
    model = empty_model(family, snapshot, attention)
    processor = checked_processor(family, snapshot)
    adapter = family(model, processor)
    snapshot.fill(model, place, dtype)
    model.eval()
    for config in (model.config, *(getattr(model.config, name) for name in model.config.sub_configs)):
        config.dtype = dtype
    # Left alone, the library would fill settings that a call does not name from the snapshot's configuration.
    model.generation_config = GenerationConfig(eos_token_id=adapter.end_id, pad_token_id=adapter.pad_id)
    return Session(model, processor, adapter, snapshot.folder)


def _check_versions() -> None:
    found = importlib.metadata.version("transformers")
    if not TRANSFORMERS.contains(found, prereleases=True):
        raise ArgumentError(
            f"transformers {found} is installed and {TRANSFORMERS} is supported; run: pip install 'transformers{TRANSFORMERS}'",
            code="bad_version",
            source="transformers",
        )


def _checked_device(device: object) -> torch.device:
    cure = 'pass one torch device, such as "cuda:0", or device="cpu", dtype=torch.float32'
    if isinstance(device, dict) or device in ("auto", "meta") or not isinstance(device, (str, torch.device)):
        raise ArgumentError(f"device={device!r} is not supported: {cure}", code="bad_device", source="device")
    try:
        place = torch.device(device)
        if place.type == "meta":
            raise RuntimeError("meta holds no values")
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ArgumentError(
            f"device {device!r} cannot be used here ({reason}): {cure}", code="bad_device", source="device"
        ) from None
    return place


def _check_dtype(dtype: object) -> None:
    if dtype not in DTYPES:
        raise ArgumentError(
            f"dtype={dtype!r}; pass one of {', '.join(map(str, DTYPES))}", code="bad_argument", source="dtype"
        )


def _check_attention(attention: object, device: torch.device, dtype: torch.dtype) -> None:
    if attention not in ATTENTION:
        raise ArgumentError(
            f"attention={attention!r}; pass one of {', '.join(map(repr, ATTENTION))}",
            code="bad_argument",
            source="attention",
        )
    if attention == "flash_attention_2":
        half = dtype in (torch.bfloat16, torch.float16)
        if device.type != "cuda" or not half or importlib.util.find_spec("flash_attn") is None:
            raise ArgumentError(
                'attention="flash_attention_2" needs a CUDA device, bfloat16 or float16, and the package flash_attn; use '
                'attention="sdpa"',
                code="bad_argument",
                source="attention",
            )


def family_of(snapshot: Snapshot) -> type[Family]:
    """The adapter for a snapshot. Raises: SnapshotError `unsupported` naming the types that are known."""
    family = for_model_type(snapshot.model_type)
    if family is None:
        raise SnapshotError(
            f"{snapshot.folder} holds a model of type {snapshot.model_type!r}; known types are "
            f"{', '.join(known_model_types())}",
            code="unsupported",
            source=snapshot.folder / "config.json",
        )
    return family


def empty_model(family: type[Family], snapshot: Snapshot, attention: str = "sdpa") -> Any:
    """The snapshot's model on the meta device. Raises: SnapshotError where config.json does not describe one."""
    try:
        with torch.device("meta"):
            return family.build(snapshot.config, attention)
    except (*_CONFIG_ERRORS, StrictDataclassError) as error:
        path = snapshot.folder / "config.json"
        raise SnapshotError(f"{path} does not describe a model: {error}", code="bad_weights", source=path) from error


def checked_processor(family: type[Family], snapshot: Snapshot) -> Any:
    """The snapshot's tokenizer and feature extractor. Raises: SnapshotError where their files cannot be read."""
    for path in sorted(snapshot.folder.glob("*.json")):
        if any(word in path.name for word in ("token", "vocab", "processor")):
            read_json(path)
    try:
        return family.load_processor(snapshot.folder)
    except SnapshotError:
        raise
    except Exception as error:  # the tokenizers library raises Exception itself for files it cannot use
        raise SnapshotError(
            f"the tokenizer or processor files of {snapshot.folder} cannot be read: {error}",
            code="bad_weights",
            source=snapshot.folder,
        ) from error
