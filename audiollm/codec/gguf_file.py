"""A GGUF file, read as if it were hostile.

Every count, length, offset and size is checked against the file before it is used, nothing is allocated on the word of
the header, and nothing in the file is executed. Read are little-endian version 3 files with F32, F16, BF16, Q8_0 and
Q4_0 tensors. The walk over the header is our own: the `gguf` package's reader hangs on a crafted file and takes
big-endian ones, and a checking walk in front of it has already read everything it would. Its tables of types and its
dequantization, which see only checked bytes, are used.

Conventions: a tensor's `shape` is in torch order, the reverse of the file's.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from .errors import ModelFileError, ModelNotFoundError

MAX_ENTRIES = 65_536  # metadata keys, and tensors: v2 has 25 and some 1,200
MAX_STRINGS = 1 << 20  # strings in arrays, together
MAX_STRING = 1 << 26  # bytes of one string; the largest is the topology, a few MB
MAX_NAME = 1024
READABLE = (
    GGMLQuantizationType.F32,
    GGMLQuantizationType.F16,
    GGMLQuantizationType.BF16,
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q4_0,
)
_SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}
# What a value may be read as, by the word that `hparam` takes for its kind.
KINDS = {
    "u32": (GGUFValueType.UINT32, GGUFValueType.INT32),
    "f32": (GGUFValueType.FLOAT32, GGUFValueType.FLOAT64),
    "str": (GGUFValueType.STRING,),
}


@dataclass(frozen=True)
class Value:
    """One metadata entry: its GGUF type, and a number, a str, a tuple of str, or None for an array of numbers."""

    kind: GGUFValueType
    value: int | float | str | tuple[str, ...] | None


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `shape` in torch order, `start` and `nbytes` in the file."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    nbytes: int


class GgufFile:
    """A checked GGUF: `metadata` by key, `tensors` by name, and `read` for one tensor's values.

    Raises: ModelNotFoundError `not_found` or `not_a_file`; ModelFileError `bad_weights` naming what is wrong and where.
    """

    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = checked_model_file(path)
        with self.path.open("rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            head = file.read(24)
            self._check_head(head)
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        _, _, n_tensors, n_entries = struct.unpack("<4sIQQ", head)
        if n_entries > min(MAX_ENTRIES, self.size) or n_tensors > min(MAX_ENTRIES, self.size):
            self.fail(f"the header announces {n_entries} metadata entries and {n_tensors} tensors")
        self._at = 24
        self._strings = 0
        self.metadata = self._read_metadata(n_entries)
        self.tensors = self._read_tensors(n_tensors)

    def read(self, name: str) -> torch.Tensor:
        """A tensor's values, float32 on the CPU, in memory of its own.

        Raises: ModelFileError `unsupported` for a type that is not read, `bad_weights` for NaN or infinity.
        """
        info = self.tensors[name]
        if info.kind not in READABLE:
            kinds = ", ".join(kind.name for kind in READABLE)
            self.fail(f"tensor {name} is {info.kind.name}; read are {kinds}: use another build", "unsupported")
        raw = np.frombuffer(self._map, np.uint8, info.nbytes, info.start)
        if info.kind == GGMLQuantizationType.F32:
            values = raw.view("<f4").astype(np.float32)  # astype copies
        else:
            rows = raw.reshape(-1, info.nbytes // math.prod(info.shape[:-1]))
            with np.errstate(over="ignore", invalid="ignore"):
                values = np.ascontiguousarray(dequantize(rows, info.kind), dtype=np.float32)
        self._release(info)
        low, high = (float(v) for v in torch.from_numpy(values).aminmax())
        if not (math.isfinite(low) and math.isfinite(high)):
            self.fail(f"tensor {name} holds NaN or infinity")
        return torch.from_numpy(values).reshape(info.shape)

    def text(self, key: str, default: str = "") -> str:
        """A string entry, or `default` where the file has none. Raises: ModelFileError when it is no string."""
        value = self._typed(key, "str")
        return default if value is None else str(value)

    def number(self, key: str, kind: str) -> int | float | None:
        """A "u32" or "f32" entry, or None. Raises: ModelFileError when it has another type."""
        return self._typed(key, kind)  # type: ignore[return-value]

    def _typed(self, key: str, kind: str) -> object:
        entry = self.metadata.get(key)
        if entry is None:
            return None
        if entry.kind not in KINDS[kind]:
            self.fail(f"{key} is stored as {entry.kind.name}, not as {kind}")
        return entry.value

    def _release(self, info: TensorInfo) -> None:
        """Give the pages just read back, so that loading does not hold the model twice."""
        if hasattr(mmap, "MADV_DONTNEED"):
            start = info.start - info.start % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, start, info.start + info.nbytes - start)

    def _check_head(self, head: bytes) -> None:
        if not head:
            self.fail("the file is empty; download it again")
        if head.startswith(b"version https://git-lfs"):
            self.fail("this is a Git LFS pointer, not the model: run `git lfs pull`, or download the file itself")
        if len(head) < 4 or head[:4] != b"GGUF":
            self.fail(f"this is no GGUF: it begins with {head[:4]!r}")
        if len(head) < 24:
            self.fail(f"the file is cut inside its header ({self.size} bytes)")
        (version,) = struct.unpack_from("<I", head, 4)
        if version == 3 << 24:
            self.fail("this is a big-endian GGUF; only little-endian files are read")
        if version != 3:
            self.fail(f"this is GGUF version {version}; only version 3 is read")

    def _take(self, count: int, what: str) -> int:
        """Move on by `count` bytes that must be there; returns where they start."""
        start = self._at
        if count > self.size - start:
            self.fail(f"{what} at byte {start} takes {count} bytes, the file has {self.size}")
        self._at = start + count
        return start

    def _scalar(self, code: str, what: str) -> int | float:
        start = self._take(struct.calcsize(code), what)
        return struct.unpack_from(code, self._map, start)[0]

    def _string(self, what: str, most: int) -> str:
        length = int(self._scalar("<Q", what))
        if length > most:
            self.fail(f"{what} at byte {self._at} announces a string of {length} bytes, at most {most} are read")
        start = self._take(length, what)
        try:
            return str(self._map[start : start + length], "utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} at byte {start} is not UTF-8")

    def _read_metadata(self, count: int) -> dict[str, Value]:
        metadata: dict[str, Value] = {}
        for i in range(count):
            key = self._string(f"the key of metadata entry {i}", MAX_NAME)
            if key in metadata:
                self.fail(f"metadata key {key!r} appears twice")
            metadata[key] = self._value(key)
        return metadata

    def _value_type(self, key: str) -> GGUFValueType:
        number = int(self._scalar("<I", f"the type of {key!r}"))
        try:
            return GGUFValueType(number)
        except ValueError:
            self.fail(f"metadata {key!r} has the unknown type {number}")

    def _value(self, key: str) -> Value:
        kind = self._value_type(key)
        what = f"metadata {key!r}"
        if kind == GGUFValueType.STRING:
            return Value(kind, self._string(what, MAX_STRING))
        if kind != GGUFValueType.ARRAY:
            return Value(kind, self._scalar(_SCALARS[kind], what))
        inner = self._value_type(key)
        length = int(self._scalar("<Q", what))
        if inner == GGUFValueType.ARRAY:
            self.fail(f"{what} holds arrays inside an array")
        if inner != GGUFValueType.STRING:
            self._take(length * struct.calcsize(_SCALARS[inner]), what)
            return Value(kind, None)
        self._strings += length
        if self._strings > MAX_STRINGS:
            self.fail(f"{what} announces {length} strings; at most {MAX_STRINGS} are read")
        return Value(kind, tuple(self._string(what, MAX_STRING) for _ in range(length)))

    def _read_tensors(self, count: int) -> dict[str, TensorInfo]:
        found: dict[str, tuple[tuple[int, ...], GGMLQuantizationType, int, int]] = {}
        for i in range(count):
            name = self._string(f"the name of tensor {i}", MAX_NAME)
            if not name or name in found:
                self.fail(f"tensor {i} has no name" if not name else f"tensor {name} appears twice")
            found[name] = self._tensor_entry(name)
        alignment = self.metadata.get("general.alignment", Value(GGUFValueType.UINT32, 32))
        step = alignment.value
        if alignment.kind != GGUFValueType.UINT32 or not isinstance(step, int) or step < 1 or step & (step - 1):
            self.fail(f"general.alignment is {step!r}, not a power of two")
        base = -(-self._at // step) * step
        return self._placed(found, base, step)

    def _tensor_entry(self, name: str) -> tuple[tuple[int, ...], GGMLQuantizationType, int, int]:
        """(shape, type, offset, nbytes); sizes are whole Python numbers, so that none can wrap."""
        n_dims = int(self._scalar("<I", f"tensor {name}"))
        if not 1 <= n_dims <= 4:
            self.fail(f"tensor {name} has {n_dims} dimensions; 1-4 are legal")
        dims = tuple(int(self._scalar("<Q", f"tensor {name}")) for _ in range(n_dims))
        number, offset = int(self._scalar("<I", f"tensor {name}")), int(self._scalar("<Q", f"tensor {name}"))
        try:
            kind = GGMLQuantizationType(number)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            self.fail(f"tensor {name} has the unknown type {number}")
        if min(dims) < 1 or dims[0] % block:
            self.fail(f"tensor {name}: {kind.name} with dimensions {dims}")
        nbytes = math.prod(dims) // block * block_bytes
        if nbytes > self.size:
            self.fail(f"tensor {name} with dimensions {dims} takes {nbytes} bytes, the file has {self.size}")
        return tuple(reversed(dims)), kind, offset, nbytes

    def _placed(self, found: dict, base: int, step: int) -> dict[str, TensorInfo]:
        """Offsets made absolute and checked: aligned, inside the file, not overlapping."""
        tensors = {}
        for name, (shape, kind, offset, nbytes) in found.items():
            if offset % step or base + offset + nbytes > self.size:
                self.fail(f"tensor {name}: {nbytes} bytes at offset {offset} are outside the file or misaligned")
            tensors[name] = TensorInfo(name, shape, kind, base + offset, nbytes)
        end, last = base, ""
        for info in sorted(tensors.values(), key=lambda info: info.start):
            if info.start < end:
                self.fail(f"tensors {last} and {info.name} overlap")
            end, last = info.start + info.nbytes, info.name
        return tensors

    def fail(self, message: str, code: str = "bad_weights") -> NoReturn:
        """Raise ModelFileError for this file."""
        raise ModelFileError(f"{self.path}: {message}", code=code, source=self.path)


def checked_model_file(path: str | os.PathLike) -> Path:
    """An existing regular file. Raises: ModelNotFoundError `not_found` or `not_a_file`."""
    resolved = Path(path).expanduser()
    try:
        mode = resolved.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a NUL character
        raise ModelNotFoundError(f"no such model file: {resolved}", code="not_found", source=resolved) from error
    if not stat.S_ISREG(mode):
        hint = "; load a snapshot folder with from_pretrained" if stat.S_ISDIR(mode) else ""
        raise ModelNotFoundError(f"{resolved} is not a file{hint}", code="not_a_file", source=resolved)
    return resolved
