"""Cosines of every moment of one sequence of states with every moment of another: two layers, or two sources.

Conventions as in `similarity`: states are averaged over bins of whole tokens, and cosines are of what differs from the mean
over time (`centered`), each side less its own mean, so that two layers whose large shared directions differ compare fairly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ArgumentError
from .cka import cka
from .labels import token_seconds
from .similarity import MAX_BINS, average_over, token_bins, unit_rows


@dataclass(frozen=True, eq=False, repr=False)
class CrossSimilarity:
    """Cosines of R moments with C others.

    `values` [R, C] float64 in -1...1; `rows` [R, 2] and `columns` [C, 2] seconds; `centered`, whether each side's mean over
    time was taken off; `cka`, the debiased linear CKA of the tokens that start at the same seconds, NaN where it is not
    defined.
    """

    values: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    centered: bool
    cka: float

    def __repr__(self) -> str:
        return f"CrossSimilarity({len(self.rows)} x {len(self.columns)}, mean {self.values.mean():.3f}, CKA {self.cka:.3f})"

    def describe(self) -> str:
        """What the matrix shows, in words."""
        n = min(self.values.shape)
        r, c = np.unravel_index(self.values.argmax(), self.values.shape)
        rows, columns = self.rows.mean(axis=1), self.columns.mean(axis=1)
        defined = "is not defined" if np.isnan(self.cka) else f"is {self.cka:.3f}"
        return (
            f"Cosine similarity of {len(rows)} moments with {len(columns)} others: {self.values.mean():.3f} on average, "
            f"{np.diagonal(self.values)[:n].mean():.3f} along the diagonal. {rows[r]:.2f} s and {columns[c]:.2f} s are most "
            f"alike ({self.values[r, c]:.2f}). Debiased linear CKA of the same tokens {defined}."
        )


def cross_similarity(
    rows: Any,
    row_intervals: Any,
    columns: Any,
    column_intervals: Any,
    *,
    centered: bool = True,
    max_bins: int = MAX_BINS,
) -> CrossSimilarity:
    """Cosine of every moment of `rows` with every moment of `columns`.

    Parameters: `rows` [U, D] and `columns` [V, D], a layer of a source each, with their timelines or seconds [U, 2], [V, 2].
    A moment is one token, or as few whole tokens as keep them at `max_bins` or fewer a side.
    Cost: R C D multiplications, and min(U, V) 512 D for the CKA.
    Raises: ArgumentError for other widths, states and intervals of different length, values that are not finite, and, while
    `centered`, states that do not change over time.

    >>> from audiollm import Request, demo
    >>> from audiollm.analysis.cross_similarity import cross_similarity
    >>> session = demo.load("moss_music")
    >>> batch = session.prepare([Request("Listen.", [demo.clips()["bass"]])])
    >>> states, timeline = session.extract_contextual_embeddings(batch, (2, 3))[0], batch.timeline[0]
    >>> cross_similarity(states[2], timeline, states[3], timeline).values.shape
    (150, 150)
    """
    if np.ndim(rows) != 2 or np.shape(rows)[1:] != np.shape(columns)[1:]:
        raise _bad(
            f"rows are {list(np.shape(rows))} and columns {list(np.shape(columns))}; pass [tokens, width] of one model",
            "columns",
        )
    sides, units = [], []
    for states, intervals in ((rows, row_intervals), (columns, column_intervals)):
        seconds = token_seconds(intervals)[0]
        bins = token_bins(seconds, max_bins)
        units.append(unit_rows([average_over(states, seconds, bins)[0]], centered)[0])
        sides.append((seconds, bins))
    same = _same(sides[0][0], sides[1][0])
    alike = np.nan
    if len(same[0]) >= 4:
        alike = float(cka({"rows": rows[same[0]]}, {"columns": columns[same[1]]}).values[0, 0])
    values = np.clip(units[0] @ units[1].T, -1, 1)
    return CrossSimilarity(values, sides[0][1], sides[1][1], centered, alike)


def _same(rows: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the tokens of both that start at the same microsecond."""
    first, second = (np.round(seconds[:, 0] * 1e6).astype(np.int64) for seconds in (rows, columns))
    return np.intersect1d(first, second, return_indices=True)[1:]


def _bad(message: str, source: str) -> ArgumentError:
    return ArgumentError(message, code="bad_argument", source=source)
