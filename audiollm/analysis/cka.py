"""Debiased linear CKA: how alike two representations of the same tokens are, whatever their rotation and scale.

Conventions. Representations are [n, D], row i of both the same token; widths may differ. CKA(X, Y) = HSIC(X, Y) /
sqrt(HSIC(X, X) HSIC(Y, Y)) (Kornblith et al. 2019) with the unbiased HSIC_1 of `hsic.py`, in float64 on the device of
the states. It is 1 for itself up to rotation, scale and offset, and about 0, as often a little below as above, for
independent rows. Two ways through long inputs: `linear_cka_streamed` is exact for one pair in memory that does not grow
with n; `cka` averages HSIC_1 over random minibatches of tokens (Nguyen et al. 2021), which is exact where all tokens
fit in one. Tokens next to each other are alike, so n tokens say less than n independent ones would.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from ..errors import ArgumentError
from .hsic import PairSums, matrix, u_centred

MINIBATCH = 512
Named = Mapping[Any, Any]
# HSIC(X, X) below these times (mean squared norm)^2 is rounding. Of rows as they are: those that differ by 1e-12 of their length
# still count. Of rows less their mean: kernels that are centred before they are multiplied lose eps^2 of it, sums of products
# eps; rows of which only one differs from the others have HSIC 0, and nothing but that is left.
_CONSTANT, _CENTRED, _SUMMED = 1e-50, 1e-26, 1e-13


@dataclass(frozen=True, eq=False, repr=False)
class CKAMatrix:
    """Debiased linear CKA between named representations.

    `values` [R, C] float64, NaN where a representation does not vary; `rows` and `columns` their names (layers,
    sources); `n_tokens`, compared in `n_minibatches`; `tokens_s`, their seconds together, or None.
    """

    values: np.ndarray
    rows: tuple[Hashable, ...]
    columns: tuple[Hashable, ...]
    n_tokens: int
    n_minibatches: int
    tokens_s: float | None = None

    def __repr__(self) -> str:
        return (
            f"CKAMatrix({len(self.rows)} x {len(self.columns)}, {self.n_tokens} tokens in {self.n_minibatches} "
            f"minibatch(es), {np.nanmin(self.values):.3f} to {np.nanmax(self.values):.3f})"
        )

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(str(name))}</th>" for name in ("", *self.columns))
        body = "".join(
            f"<tr><th>{escape(str(name))}</th>" + "".join(f"<td>{value:.3f}</td>" for value in row) + "</tr>"
            for name, row in zip(self.rows, self.values, strict=True)
        )
        return f"<p>{escape(self.describe())}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def describe(self) -> str:
        """What the matrix shows, in words."""
        length = "" if self.tokens_s is None else f" ({self.tokens_s:.2f} s)"
        text = (
            f"Debiased linear CKA of {len(self.rows)} by {len(self.columns)} representations over {self.n_tokens} "
            f"tokens{length}."
        )
        others = self.values.copy()
        others[[[r == c for c in self.columns] for r in self.rows]] = np.nan
        if np.isfinite(others).any():
            for word, at in (("Most", np.nanargmax(others)), ("Least", np.nanargmin(others))):
                r, c = np.unravel_index(at, others.shape)
                text += f" {word} alike are {self.rows[r]} and {self.columns[c]}, {others[r, c]:.3f}."
        flat = [str(name) for name, row in zip(self.rows, self.values, strict=True) if np.isnan(row).all()]
        return text + (f" {', '.join(flat)}: do not vary enough over the tokens, so not defined." if flat else "")


class CKASums:
    """Sums of HSIC_1 between representations, minibatch by minibatch; `update` as often as you like, then `result`.

    Weighs each minibatch by its number of tokens. Memory: minibatch^2 float64 values a representation.

    >>> import numpy as np
    >>> from audiollm.analysis.cka import CKASums
    >>> rng, sums = np.random.default_rng(0), CKASums()
    >>> for _ in range(3):
    ...     x = rng.normal(size=(64, 8))
    ...     sums.update({"x": x, "rotated": x @ np.linalg.qr(rng.normal(size=(8, 8)))[0]})
    >>> sums.result()
    CKAMatrix(2 x 2, 192 tokens in 3 minibatch(es), 1.000 to 1.000)
    """

    def __init__(self) -> None:
        self._names: tuple[tuple, tuple] | None = None
        self.n_tokens = self.n_minibatches = 0

    def update(self, a: Named, b: Named | None = None) -> None:
        """Add one minibatch: names -> [n, D] rows of the same n tokens; `b` beside `a` for a matrix of a by b.

        Raises: ArgumentError for fewer than 4 tokens, rows of different number, values that are not finite, and other
        names than in the first call.
        """
        n = _count(a, "a")
        if n < 4:
            raise _bad(f"a minibatch has {n} tokens; debiased CKA needs 4 or more", "a")
        if b is not None and _count(b, "b") != n:
            raise _bad(f"a has {n} tokens and b {_count(b, 'b')}; row i of both must be the same token", "b")
        grams, scales = u_centred(a)
        others, other_scales = (grams, scales) if b is None else u_centred(b)
        names = (tuple(a), tuple(a if b is None else b))
        if self._names is None:
            self._names = names
            self._cross = np.zeros((len(grams), len(others)))
            self._own = (np.zeros(len(grams)), np.zeros(len(others)))
            self._scales = (np.zeros((len(grams), 2)), np.zeros((len(others), 2)))
        if names != self._names:
            raise _bad("a minibatch has other names than the first one", "a")
        norm = 1 / (n - 3)  # HSIC_1 = <U-centred K, L> / (n (n - 3)), weighed by n
        self._cross += norm * (grams @ others.to(grams.device).T).cpu().numpy()
        for k, (mine, scale) in enumerate(((grams, scales), (others, other_scales))):
            self._own[k][:] += norm * (mine * mine).sum(dim=1).cpu().numpy()
            self._scales[k][:] += n * scale
        self.n_tokens += n
        self.n_minibatches += 1

    def result(self, tokens_s: float | None = None) -> CKAMatrix:
        """The matrix of all minibatches so far. Raises: ArgumentError before the first one."""
        if self._names is None:
            raise _bad("there is no minibatch yet; call update first", "update")
        own = [
            np.where((o[:, None] > np.array([_CENTRED, _CONSTANT]) * scale**2 / self.n_tokens).all(axis=1), o, np.nan)
            for o, scale in zip(self._own, self._scales, strict=True)
        ]
        values = self._cross / np.sqrt(own[0][:, None] * own[1][None, :])
        return CKAMatrix(values, *self._names, self.n_tokens, self.n_minibatches, tokens_s)


def cka(
    a: Named | Sequence[Named], b: Named | Sequence[Named] | None = None, *, minibatch: int = MINIBATCH, seed: int = 0
) -> CKAMatrix:
    """Debiased linear CKA between all representations of `a`, or of `a` by those of `b`.

    Parameters: `a`, names -> [n, D], or a list of such dicts, one a source, whose rows are put end to end; so what
    `extract_contextual_embeddings` returns, or one source of it, gives layers by layers, `b` from another model
    gives model by model, and {"mix": states[0][k], "drums": states[1][k]} gives sources. Tokens are dealt into random
    minibatches of about `minibatch` with `seed`.

    Cost: representations x n x minibatch x D multiplications in float64; a float64 copy of one minibatch at a time.
    Raises: ArgumentError for fewer than 4 tokens, different numbers of them, and values that are not finite.

    >>> from audiollm import Request, demo
    >>> from audiollm.analysis.cka import cka
    >>> session = demo.load()
    >>> batch = session.prepare([Request("Listen.", [demo.clips()["mix"]])])
    >>> matrix = cka(session.extract_contextual_embeddings(batch, range(5)))
    >>> matrix.values.shape, matrix.n_tokens, round(float(matrix.values[2, 2]), 12)
    ((5, 5), 300, 1.0)
    """
    a, b = _sources(a, "a"), None if b is None else _sources(b, "b")
    counts = [_count(mine, "a") for mine in a]
    if b is not None and [_count(mine, "b") for mine in b] != counts:
        raise _bad("a and b have different sources or numbers of tokens; row i of both must be the same token", "b")
    sums, n = CKASums(), sum(counts)
    with tqdm(total=n, desc="cka", unit="token", disable=None, leave=False) as bar:
        for picks in minibatches(n, minibatch, seed):
            sums.update(_picked(a, counts, picks), None if b is None else _picked(b, counts, picks))
            bar.update(len(picks))
    return sums.result()


def minibatches(n: int, size: int, seed: int = 0) -> list[np.ndarray]:
    """n token numbers in random order, dealt into arrays of equal length (to one), about `size`.

    Raises: ArgumentError for a size or n below 4, which HSIC_1 is not defined for.
    """
    if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 4:
        raise _bad(f"minibatch is {size!r}; pass a whole number from 4 on", "minibatch")
    if n < 4:
        raise _bad(f"there are {n} tokens; debiased CKA needs 4 or more", "a")
    order = np.random.default_rng(seed).permutation(n)
    return np.array_split(order, min(max(1, round(n / size)), n // 4))


def linear_cka(x: Any, y: Any) -> float:
    """Debiased linear CKA of two arrays or tensors [n, D] over the same n tokens, exact; see `linear_cka_streamed`.

    Raises: ArgumentError for different numbers of tokens, and as `linear_cka_streamed`.

    >>> import numpy as np
    >>> from audiollm.analysis.cka import linear_cka
    >>> x = np.random.default_rng(0).normal(size=(200, 6))
    >>> round(linear_cka(x, 3 * x + 1), 12)
    1.0
    """
    x, y = matrix(x, "x"), matrix(y, "y")
    if len(x) != len(y):
        raise _bad(f"x has {len(x)} tokens and y {len(y)}; row i of both must be the same token", "y")
    return linear_cka_streamed(zip(x.split(MINIBATCH), y.split(MINIBATCH), strict=True))


def linear_cka_streamed(chunks: Iterable[tuple[Any, Any]]) -> float:
    """Debiased linear CKA over all tokens of a stream of (x [m, Dx], y [m, Dy]) chunks of any sizes.

    HSIC_1 of linear kernels needs only sums over tokens (with X^T Y for the trace), so the value is exact and equals
    `linear_cka` of the whole. Memory: Dx^2 + Dy^2 + Dx Dy float64 values (300 MB at width 3584); cost: as many
    multiplications a token.

    Raises: ArgumentError for fewer than 4 tokens, chunks whose numbers of rows differ, values that are not finite, and
    representations that do not vary enough over the tokens: all the same, or all but one.

    >>> import numpy as np
    >>> from audiollm.analysis.cka import linear_cka_streamed
    >>> rng = np.random.default_rng(0)
    >>> x, y = rng.normal(size=(2000, 4)), rng.normal(size=(2000, 4))
    >>> abs(linear_cka_streamed((x[k : k + 100], y[k : k + 100]) for k in range(0, 2000, 100))) < 0.01
    True
    """
    sums: tuple[PairSums, ...] = ()
    whole = [0.0, 0.0]
    for x, y in chunks:
        x, y = matrix(x, "x"), matrix(y, "y")
        y = y.to(x.device)
        if len(x) != len(y):
            raise _bad(f"a chunk of {len(x)} tokens of x comes with {len(y)} of y", "y")
        if not sums:
            # HSIC does not change with an offset; near the mean less is lost to rounding.
            shift_x, shift_y = x.mean(dim=0), y.mean(dim=0)
            sums = (PairSums(), PairSums(), PairSums())
        for pair, p, q in zip(
            sums, (x - shift_x, x - shift_x, y - shift_y), (x - shift_x, y - shift_y, y - shift_y), strict=True
        ):
            pair.update(p, q)
        whole = [total + float(v.square().sum()) for total, v in zip(whole, (x, y), strict=True)]
    if not sums or sums[0].n < 4:
        raise _bad("debiased CKA needs 4 tokens or more", "x")
    xx, xy, yy = (pair.hsic() for pair in sums)
    for name, own, pair, squares in (("x", xx, sums[0], whole[0]), ("y", yy, sums[2], whole[1])):
        if not (own > _SUMMED * pair.variance() ** 2 and own > _CONSTANT * (squares / pair.n) ** 2):
            raise _bad(f"{name} does not vary enough over the tokens, so CKA is not defined", name)
    return xy / (xx * yy) ** 0.5


def _sources(given: Named | Sequence[Named], what: str) -> list[Named]:
    found = [given] if isinstance(given, Mapping) else list(given)
    if not found or not all(isinstance(mine, Mapping) and mine and mine.keys() == found[0].keys() for mine in found):
        raise _bad(f"{what} must be a dict of name -> [tokens, width], or a list of them with the same names", what)
    return found


def _count(named: Named, what: str) -> int:
    counts = {len(values) for values in named.values()}
    if len(counts) != 1:
        raise _bad(f"the representations of {what} differ in their number of tokens", what)
    return counts.pop()


def _picked(sources: Sequence[Named], counts: Sequence[int], picks: np.ndarray) -> dict[Any, torch.Tensor]:
    """The picked rows of each representation over the sources put end to end."""
    starts = np.cumsum([0, *counts])
    rows = [np.sort(picks[(picks >= a) & (picks < b)] - a) for a, b in pairwise(starts)]
    return {
        name: torch.cat(
            [matrix(mine[name][some], str(name)) for mine, some in zip(sources, rows, strict=True) if len(some)]
        )
        for name in sources[0]
    }


def _bad(message: str, source: str) -> ArgumentError:
    return ArgumentError(message, code="bad_argument", source=source)
