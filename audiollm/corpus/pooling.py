"""What becomes of a source's tokens: all are kept, or means are.

`none` keeps [U, D]. `mean` gives [D], the mean over all tokens. `segments:SECONDS` gives [S, D], one row each SECONDS of
the clip from its start; `labels:FILE` gives [S, D], one row each interval that FILE (.csv or .parquet: id, start_s,
end_s, label; seconds within the clip) has for the clip's id. A token belongs to the segment that its centre lies in; an
interval without a centre, shorter than a token, takes the token at its own middle; an interval past the end is left out.
Means are computed in float32 on the model's device.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch

from ..errors import ArgumentError, RequestError
from ..paths import local_path
from .errors import ManifestError

KINDS = "none, mean, segments:SECONDS or labels:FILE"
Interval = tuple[float, float, str]


@dataclass(frozen=True)
class Groups:
    """Which tokens of one source become which row.

    `spans` [S] of (first, end) tokens, or None where every token is kept; `seconds` [R, 2] float64 of the rows that are
    stored; `names`, the intervals' labels, or None.
    """

    spans: tuple[tuple[int, int], ...] | None
    seconds: np.ndarray
    names: tuple[str, ...] | None = None
    flat: bool = False

    def apply(self, states: torch.Tensor) -> torch.Tensor:
        """Tokens [U, D] -> [U, D] as they are, [S, D] float32, or [D] float32 for one mean over everything."""
        if self.spans is None:
            return states
        means = torch.stack([states[first:end].float().mean(0) for first, end in self.spans])
        return means[0] if self.flat else means


@dataclass(frozen=True)
class Pool:
    """A way to pool: `text` as asked; `kind`; `every_s`, seconds of a segment; `intervals` by id, with their `sha256`."""

    text: str
    kind: str
    every_s: float = 0.0
    intervals: dict[str, list[Interval]] = field(default_factory=dict, repr=False)
    sha256: str | None = None

    @classmethod
    def parse(cls, text: str) -> Pool:
        """Read `none`, `mean`, `segments:SECONDS` or `labels:FILE`.

        Raises: ArgumentError for anything else; ManifestError where FILE cannot be read.
        """
        kind, _, rest = text.partition(":") if isinstance(text, str) else ("", "", "")
        if text in ("none", "mean"):
            return cls(text, kind)
        if kind == "segments":
            return cls(text, kind, _seconds(rest))
        if kind == "labels" and rest:
            path = local_path(rest, "pool")
            return cls(text, kind, 0.0, *_read_intervals(path))
        raise ArgumentError(f"pool={text!r}; pass {KINDS}", code="bad_argument", source="pool")

    def check_token(self, token_s: float) -> None:
        """Raises: ArgumentError for segments shorter than one audio token of `token_s` seconds."""
        if self.kind == "segments" and self.every_s < token_s:
            raise ArgumentError(
                f"segments of {self.every_s:g} s are shorter than one audio token, {token_s:g} s; pass more, or pool 'none'",
                code="bad_argument",
                source="pool",
            )

    def rows(self, clip: str, n_tokens: int, used_s: float) -> int:
        """How many rows [D] one source of `n_tokens` and `used_s` seconds is stored as, about."""
        if self.kind == "segments":
            return math.ceil(used_s / self.every_s)
        return {"none": n_tokens, "mean": 1, "labels": len(self.intervals.get(clip, ()))}[self.kind]

    def groups(self, clip: str, seconds: np.ndarray) -> Groups:
        """The groups for a source of the row `clip` whose tokens lie at `seconds` [U, 2].

        Raises: RequestError where FILE has no interval for the clip, or all of them lie past its end.
        """
        if self.kind == "none":
            return Groups(None, seconds)
        whole = (float(seconds[0, 0]), float(seconds[-1, 1]))
        if self.kind == "mean":
            return Groups(((0, len(seconds)),), np.array([whole]), flat=True)
        centres = seconds.mean(axis=1)
        if self.kind == "segments":
            edges = np.arange(math.ceil(whole[1] / self.every_s) + 1) * self.every_s
            wanted: list[Interval] = [(a, min(b, whole[1]), "") for a, b in pairwise(edges.tolist())]
        else:
            wanted = self._of(clip, whole[1])
        spans = [_span(centres, start, end) for start, end, _ in wanted]
        if self.kind == "segments":  # a rest of less than half a token holds no centre: the segment before ends there
            kept = [k for k, (first, end) in enumerate(spans) if end > first]
        else:
            spans = [(a, b) if b > a else _nearest(seconds, wanted[k]) for k, (a, b) in enumerate(spans)]
            kept = list(range(len(wanted)))
        names = tuple(wanted[k][2] for k in kept) if self.kind == "labels" else None
        return Groups(tuple(spans[k] for k in kept), np.array([wanted[k][:2] for k in kept]), names)

    def _of(self, clip: str, end_s: float) -> list[Interval]:
        source = self.text.partition(":")[2]
        if clip not in self.intervals:
            raise RequestError(f"{source} has no interval for the id {clip!r}", code="bad_argument", source=source)
        inside = [(a, min(b, end_s), name) for a, b, name in self.intervals[clip] if a < end_s]
        if not inside:
            raise RequestError(
                f"{source} has no interval for {clip!r} within its {end_s:.3f} s; intervals are seconds within the clip",
                code="bad_argument",
                source=source,
            )
        return inside


def _span(centres: np.ndarray, start_s: float, end_s: float) -> tuple[int, int]:
    first, end = np.searchsorted(centres, (start_s, end_s), side="left")
    return int(first), int(end)


def _nearest(seconds: np.ndarray, interval: Interval) -> tuple[int, int]:
    token = int(np.searchsorted(seconds[:, 0], (interval[0] + interval[1]) / 2, side="right")) - 1
    return token, token + 1


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ArgumentError(
            f"pool='segments:{text}'; write the seconds of a segment, as in segments:5",
            code="bad_argument",
            source="pool",
        )
    return value


def _read_intervals(path: Path) -> tuple[dict[str, list[Interval]], str]:
    try:
        data = path.read_bytes()
        if path.suffix.lower() == ".parquet":
            table = pq.read_table(path)
        else:
            kinds = {"id": pa.string(), "label": pa.string(), "start_s": pa.float64(), "end_s": pa.float64()}
            options = pa.csv.ConvertOptions(column_types=kinds, strings_can_be_null=False)
            table = pa.csv.read_csv(pa.BufferReader(data), convert_options=options)
        columns = [table[name].to_pylist() for name in ("id", "start_s", "end_s", "label")]
    except (pa.ArrowException, OSError, KeyError) as error:
        raise ManifestError(
            f"{path} is no table of intervals (id, start_s, end_s, label): {error}", code="bad_manifest", source=path
        ) from None
    found: dict[str, list[Interval]] = {}
    for number, (clip, start, end, label) in enumerate(zip(*columns, strict=True), start=1):
        if not _is_interval(start, end):
            raise ManifestError(
                f"{path} has the interval {start!r} to {end!r} in row {number}; it must be seconds, start before end",
                code="bad_manifest",
                source=path,
            )
        found.setdefault(str(clip), []).append((float(start), float(end), "" if label is None else str(label)))
    return found, hashlib.sha256(data).hexdigest()


def _is_interval(start: object, end: object) -> bool:
    return isinstance(start, (int, float)) and isinstance(end, (int, float)) and 0 <= start < end < math.inf
