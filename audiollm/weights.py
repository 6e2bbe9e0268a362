"""Safetensors files, looked at with suspicion before a byte of a tensor is read.

The layout (huggingface/safetensors, format description): 8 bytes little-endian header length, a JSON object that maps
each name to dtype, shape and [begin, end) offsets into the rest, then the data without holes. `read_entries` checks
all of that against the file's size; reading tensors is left to the safetensors library.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from .errors import SnapshotError

_MAX_HEADER = 100 << 20
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Entry:
    """One tensor of a weight file: its name there, dtype as written (`"BF16"`), and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def read_entries(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file, after its header was checked against the file's size.

    Raises: SnapshotError `bad_weights` for a Git LFS pointer, a file cut anywhere, a header that is too long, not JSON,
    or names a tensor twice, and for offsets that overlap, leave holes or do not fit dtype and shape; `not_found`
    where there is no file.
    """
    if not path.is_file():
        raise SnapshotError(f"{path} is missing; download it again", code="not_found", source=path)
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        if head + file.read(15) == b"version https://git-lfs":
            raise _bad(path, "is a Git LFS pointer, not the weights; run `git lfs pull`")
        if len(head) < 8:
            raise _bad(path, f"is {size} bytes, too short for a safetensors file")
        (length,) = struct.unpack("<Q", head)
        if length > min(size - 8, _MAX_HEADER):
            raise _bad(
                path, f"announces a header of {length:,} bytes in a file of {size:,}; it is cut or not safetensors"
            )
        file.seek(8)
        text = file.read(length)
    return _parsed(text, size - 8 - length, path)


def _parsed(text: bytes, data_bytes: int, path: Path) -> dict[str, Entry]:
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"has a header that cannot be read ({error})") from None
    if not isinstance(header, dict):
        raise _bad(path, "has a header that is no JSON object")
    entries: dict[str, Entry] = {}
    spans: list[tuple[int, int, str]] = []
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        entries[name], begin, end = _entry(name, fields, path)
        spans.append((begin, end, name))
    _check_spans(sorted(spans), data_bytes, path)
    return entries


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} stands there twice")
        found[name] = value
    return found


def _entry(name: str, fields: Any, path: Path) -> tuple[Entry, int, int]:
    known: dict[str, Any] = fields if isinstance(fields, dict) else {}
    dtype, shape, offsets = (known.get(key) for key in ("dtype", "shape", "data_offsets"))
    if (
        not isinstance(dtype, str)
        or dtype not in _ITEM_BYTES
        or not _are_counts(shape)
        or not _are_counts(offsets)
        or len(offsets) != 2
    ):
        raise _bad(path, f"describes tensor {name!r} in a way that is not safetensors: {str(fields)[:120]}")
    begin, end = offsets
    if math.prod(shape) * _ITEM_BYTES[dtype] != end - begin:
        raise _bad(path, f"gives tensor {name!r} {end - begin:,} bytes, but {dtype} {shape} needs another number")
    return Entry(name, dtype, tuple(shape)), begin, end


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _check_spans(spans: list[tuple[int, int, str]], data_bytes: int, path: Path) -> None:
    at = 0
    for begin, end, name in spans:
        if begin != at:
            raise _bad(path, f"has tensors that {'overlap' if begin < at else 'leave a hole'} at {name!r}")
        at = end
    if at != data_bytes:
        what = "is cut" if at > data_bytes else "has bytes that belong to no tensor"
        raise _bad(path, f"{what}: the header describes {at:,} bytes of data and {data_bytes:,} are there")


def _bad(path: Path, what: str) -> SnapshotError:
    return SnapshotError(f"{path} {what}", code="bad_weights", source=path)


@contextmanager
def opened(path: Path) -> Iterator:
    """The file as the safetensors library opens it, memory-mapped. Raises: SnapshotError for what that refuses."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except SafetensorError as error:
        raise _bad(path, f"cannot be read: {error}") from None


def copied(stored: torch.Tensor, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
    """A tensor of our own on `device` in `dtype`, and whether all of it is finite there.

    The stored tensor is a view of the mapped file.
    """
    tensor = stored.to(device=device, dtype=dtype, copy=True)
    return tensor, _is_finite(tensor)


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite: by one quick reduction, and where it overflows by the extremes.

    On the CPU the norm runs in one thread; a sum in several is little quicker, and on a busy machine they wait for each
    other once more a tensor. Of float16 the norm is slow.
    """
    total = tensor.sum() if tensor.dtype == torch.float16 else torch.linalg.vector_norm(tensor)
    return bool(torch.isfinite(total)) or all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(tensor))
