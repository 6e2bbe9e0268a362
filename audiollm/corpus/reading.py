"""Reading a run: the index, clips by id, and everything of one kind as an array. Shards are memory-mapped when asked for."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from safetensors import SafetensorError, safe_open
from tqdm.auto import tqdm

from ..errors import ArgumentError, AudioLLMError
from ..paths import local_path
from .arrays import Arrays
from .errors import RunError, UnknownClipError
from .folder import read_description, read_index
from .shards import COLUMNS, INDEX, is_whole, read_part

# Open files and mappings that a run keeps; the least used are closed.
_OPEN_SHARDS = 64


def open_run(path: str | Path) -> Run:
    """Open a run for reading; tensors are read when they are asked for.

    A run that is being written can be opened too, and shows what was there then.
    Raises: RunError `bad_run` for a folder that is no run, or whose index is damaged.
    """
    folder = local_path(path, "path")
    return Run(folder, read_description(folder), read_index(folder))


class _Layers(Mapping[int, torch.Tensor]):
    """Layers of one source by number, negative ones from the end, read when asked for."""

    def __init__(self, run: Run, lines: Mapping[int, int]) -> None:
        self._run, self._lines = run, lines

    def __getitem__(self, layer: int) -> torch.Tensor:
        number = layer + self._run.n_layers + 1 if layer < 0 else layer
        if number not in self._lines:
            raise UnknownClipError(
                f"layer {layer} is not in this run, which holds {', '.join(map(str, self._lines)) or 'none'}",
                code="bad_argument",
                source="layer",
            )
        return self._run.tensor(self._lines[number])

    def __iter__(self) -> Iterator[int]:
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)

    def __repr__(self) -> str:
        return f"layers {', '.join(map(str, self._lines)) or 'none'}"


@dataclass(frozen=True, eq=False, repr=False)
class Clip:
    """One source of one row, read when asked for.

    `contextual[layer]`, `projected`, `raw`: [U, D], [S, D] or [D] as the run was pooled, in its dtype; `seconds` [R, 2]
    float64 of their rows within the clip; `offset_s`, where the clip begins in its file, and `duration_s` of it; `tokens`,
    U; `segments`, names of the intervals or None; `labels`; `warning`, what was said of the file, or None.
    """

    id: str
    source: int
    name: str
    offset_s: float
    duration_s: float
    tokens: int
    segments: tuple[str, ...] | None
    labels: Mapping[str, Any]
    warning: str | None
    run: Run
    lines: Mapping[tuple[str, int | None], int]

    @property
    def contextual(self) -> Mapping[int, torch.Tensor]:
        """Language-model states by layer; negative numbers count from the end."""
        return _Layers(
            self.run, {k: at for (what, k), at in self.lines.items() if what == "contextual" and k is not None}
        )

    @property
    def projected(self) -> torch.Tensor:
        """What the language model is given. Raises: UnknownClipError where the run does not hold it."""
        return self._plain("projected")

    @property
    def raw(self) -> torch.Tensor:
        """What the audio tower gives. Raises: UnknownClipError where the run does not hold it."""
        return self._plain("raw")

    @property
    def seconds(self) -> torch.Tensor:
        """[R, 2] float64: start and end of each stored row, in seconds of the clip; [1, 2] where all is one mean."""
        return self.run.seconds(next(iter(self.lines.values())))

    def _plain(self, what: str) -> torch.Tensor:
        if (what, None) not in self.lines:
            held = sorted({name for name, _ in self.lines})
            raise UnknownClipError(
                f"{what} is not in this run, which holds {', '.join(held)}", code="bad_argument", source="what"
            )
        return self.run.tensor(self.lines[what, None])

    def __repr__(self) -> str:
        at = f" from {self.offset_s:g} s" if self.offset_s else ""
        return (
            f"Clip({self.id!r}, source {self.source}, {self.name!r}{at}: {self.duration_s:.3f} s, {self.tokens} tokens)"
        )


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """A run folder that was opened: `path`; `description`, what run.json says; `index`, a pyarrow Table.

    `run["id"]` is the Clip of a row with one source, `run["id", k]` that of its source k; iterating gives the ids.
    """

    path: Path
    description: Mapping[str, Any]
    index: pa.Table = field(repr=False)

    @property
    def n_layers(self) -> int:
        """n, the number of the model's decoder blocks."""
        return int(self.description["snapshot"]["n_layers"])

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the manifest's other columns."""
        return tuple(name for name in self.index.column_names if name not in COLUMNS)

    @cached_property
    def _lines(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for at, clip in enumerate(self.index["id"].to_pylist()):
            found.setdefault(clip, []).append(at)
        return found

    @cached_property
    def failures(self) -> Mapping[str, str]:
        """What was said of rows that could not be used, by id."""
        bad = self.index.filter(pc.is_valid(self.index["error"]))
        return dict(zip(bad["id"].to_pylist(), bad["error"].to_pylist(), strict=True))

    def __len__(self) -> int:
        return len(self._lines)

    def __iter__(self) -> Iterator[str]:
        return iter(self._lines)

    def __contains__(self, clip: object) -> bool:
        return clip in self._lines

    def __getitem__(self, which: str | tuple[str, int]) -> Clip:
        """A clip by id, or by id and number of its source.

        Raises: UnknownClipError for an id or source that is not there, or an id alone where there are several sources;
        AudioLLMError with the recorded code for a row that failed.
        """
        clip, source = which if isinstance(which, tuple) else (which, None)
        lines = self._rows(clip)
        sources = sorted({line["source"] for line in lines})
        if (source is None and len(sources) > 1) or (source is not None and source not in sources):
            raise UnknownClipError(
                f"{clip!r} has the sources {', '.join(map(str, sources))}; ask for run[{clip!r}, {sources[-1]}]",
                code="bad_argument",
                source=clip,
            )
        mine = [line for line in lines if source is None or line["source"] == source]
        first = mine[0]
        return Clip(
            **{name: first[name] for name in ("id", "source", "name", "offset_s", "duration_s", "tokens", "warning")},
            segments=None if first["segments"] is None else tuple(first["segments"]),
            labels={name: first[name] for name in self.labels},
            run=self,
            lines={(line["what"], line["layer"]): line["at"] for line in mine},
        )

    def _rows(self, clip: str) -> list[dict[str, Any]]:
        if clip not in self._lines:
            close = difflib.get_close_matches(str(clip), list(self._lines)[:100_000], 3)
            hint = f"; the closest are {', '.join(map(repr, close))}" if close else ""
            raise UnknownClipError(f"{clip!r} is not in {self.path}{hint}", code="bad_argument", source=clip)
        at = self._lines[clip]
        lines = [line | {"at": k} for k, line in zip(at, self.index.take(pa.array(at)).to_pylist(), strict=True)]
        if lines[0]["error"] is not None:
            raise AudioLLMError(f"{clip!r} failed: {lines[0]['error']}", code=lines[0]["code"], source=clip)
        return lines

    def tensor(self, line: int) -> torch.Tensor:
        """The tensor of a line of the index, memory-mapped. Raises: RunError `bad_run` for a shard that is damaged."""
        return self._read(self.index["shard"][line].as_py(), self.index["key"][line].as_py())

    def seconds(self, line: int) -> torch.Tensor:
        """[R, 2] float64, the seconds of a line's rows within the clip. Raises: RunError `bad_run`."""
        return self._read(self.index["shard"][line].as_py(), self.index["seconds_key"][line].as_py())

    def _read(self, shard: str, key: str) -> torch.Tensor:
        try:
            path = self.path / shard
            return _opened(path, path.stat().st_mtime_ns).get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise RunError(
                f"{self.path / shard} cannot be read ({error}); run the command that made it again and it is done anew",
                code="bad_run",
                source=self.path / shard,
            ) from None

    def verify(self) -> tuple[str, ...]:
        """Names of shards that are not as they were written, by their SHA-256; all are read once.

        Raises: RunError `bad_run` where a part of the index is damaged.
        """
        parts = [read_part(path) for path in sorted((self.path / INDEX).glob("*.parquet"))]
        bar = tqdm(parts, desc="checking", unit="shard", leave=False, disable=None)
        return tuple(part.name for part in bar if not is_whole(self.path, part, checksum=True))

    def to_arrays(self, what: str = "projected", layer: int | None = None, pool: str | None = None) -> Arrays:
        """Every source's embedding of one kind as rows of numbers, failures left out.

        Parameters: `what`; `layer` of contextual, negative ones from the end (may be left out where there is one); `pool`,
        "mean" for the mean over each source's rows where the run holds more than that, None as stored.
        Raises: ArgumentError for what this run does not hold.
        """
        lines = self._chosen(what, layer)
        if pool not in (None, "mean"):
            raise ArgumentError(f"pool={pool!r}; pass None or 'mean'", code="bad_argument", source="pool")
        shapes = lines["shape"].to_pylist()
        counts = [1 if pool == "mean" or len(shape) == 1 else shape[0] for shape in shapes]
        starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        values = np.empty((starts[-1], shapes[0][-1]), dtype=np.float32)
        seconds = np.empty((starts[-1], 2))
        shards, keys, times = (lines[name].to_pylist() for name in ("shard", "key", "seconds_key"))
        bar = tqdm(range(len(keys)), desc=what, unit="source", leave=False, disable=None)
        for k in bar:
            span = slice(starts[k], starts[k + 1])
            stored = self._read(shards[k], keys[k]).float()
            values[span] = (stored.mean(0) if pool == "mean" and stored.ndim == 2 else stored).numpy()
            within = self._read(shards[k], times[k]).numpy()
            seconds[span] = (within[0, 0], within[-1, 1]) if pool == "mean" else within
        names = lines["segments"].to_pylist()
        return Arrays(
            what=what,
            layer=lines["layer"][0].as_py(),
            values=values,
            ids=np.repeat(_objects(lines["id"]), counts),
            sources=np.repeat(lines["source"].to_numpy(), counts),
            seconds=seconds,
            segments=None if pool == "mean" or names[0] is None else np.array([n for some in names for n in some]),
            labels={name: np.repeat(_objects(lines[name]), counts) for name in self.labels},
        )

    def _chosen(self, what: str, layer: int | None) -> pa.Table:
        lines = self.index.filter(pc.equal(self.index["what"], what))
        held = sorted({name for name in self.index["what"].unique().to_pylist() if name})
        if not len(lines):
            raise ArgumentError(
                f"what={what!r}; this run holds {', '.join(held) or 'no embeddings'}",
                code="bad_argument",
                source="what",
            )
        layers = sorted(number for number in lines["layer"].unique().to_pylist() if number is not None)
        if layer is None and len(layers) <= 1:
            return lines
        number = layer + self.n_layers + 1 if layer is not None and layer < 0 else layer
        if number not in layers:
            raise ArgumentError(
                f"layer={layer!r}; this run holds {', '.join(map(str, layers)) or 'none'} of {what}",
                code="bad_argument",
                source="layer",
            )
        return lines.filter(pc.equal(lines["layer"], number))

    def __repr__(self) -> str:
        told = self.description
        kinds = [name for name in told["arguments"]["what"] if name != "contextual"]
        if told["arguments"]["layers"]:
            kinds.append(f"contextual {', '.join(map(str, told['arguments']['layers']))}")
        failed = f", {len(self.failures)} failed" if self.failures else ""
        return (
            f"Run({self.path.name!r}: {len(self)} rows{failed}; {'; '.join(kinds)}; pool {told['arguments']['pool']}, "
            f"{told['arguments']['dtype']}, {told['snapshot']['family']})"
        )


@lru_cache(_OPEN_SHARDS)
def _opened(path: Path, changed_ns: int) -> Any:
    """A shard as it is now, memory-mapped; one that was done anew is opened anew."""
    return safe_open(path, framework="pt")


def _objects(column: pa.ChunkedArray) -> np.ndarray:
    return np.array(column.to_pylist())
