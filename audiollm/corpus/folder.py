"""The folder of a run: one writer at a time, one set of parameters, and what is already there.

run.json          the snapshot, versions and arguments
index.parquet/    one part a shard; together the index, as pandas, datasets and pyarrow read a folder of Parquet
shards/           safetensors
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import filelock
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
from tqdm.auto import tqdm

from ..paths import local_path
from .errors import RunError
from .manifest import Manifest
from .shards import COLUMNS, INDEX, RUN, SHARDS, Part, is_whole, read_part, schema, write_part, write_text

FORMAT = 1
_LOCK = ".lock"
# What a Parquet file that was cut or overwritten makes its reader raise.
_DAMAGED = (pa.ArrowException, OSError, ValueError, KeyError, TypeError)
_log = logging.getLogger(__name__)


class RunFolder:
    """`with RunFolder(path, description) as folder:` locks a run for writing and looks at what it holds.

    `description` is what run.json says; a folder of another snapshot or other arguments is refused. Shards that are not
    as they were written (by size, and by SHA-256 where `verify`) and files that an interrupted run left are removed, so
    that what they held counts as missing.

    Raises: RunError `locked`, or `bad_run` naming the first difference, or a folder that is no run.
    """

    def __init__(self, path: str | Path, description: Mapping[str, Any], verify: bool = True) -> None:
        self.path = local_path(path, "out")
        self._description, self._verify = description, verify
        self._lock = filelock.FileLock(self.path / _LOCK)

    def __enter__(self) -> RunFolder:
        if self.path.exists() and not self.path.is_dir():
            raise _bad(self.path, "is a file; name a folder")
        self.path.mkdir(parents=True, exist_ok=True)
        self._refuse_strangers()
        try:
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            raise RunError(
                f"another process is writing {self.path}; wait until it is done, or write to another folder",
                code="locked",
                source=self.path,
            ) from None
        try:
            self._begin()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def _refuse_strangers(self) -> None:
        if not (self.path / RUN).exists():
            others = [p.name for p in self.path.iterdir() if p.name != _LOCK and not p.name.startswith(f".{RUN}.")]
            if others:
                raise _bad(self.path, f"holds {sorted(others)[0]!r} and no {RUN}; name a new folder, or one of a run")

    def _begin(self) -> None:
        if (self.path / RUN).exists():
            _compare(self.path, read_description(self.path), self._description)
        else:
            write_text(self.path / RUN, json.dumps(self._description, indent=2, ensure_ascii=False) + "\n")
        for name in (INDEX, SHARDS):
            (self.path / name).mkdir(exist_ok=True)
        self._clean()

    def _clean(self) -> None:
        for folder in (self.path, self.path / INDEX, self.path / SHARDS):
            for path in folder.glob(".*.tmp"):
                path.unlink()
        whole, held = set[str](), set[str]()
        bar = tqdm(
            sorted((self.path / INDEX).glob("*.parquet")), desc="checking", unit="shard", leave=False, disable=None
        )
        for path in bar:
            found = self._part(path)
            if found is None or not is_whole(self.path, found[0], self._verify):
                _log.warning("%s is damaged; its rows are done again", path.stem)
                path.unlink()
            elif found[1] & held:  # a machine that was believed dead wrote late
                _log.warning("%s holds rows that are in another shard; it is left out", path.stem)
                path.unlink()
            else:
                whole.add(path.stem)
                held |= found[1]
        for path in (self.path / SHARDS).glob("*.safetensors"):
            if path.stem not in whole:
                path.unlink()

    def _part(self, path: Path) -> tuple[Part, set[str]] | None:
        """What a part says, and the ids in it; None where it is damaged."""
        try:
            return read_part(path), set(pq.read_table(path, columns=["id"])["id"].to_pylist())
        except _DAMAGED:
            return None

    def parts(self) -> list[Path]:
        """The parts of the index, in order of name."""
        return sorted((self.path / INDEX).glob("*.parquet"))

    def next_number(self) -> int:
        """The number of the next shard."""
        return max((int(p.stem) + 1 for p in self.parts() if p.stem.isdecimal()), default=0)

    def done(self) -> dict[str, str]:
        """The rows that are there, errors among them: id -> the digest of the row as it was."""
        table = read_index(self.path, ("id", "row"))
        return dict(zip(table["id"].to_pylist(), table["row"].to_pylist(), strict=True))

    def schema(self, manifest: Manifest) -> pa.Schema:
        """The index's columns for a manifest: those of the first part, where there is one.

        Raises: RunError `bad_run` where the manifest has other label columns, or values that do not fit them.
        """
        wanted = schema(manifest.label_fields())
        parts = self.parts()
        if not parts:
            return wanted
        there = pq.read_schema(parts[0]).remove_metadata()
        mine, its = set(wanted.names) - set(COLUMNS), set(there.names) - set(COLUMNS)
        if mine != its:
            raise _bad(self.path, f"was begun with the label columns {sorted(its)}, the manifest has {sorted(mine)}")
        columns = {name: column for column, name in manifest.labels.items()}
        for name in mine:
            kind = there.field(name).type
            try:
                manifest.table[columns[name]].cast(kind)
            except pa.ArrowException:
                raise _bad(self.path, f"holds {kind} in the column {name}, the manifest holds other values") from None
        return there

    def forget_errors(self) -> int:
        """Take rows with an error out of the index, so that they are done again; returns how many."""
        count = 0
        for path in self.parts():
            table = pq.read_table(path)
            kept = table.filter(pa.compute.is_null(table["error"]))
            if len(kept) < len(table):
                count += len(table) - len(kept)
                part = read_part(path)
                write_part(self.path, part.name, kept, {"nbytes": part.nbytes, "sha256": part.sha256})
        return count


def read_description(path: Path) -> dict[str, Any]:
    """What run.json says. Raises: RunError `bad_run` where it is not there or of another format."""
    try:
        told = json.loads((path / RUN).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _bad(path, f"has no {RUN}; name the folder of a run") from None
    except (OSError, ValueError) as error:
        raise _bad(path, f"has a {RUN} that cannot be read: {error}") from None
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        raise _bad(path, f"has a {RUN} of another format than {FORMAT}")
    return told


def read_index(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """The index, or some of its columns. Raises: RunError `bad_run` where a part is damaged."""
    parts = sorted((path / INDEX).glob("*.parquet"))
    if not parts:
        return schema(()).empty_table().select(list(columns) if columns else list(COLUMNS))
    try:
        return pyarrow.dataset.dataset(parts, format="parquet").to_table(
            columns=None if columns is None else list(columns)
        )
    except _DAMAGED as error:
        raise _bad(path, f"has a damaged index ({error}); run the command that made it again") from None


def _compare(path: Path, there: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    if there["snapshot"]["identity"] != asked["snapshot"]["identity"]:
        raise _bad(
            path,
            f"was made with another snapshot, {there['snapshot']['folder']} ({there['snapshot']['identity'][:12]}), than "
            f"{asked['snapshot']['folder']} ({asked['snapshot']['identity'][:12]}); write to another folder",
        )
    for name, value in asked["arguments"].items():
        if there["arguments"].get(name) != value:
            raise _bad(
                path,
                f"was made with {name} {there['arguments'].get(name)!r}, and {value!r} is asked; write to another folder, or "
                "ask the same",
            )
    for name, version in asked["versions"].items():
        if there["versions"].get(name) != version:
            _log.warning("%s was begun with %s %s; this is %s", path, name, there["versions"].get(name), version)


def _bad(path: Path, what: str) -> RunError:
    return RunError(f"{path} {what}", code="bad_run", source=path)
