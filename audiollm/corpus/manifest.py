"""A table of clips: CSV, Parquet or a folder -> rows.

Columns: `id` (any text, unique); `audio`, or `audio_1` to `audio_5` for several sources in order (in Parquet also a list
of paths in `audio`); `prompt`, `start_s`, `end_s`, which may be missing or empty. Every other column is a label and is
kept beside the embeddings. Relative paths are relative to the manifest's folder. `start_s` and `end_s`, in seconds of
the file, hold for every source of their row. In a folder every sound file is a row, its path within the folder the id.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from ..paths import local_path
from ..request import MAX_SOURCES
from .errors import ManifestError

AUDIO_COLUMNS = ("audio", *(f"audio_{k}" for k in range(1, MAX_SOURCES + 1)))
OWN_COLUMNS = ("id", "prompt", "start_s", "end_s", *AUDIO_COLUMNS)
SOUND_SUFFIXES = (
    ".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".aif", ".aiff", ".aifc", ".au", ".snd", ".caf", ".w64", ".rf64",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One row as it is written: nothing but `id` has been checked.

    `audios`, paths as written, relative to `folder`; `prompt` or None; `start_s`, `end_s`, numbers, text or None;
    `labels` by their names in the index.
    """

    id: str
    audios: tuple[str, ...]
    folder: Path
    prompt: str | None = None
    start_s: Any = None
    end_s: Any = None
    labels: dict[str, Any] = field(default_factory=dict)

    def path(self, k: int) -> Path:
        """Where source k lies."""
        return self.folder / local_path(self.audios[k], "audio")

    @property
    def digest(self) -> str:
        """A word that changes with anything that the embeddings depend on: audio as written, prompt, start and end."""
        told = json.dumps([self.audios, self.prompt, _number(self.start_s), _number(self.end_s)])
        return hashlib.sha256(told.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Manifest:
    """A table that was read: `path`; `folder` that its paths are relative to; `table`; `labels`, by column there."""

    path: Path
    folder: Path
    table: pa.Table = field(repr=False)
    labels: dict[str, str]

    def __len__(self) -> int:
        return self.table.num_rows

    def ids(self) -> list[str]:
        """Every id, in order."""
        return self.table["id"].to_pylist()

    def label_fields(self) -> list[pa.Field]:
        """The label columns as the index holds them; a column of nothing but empty cells is text."""
        kinds = {name: self.table.schema.field(column).type for column, name in self.labels.items()}
        return [pa.field(name, pa.string() if pa.types.is_null(kind) else kind) for name, kind in kinds.items()]

    def cast(self, index: pa.Schema) -> Manifest:
        """The same, with labels of the types that an index holds them in."""
        table = self.table
        for column, name in self.labels.items():
            at = table.column_names.index(column)
            table = table.set_column(at, column, table[column].cast(index.field(name).type))
        return replace(self, table=table)

    def rows(self, which: Iterable[int] | None = None, chunk: int = 1024) -> Iterator[Row]:
        """Rows by number, or all, in order; Python objects are made for `chunk` of them at a time."""
        numbers = list(range(len(self)) if which is None else which)
        audio = [c for c in AUDIO_COLUMNS if c in self.table.column_names]
        for first in range(0, len(numbers), chunk):
            for cells in self.table.take(pa.array(numbers[first : first + chunk], pa.int64())).to_pylist():
                yield Row(
                    id=cells["id"],
                    audios=tuple(path for column in audio for path in _paths(cells[column])),
                    folder=self.folder,
                    prompt=cells.get("prompt"),
                    start_s=cells.get("start_s"),
                    end_s=cells.get("end_s"),
                    labels={name: cells[column] for column, name in self.labels.items()},
                )


def read_manifest(manifest: str | os.PathLike[str], taken: Iterable[str] = ()) -> Manifest:
    """Read a table of clips, or look through a folder.

    Parameters: `manifest`, a .csv, .tsv or .parquet file, or a folder; `taken`, column names of the index: a label of
    such a name is kept as `label_<name>`. Values in rows are not looked at, but for ids.

    Raises: ManifestError `not_found`, `unsupported`, or `bad_manifest` for text that is no table, missing columns, and
    ids that are missing or there twice.
    """
    path = local_path(manifest, "manifest")
    if path.is_dir():
        table, folder = _folder_table(path), path
    elif path.is_file():
        table, folder = _file_table(path), path.parent
    else:
        raise ManifestError(f"{path} cannot be found; check the path", code="not_found", source=path)
    table = _checked(table, path)
    return Manifest(path, folder.absolute(), table, _label_names(table, set(taken), path))


def _folder_table(folder: Path) -> pa.Table:
    found = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SOUND_SUFFIXES and p.is_file())
    if not found:
        raise ManifestError(
            f"{folder} holds no sound file ({', '.join(SOUND_SUFFIXES)})", code="bad_manifest", source=folder
        )
    names = [_as_text(p.relative_to(folder).as_posix(), folder) for p in found]
    return pa.table({"id": names, "audio": names})


def _as_text(name: str, folder: Path) -> str:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ManifestError(
            f"{folder} holds {name!r}, a name that is not UTF-8; rename the file", code="bad_manifest", source=folder
        ) from None
    return name


def _file_table(path: Path) -> pa.Table:
    kind = path.suffix.lower()
    try:
        if kind in (".csv", ".tsv"):
            return pa.csv.read_csv(
                path,
                parse_options=pa.csv.ParseOptions(delimiter="\t" if kind == ".tsv" else ",", newlines_in_values=True),
                # What is ours is text until it is looked at: one bad cell must not change the others.
                convert_options=pa.csv.ConvertOptions(
                    column_types=dict.fromkeys(OWN_COLUMNS, pa.string()), strings_can_be_null=False
                ),
            )
        if kind == ".parquet":
            return pq.read_table(path)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path} cannot be read: {error}", code="bad_manifest", source=path) from None
    raise ManifestError(
        f"{path} is not a manifest; pass a .csv, .tsv or .parquet file, or a folder", code="unsupported", source=path
    )


def _checked(table: pa.Table, path: Path) -> pa.Table:
    names = table.column_names
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise _bad(path, f"has the column(s) {', '.join(twice)} twice; rename one")
    audio = [column for column in AUDIO_COLUMNS if column in names]
    if "id" not in names or not audio:
        raise _bad(path, f"has the columns {', '.join(names)}; it needs id, and audio or audio_1, audio_2, ...")
    if "audio" in audio and len(audio) > 1:
        raise _bad(path, f"has the columns {', '.join(audio)}; use audio alone, or audio_1, audio_2, ...")
    for column in audio:
        kind = table.schema.field(column).type
        inner = kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else kind
        if not (pa.types.is_string(inner) or pa.types.is_large_string(inner) or pa.types.is_null(inner)):
            raise _bad(path, f"holds {kind} in {column}; it must be paths as text, or lists of them")
    for column in ("id", "prompt"):
        if column in names:
            at = names.index(column)
            try:
                table = table.set_column(at, column, table[column].cast(pa.string()))
            except pa.ArrowException:
                raise _bad(path, f"holds {table.schema.field(column).type} in {column}; it must be text") from None
    return _checked_ids(table, path)


def _checked_ids(table: pa.Table, path: Path) -> pa.Table:
    ids = table["id"]
    if not len(ids):
        raise _bad(path, "holds no rows")
    empty = pc.or_(pc.is_null(ids), pc.equal(pc.fill_null(ids, ""), ""))
    if pc.any(empty).as_py():
        raise _bad(path, f"has no id in row {pc.index(empty, True).as_py() + 1}; every row needs its own")
    counts = ids.value_counts()
    twice = counts.filter(pc.greater(counts.field("counts"), 1)).field("values").to_pylist()
    if twice:
        some = ", ".join(repr(name) for name in twice[:3]) + (f" and {len(twice) - 3} more" if len(twice) > 3 else "")
        raise _bad(path, f"has the id(s) {some} more than once; every row needs its own")
    return table


def _label_names(table: pa.Table, taken: set[str], path: Path) -> dict[str, str]:
    columns = [name for name in table.column_names if name not in OWN_COLUMNS]
    names = {column: f"label_{column}" if column in taken else column for column in columns}
    both = [name for column, name in names.items() if name != column and name in columns]
    if both:
        raise _bad(path, f"has the column {both[0]!r} beside {both[0].removeprefix('label_')!r}; rename one")
    return names


def _paths(cell: str | list[str] | None) -> list[str]:
    cells = cell if isinstance(cell, list) else [cell]
    return [path for path in cells if path]


def _number(value: Any) -> Any:
    """Seconds as a float where they are one, so that `1.50` and `1.5` are the same clip."""
    try:
        return None if value in (None, "") else float(value)
    except (TypeError, ValueError):
        return str(value)


def _bad(path: Path, what: str) -> ManifestError:
    return ManifestError(f"{path} {what}", code="bad_manifest", source=path)
