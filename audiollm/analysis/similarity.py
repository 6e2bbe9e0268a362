"""Cosine similarity in time: one source with itself, and a mix with its stems.

Conventions. States are [U, D] with their tokens' seconds [U, 2] (`timeline.token_intervals()`); they are averaged over
bins of time first (a token counts by how long it lies in the bin), in float64. Cosines are taken of what differs from
the mean over all bins (`centered`), for language-model states share one large direction that would make everything alike
(Ethayarajh 2019); a vector of zeros has cosine 0 with everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from scipy import sparse
from tqdm.auto import tqdm

from ..errors import ArgumentError
from .labels import token_seconds
from .samples import as_array

MAX_BINS = 1500
_CHUNK = 2048
# Cosines that differ by less are rounding: they count as ties.
_DIGITS = 9


@dataclass(frozen=True, eq=False, repr=False)
class SelfSimilarity:
    """Cosines of every moment of a source with every other (Foote 1999).

    `values` [T, T] float64, symmetric, in -1...1; `intervals` [T, 2] seconds of the bins; `centered`, whether the mean
    over time was taken off first.
    """

    values: np.ndarray
    intervals: np.ndarray
    centered: bool

    def __repr__(self) -> str:
        start, end = self.intervals[0, 0], self.intervals[-1, 1]
        return (
            f"SelfSimilarity({len(self.values)} bins of {np.diff(self.intervals[0])[0]:.3f} s, {start:.3f}-{end:.3f} s, "
            f"mean {self.values.mean():.3f})"
        )

    def describe(self) -> str:
        """What the matrix shows, in words."""
        n, centres = len(self.values), self.intervals.mean(axis=1)
        text = (
            f"Cosine similarity of {n} moments of {np.diff(self.intervals[0])[0]:.3f} s each with each other, from "
            f"{self.intervals[0, 0]:.2f} to {self.intervals[-1, 1]:.2f} s."
        )
        far = np.abs(centres[:, None] - centres[None, :]) >= (centres[-1] - centres[0]) / 10
        if n > 1 and far.any():
            r, c = np.unravel_index(np.argmax(np.where(far, self.values, -2)), self.values.shape)
            low_r, low_c = np.unravel_index(np.argmin(self.values), self.values.shape)
            text += (
                f" Of moments that lie apart, {centres[min(r, c)]:.2f} s and {centres[max(r, c)]:.2f} s are most alike "
                f"({self.values[r, c]:.2f}); {centres[min(low_r, low_c)]:.2f} s and {centres[max(low_r, low_c)]:.2f} s "
                f"are least alike ({self.values[low_r, low_c]:.2f})."
            )
        return text


@dataclass(frozen=True, eq=False, repr=False)
class StemRetrieval:
    """How well a mix's moments are found from its stems' by cosine.

    S stems, T windows. `similarity` [S, T] cosine of stem and mix in the same window; `ranks` [S, T] float64, the place
    of the right window of the mix among all T by cosine with a stem's window, 1 is first and ties share their mean
    place; `nearest_s` [S, T], the middle of the mix's window that is nearest, in seconds; `intervals` [T, 2] seconds.
    """

    stems: tuple[str, ...]
    similarity: np.ndarray
    ranks: np.ndarray
    nearest_s: np.ndarray
    intervals: np.ndarray

    def recall(self, k: int = 1) -> np.ndarray:
        """Share of a stem's windows whose right window of the mix is among the first k, array [S]; chance is k / T."""
        return (self.ranks <= k).mean(axis=1)

    @property
    def mean_reciprocal_rank(self) -> np.ndarray:
        """Mean of 1 / rank, array [S]; chance is (1 + 1/2 + ... + 1/T) / T."""
        return (1 / self.ranks).mean(axis=1)

    @property
    def chance(self) -> tuple[float, float]:
        """What random cosines give: recall at 1, and mean reciprocal rank."""
        n = len(self.intervals)
        return 1 / n, float((1 / np.arange(1, n + 1)).mean())

    @property
    def nearest_stem(self) -> np.ndarray:
        """For each window, the number of the stem that is most like the mix there, array [T]."""
        return self.similarity.argmax(axis=0)

    def __repr__(self) -> str:
        found = ", ".join(f"{name} {value:.3f}" for name, value in zip(self.stems, self.recall(), strict=True))
        return f"StemRetrieval({len(self.intervals)} windows; recall at 1: {found}; chance {self.chance[0]:.3f})"

    def _repr_html_(self) -> str:
        columns = (self.similarity.mean(axis=1), self.recall(1), self.recall(5), self.mean_reciprocal_rank)
        body = "".join(
            f"<tr><th>{escape(name)}</th>" + "".join(f"<td>{column[s]:.3f}</td>" for column in columns) + "</tr>"
            for s, name in enumerate(self.stems)
        )
        head = "".join(f"<th>{name}</th>" for name in ("stem", "cosine", "recall at 1", "recall at 5", "mean 1/rank"))
        return f"<p>{escape(self.describe())}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def describe(self) -> str:
        """What the curves show, in words."""
        n, wins = len(self.intervals), np.bincount(self.nearest_stem, minlength=len(self.stems))
        parts = "; ".join(
            f"{name}: mean cosine {self.similarity[s].mean():.3f}, nearest stem in {wins[s]} windows, recall at 1 "
            f"{self.recall()[s]:.3f}, mean reciprocal rank {self.mean_reciprocal_rank[s]:.3f}"
            for s, name in enumerate(self.stems)
        )
        return (
            f"A mix and {len(self.stems)} stem(s) over {n} windows from {self.intervals[0, 0]:.2f} to "
            f"{self.intervals[-1, 1]:.2f} s. {parts}. Chance: {self.chance[0]:.3f} and {self.chance[1]:.3f}."
        )


def self_similarity(
    states: Any, intervals: Any, *, bin_s: float | None = None, centered: bool = True, max_bins: int = MAX_BINS
) -> SelfSimilarity:
    """Cosine of every moment of a source with every other.

    Parameters: `states` [U, D], one layer of one source; `intervals`, its timeline or [U, 2] seconds; `bin_s`, seconds a
    bin: by default one token, or as few whole tokens as keep the bins at `max_bins` or fewer.
    Cost: T^2 D multiplications and T^2 float64 values; long inputs are averaged in pieces of 2,048 tokens.
    Raises: ArgumentError for states and intervals of different length, a `bin_s` that is no positive number or makes more
    than `max_bins` bins, and states that do not change over time while `centered`.

    >>> import numpy as np
    >>> from audiollm.analysis.similarity import self_similarity
    >>> starts = np.arange(400) * 0.08
    >>> verse, chorus = np.random.default_rng(0).normal(size=(2, 16))
    >>> states = np.where((starts % 16 < 8)[:, None], verse, chorus)
    >>> self_similarity(states, np.stack([starts, starts + 0.08], axis=1), bin_s=4.0).values.round(1)[0]
    array([ 1.,  1., -1., -1.,  1.,  1., -1., -1.])
    """
    seconds = token_seconds(intervals)[0]
    bins = token_bins(seconds, max_bins)
    if bin_s is not None:
        edges = _edges(seconds[0, 0], seconds[-1, 1], bin_s, "bin_s", max_bins)
        bins = np.stack([edges[:-1], edges[1:]], axis=1)
    averaged, _ = average_over(states, seconds, bins)
    unit = unit_rows([averaged], centered)[0]
    values = np.clip(unit @ unit.T, -1, 1)
    return SelfSimilarity((values + values.T) / 2, bins, centered)


def stem_retrieval(
    mix: Any, stems: Mapping[str, Any], intervals: Any, *, window_s: float = 1.0, centered: bool = True
) -> StemRetrieval:
    """Find each second of a mix from its stems: cosines of the states of the same window, and the right one's rank.

    Parameters: `mix` [U, D], one layer; `stems`, name -> [U_s, D] of the same layer and model, all starting with the mix;
    `intervals`, the mix's timeline or [U, 2] seconds; `window_s` seconds a window. Only whole windows that all sources
    fill are used. Send mix and stems as requests of their own: in one prompt a later source sees the earlier ones.
    `centered` takes off the mean over all windows of all sources.
    Cost: S T^2 D multiplications, in pieces of 2,048 windows.

    Raises: ArgumentError for a mix and intervals of different length, fewer than 2 windows, a stem longer or of another
    width than the mix, no stems, and a `window_s` that is no positive number.

    >>> from audiollm import Request, demo
    >>> from audiollm.analysis.similarity import stem_retrieval
    >>> session, clips = demo.load(), demo.clips()
    >>> batch = session.prepare([Request("Listen.", [clips[name]]) for name in ("mix", "drums", "bass")])
    >>> mix, drums, bass = (found[-1] for found in session.extract_contextual_embeddings(batch))
    >>> result = stem_retrieval(mix, {"drums": drums, "bass": bass}, batch.timeline[0])
    >>> result.stems, result.ranks.shape
    (('drums', 'bass'), (2, 12))
    """
    seconds = token_seconds(intervals)[0]
    if len(mix) != len(seconds):
        raise _bad(f"the mix has {len(mix)} states and {len(seconds)} token intervals", "intervals")
    if not isinstance(stems, Mapping) or not stems:
        raise _bad("stems must be a dict of name -> [tokens, width] with at least one stem", "stems")
    for name, values in stems.items():
        if len(values) > len(seconds) or np.shape(values)[1:] != np.shape(mix)[1:]:
            raise _bad(
                f"stem {name!r} is {list(np.shape(values))} and the mix {list(np.shape(mix))}; pass states of one model, "
                "cut to the mix's length",
                "stems",
            )
    end_s = min(seconds[len(values) - 1, 1] for values in (mix, *stems.values()))
    edges = _edges(seconds[0, 0], end_s, window_s, "window_s", whole=True)
    windows = np.stack([edges[:-1], edges[1:]], axis=1)
    if len(windows) < 2:
        raise _bad(f"{end_s:.3f} s hold fewer than 2 windows of {window_s:g} s; pass a smaller window_s", "window_s")
    averaged = [average_over(values, seconds[: len(values)], windows)[0] for values in (mix, *stems.values())]
    mixed, *queries = unit_rows(averaged, centered)
    similarity, ranks, nearest = [], [], []
    with tqdm(total=len(queries) * len(windows), desc="retrieval", unit="window", disable=None, leave=False) as bar:
        for query in queries:
            found = [_ranked(cosines, first) for first, cosines in _cosines(query, mixed, bar)]
            similarity.append((query * mixed).sum(axis=1))
            ranks.append(np.concatenate([rank for rank, _ in found]))
            nearest.append(windows.mean(axis=1)[np.concatenate([best for _, best in found])])
    return StemRetrieval(tuple(map(str, stems)), np.stack(similarity), np.stack(ranks), np.stack(nearest), windows)


def average_over(values: Any, intervals: Any, onto: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """States averaged over other intervals, such as another family's tokens: array [V, D] float64, and array [V] seconds.

    `values` [U, D] with seconds `intervals` [U, 2]; `onto` [V, 2] ascending seconds. Each token counts by the seconds it
    shares with an interval; the second array says how many seconds of it the tokens cover, and rows with none are 0.
    Raises: ArgumentError for values and intervals of different length, and for intervals that overlap.

    >>> import numpy as np
    >>> from audiollm.analysis.similarity import average_over
    >>> fine = np.array([[0.0, 0.04], [0.04, 0.08], [0.08, 0.12]])
    >>> average_over([[1.0], [3.0], [5.0]], fine, np.array([[0.0, 0.08], [0.08, 0.16]]))[0].tolist()
    [[2.0], [5.0]]
    """
    seconds, onto = token_seconds(intervals)[0], token_seconds(onto)[0]
    if len(values) != len(seconds):
        raise _bad(f"there are {len(values)} states and {len(seconds)} token intervals", "intervals")
    if any((spans[:-1, 1] - spans[1:, 0] > 1e-9).any() for spans in (seconds, onto)):  # a rounding is no overlap
        raise _bad("the intervals overlap; average over ascending ones side by side", "onto")
    points = np.unique(np.concatenate([seconds.ravel(), onto.ravel()]))
    middles, lengths = (points[1:] + points[:-1]) / 2, np.diff(points)
    token, into = (np.searchsorted(spans[:, 0], middles, side="right") - 1 for spans in (seconds, onto))
    both = (token >= 0) & (into >= 0) & (middles < seconds[token, 1]) & (middles < onto[into, 1])
    weights = sparse.csc_array((lengths[both], (into[both], token[both])), shape=(len(onto), len(seconds)))
    covered = np.asarray(weights.sum(axis=1)).ravel()
    total: np.ndarray | None = None
    for first in range(0, len(seconds), _CHUNK):
        piece = as_array(values[first : first + _CHUNK], "states")
        if not np.isfinite(piece).all():
            raise _bad("the states hold NaN or infinity", "states")
        part = weights[:, first : first + _CHUNK] @ piece
        total = part if total is None else total + part
    assert total is not None  # token_seconds refuses an empty source
    return total / np.where(covered > 0, covered, 1)[:, None], covered


def token_bins(seconds: np.ndarray, max_bins: int) -> np.ndarray:
    """Bins [T, 2] of as few whole tokens, of `seconds` [U, 2], as keep them at `max_bins` or fewer.

    Raises: ArgumentError for a `max_bins` that is no whole number from 1 on.
    """
    if isinstance(max_bins, bool) or not isinstance(max_bins, int) or max_bins < 1:
        raise _bad(f"max_bins is {max_bins!r}; pass a whole number, 1 or more", "max_bins")
    edges = np.append(seconds[:: -(-len(seconds) // max_bins), 0], seconds[-1, 1])
    return np.stack([edges[:-1], edges[1:]], axis=1)


def _edges(
    start_s: float, end_s: float, step_s: float, what: str, most: int | None = None, whole: bool = False
) -> np.ndarray:
    """Bin edges from start to end; with `whole` a last bin that is not full is left out."""
    if not isinstance(step_s, (int, float, np.floating)) or not 0 < step_s < np.inf:
        raise _bad(f"{what} is {step_s!r}; pass seconds, more than 0", what)
    count = (end_s - start_s) / step_s
    n = int(np.floor(count + 1e-6)) if whole else int(np.ceil(count - 1e-6))
    if most is not None and n > most:
        raise _bad(f"{what}={step_s:g} makes {n} bins, more than {most}; pass a larger one, or raise max_bins", what)
    edges = start_s + step_s * np.arange(n + 1)
    return edges if whole else np.append(edges[:-1], end_s)


def unit_rows(sources: Sequence[np.ndarray], centered: bool) -> list[np.ndarray]:
    """States [T, D] of each source as rows of length 1; with `centered` less the mean over all rows of all sources.

    Raises: ArgumentError, while `centered`, for states that do not change over time.
    """
    everything = np.concatenate(sources)
    if centered:
        size = np.linalg.norm(everything, axis=1).max()
        mean = everything.mean(axis=0)
        if np.linalg.norm(everything - mean, axis=1).max() <= 1e-12 * size:
            raise _bad("the states are the same at all times; pass centered=False, or another layer", "states")
        sources = [rows - mean for rows in sources]
    norms = [np.linalg.norm(rows, axis=1, keepdims=True) for rows in sources]
    return [rows / np.where(norm > 0, norm, 1) for rows, norm in zip(sources, norms, strict=True)]


def _cosines(query: np.ndarray, mixed: np.ndarray, bar: Any) -> Iterator[tuple[int, np.ndarray]]:
    for first in range(0, len(query), _CHUNK):
        yield first, np.round(query[first : first + _CHUNK] @ mixed.T, _DIGITS)
        bar.update(len(query[first : first + _CHUNK]))


def _ranked(cosines: np.ndarray, first: int) -> tuple[np.ndarray, np.ndarray]:
    """Rank of the own window (ties share their mean place), and the nearest window, for rows from `first` on."""
    rows = np.arange(len(cosines))
    own = cosines[rows, first + rows][:, None]
    above, equal = (cosines > own).sum(axis=1), (cosines == own).sum(axis=1)
    return 1 + above + (equal - 1) / 2, cosines.argmax(axis=1)


def _bad(message: str, source: str) -> ArgumentError:
    return ArgumentError(message, code="bad_argument", source=source)
