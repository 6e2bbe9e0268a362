"""Files of a run, written so that each is there whole or not at all.

A shard is `shards/<name>.safetensors`, its part of the index `index.parquet/<name>.parquet`. The part is written last
and carries the shard's size and SHA-256: what has a part was written, what has none does not count. Both go to a
temporary name, to the disk (fsync), and then by one rename to their own. What writes needs neither torch nor a model.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from .errors import RunError

if TYPE_CHECKING:
    from .embedding import Entry

INDEX, SHARDS, RUN = "index.parquet", "shards", "run.json"
FIELDS = (
    pa.field("id", pa.string()),
    pa.field("source", pa.int16()),
    pa.field("name", pa.string()),
    pa.field("what", pa.string()),
    pa.field("layer", pa.int16()),
    pa.field("shard", pa.string()),
    pa.field("key", pa.string()),
    pa.field("seconds_key", pa.string()),
    pa.field("shape", pa.list_(pa.int32())),
    pa.field("dtype", pa.string()),
    pa.field("offset_s", pa.float64()),
    pa.field("duration_s", pa.float64()),
    pa.field("tokens", pa.int32()),
    pa.field("segments", pa.list_(pa.string())),
    pa.field("code", pa.string()),
    pa.field("error", pa.string()),
    pa.field("warning", pa.string()),
    pa.field("row", pa.string()),
)
COLUMNS = tuple(field.name for field in FIELDS)
_META = b"audiollm"
_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """One part of the index: `name`, and of its shard `nbytes` and `sha256`, both None where it has only errors."""

    name: str
    nbytes: int | None
    sha256: str | None


def schema(labels: Sequence[pa.Field]) -> pa.Schema:
    """The index's columns, then the labels."""
    return pa.schema([*FIELDS, *labels])


@dataclass(frozen=True)
class Packed:
    """Entries as bytes: `data`, the whole file of a shard, or None where no row gave anything; `lines` of the index.

    `rows` and `failed` count the entries.
    """

    data: bytes | None = field(repr=False)
    lines: Sequence[Mapping[str, Any]] = field(repr=False)
    rows: int
    failed: int


def pack(entries: Sequence[Entry]) -> Packed:
    """Entries -> the bytes of one shard."""
    import safetensors.torch

    tensors = {key: tensor for entry in entries for key, tensor in entry.tensors.items()}
    data = safetensors.torch.save(tensors, metadata={"format": "pt"}) if tensors else None
    lines = [line for entry in entries for line in entry.lines]
    return Packed(data, lines, len(entries), sum(not entry.tensors for entry in entries))


def write_shard(folder: Path, name: str, packed: Packed, index: pa.Schema) -> None:
    """Write one shard and its part of the index.

    Raises: RunError `disk_full` where the disk, a quota or a limit has no room; nothing of it is left then.
    """
    told: dict[str, Any] = {"nbytes": None, "sha256": None}
    file = f"{SHARDS}/{name}.safetensors"
    if packed.data is not None:
        told = {"nbytes": len(packed.data), "sha256": hashlib.sha256(packed.data).hexdigest()}
        _put(folder / file, packed.data)
    lines = [{**line, "shard": file if line.get("key") else None} for line in packed.lines]
    write_part(folder, name, lines_table(lines, index), told)
    _log.debug("wrote %s: %d rows", name, packed.rows)


def is_written(folder: Path, name: str) -> bool:
    """Whether a shard and its part are there; the shard by its size."""
    path = folder / INDEX / f"{name}.parquet"
    return path.is_file() and is_whole(folder, read_part(path), checksum=False)


def lines_table(lines: Sequence[Mapping[str, Any]], index: pa.Schema) -> pa.Table:
    """Lines as a table with the index's columns; what a line lacks is null."""
    columns = {field.name: pa.array([line.get(field.name) for line in lines], field.type) for field in index}
    return pa.table(columns, schema=index)


def write_part(folder: Path, name: str, table: pa.Table, told: Mapping[str, Any]) -> None:
    """Write one part of the index, with what is `told` of its shard. Raises: RunError `disk_full`."""
    buffer = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({_META: json.dumps(dict(told)).encode()}), buffer)
    _put(folder / INDEX / f"{name}.parquet", buffer.getvalue())


def read_part(path: Path) -> Part:
    """What a part says of its shard. Raises: pyarrow's errors, OSError, ValueError or KeyError for one that is damaged."""
    told = json.loads((pq.read_schema(path).metadata or {})[_META])
    return Part(path.stem, told["nbytes"], told["sha256"])


def is_whole(folder: Path, part: Part, checksum: bool) -> bool:
    """Whether a part's shard is there as it was written: its size, and its bytes where `checksum` asks for it."""
    if part.nbytes is None:
        return True
    path = folder / SHARDS / f"{part.name}.safetensors"
    if not path.is_file() or path.stat().st_size != part.nbytes:
        return False
    if not checksum:
        return True
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == part.sha256


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all. Raises: RunError `disk_full`."""
    _put(path, text.encode())


def _put(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            _sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise RunError(
            f"{path} cannot be written ({os.strerror(error.errno)}); make room and run the same command again: what was "
            "written before is kept",
            code="disk_full",
            source=path,
        ) from error


def _sync(folder: Path) -> None:
    """A rename is on the disk once its folder is."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _pack_and_write(folder: Path, name: str, entries: Sequence[Entry], index: pa.Schema) -> None:
    write_shard(folder, name, pack(entries), index)


class Writer:
    """Gathers entries to shards of about `shard_bytes`, or of `commit_s` seconds of work, and writes them by a thread.

    One shard is gathered while the one before is written, so at most two are in memory.
    """

    def __init__(self, folder: Path, first: int, index: pa.Schema, shard_bytes: int, commit_s: float) -> None:
        self._folder, self._next, self._index = folder, first, index
        self._shard_bytes, self._commit_s = shard_bytes, commit_s
        self._entries: list[Entry] = []
        self._nbytes, self._since = 0, time.monotonic()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="audiollm-write")
        self._writing: Future[None] | None = None

    def add(self, entry: Entry) -> None:
        """Take an entry; write what has gathered where that is enough. Raises: RunError `disk_full`, also of before."""
        if self._entries and self._nbytes + entry.nbytes > self._shard_bytes:
            self.commit()
        self._entries.append(entry)
        self._nbytes += entry.nbytes
        if time.monotonic() - self._since >= self._commit_s:
            self.commit()

    def commit(self) -> None:
        """Hand what has gathered to the thread, once it has written what it had before. Raises: RunError `disk_full`."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None
        if self._entries:
            name = f"{self._next:06d}"
            self._writing = self._thread.submit(_pack_and_write, self._folder, name, self._entries, self._index)
            self._next += 1
        self._entries, self._nbytes, self._since = [], 0, time.monotonic()

    def close(self, keep: bool) -> None:
        """Write the rest where it is to be kept, and wait. Raises: RunError `disk_full`."""
        try:
            if keep:
                self.commit()
                self.commit()
        finally:
            self._thread.shutdown(wait=True)
