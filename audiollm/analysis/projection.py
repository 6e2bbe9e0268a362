"""States of one layer in two dimensions, so that they can be seen: principal components.

Conventions: states are [U, D], one layer of one source, with their tokens' seconds [U, 2]; components are of the states less
their mean over time (Pearson 1901). A component's sign is arbitrary and is chosen so that its entry of largest size is
positive; so the same states always give the same picture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.decomposition import PCA

from ..errors import ArgumentError
from .labels import token_seconds
from .samples import as_array

# From this many tokens and dimensions on, only the two components are computed (Lanczos), not all of them.
_MANY = 400


@dataclass(frozen=True, eq=False, repr=False)
class Projection:
    """Two principal components of a source's states.

    `points` [U, 2] float64, in the states' own units; `explained` [2], the share of the variance that each component holds;
    `intervals` [U, 2] seconds of the tokens.
    """

    points: np.ndarray
    explained: np.ndarray
    intervals: np.ndarray

    def nearest(self, x: float, y: float) -> int:
        """The number of the point nearest to a place; distances count in spans of the points, as in a square picture."""
        span = np.ptp(self.points, axis=0)
        away = (self.points - np.array([x, y])) / np.where(span > 0, span, 1)
        return int((away**2).sum(axis=1).argmin())

    def __repr__(self) -> str:
        first, second = self.explained
        return f"Projection({len(self.points)} states, {first:.3f} and {second:.3f} of the variance)"

    def describe(self) -> str:
        """What the points show, in words."""
        first, second = self.explained
        start_s, end_s = self.intervals[0, 0], self.intervals[-1, 1]
        text = (
            f"Two principal components of {len(self.points)} states from {start_s:.2f} to {end_s:.2f} s, with {first:.1%} and "
            f"{second:.1%} of the variance."
        )
        if len(self.points) > 2:
            centres = self.intervals.mean(axis=1)
            with np.errstate(invalid="ignore", divide="ignore"):
                follows = np.corrcoef(self.points[:, 0], centres)[0, 1]
            if np.isfinite(follows):
                text += f" The first correlates {_signed(follows)} with time."
        return text


def project(states: Any, intervals: Any) -> Projection:
    """Two principal components of one layer of one source.

    Parameters: `states` [U, D]; `intervals`, the source's timeline or its tokens' seconds [U, 2].
    Cost: a float64 copy of the states; U D min(U, D) multiplications where U or D is at most 400, else some tens of U D.
    Raises: ArgumentError for states and intervals of different length, fewer than 2 states, states that are not finite, and
    states that do not change over time.

    >>> from audiollm import Request, demo
    >>> from audiollm.analysis.projection import project
    >>> session = demo.load("moss_music")
    >>> batch = session.prepare([Request("Listen.", [demo.clips()["bass"]])])
    >>> states = session.extract_contextual_embeddings(batch, (3,))[0][3]
    >>> project(states, batch.timeline[0]).points.shape
    (150, 2)
    """
    seconds = token_seconds(intervals)[0]
    values = np.asarray(as_array(states, "states"), dtype=np.float64)
    if values.ndim != 2 or len(values) != len(seconds):
        raise _bad(
            f"the states are {list(values.shape)} and there are {len(seconds)} token intervals; pass [tokens, width] of one "
            "source with its timeline",
            "states",
        )
    if len(values) < 2:
        raise _bad("there is 1 state; a projection needs 2 or more", "states")
    if not np.isfinite(values).all():
        raise _bad("the states hold NaN or infinity", "states")
    length = np.abs(values).max()
    if not np.ptp(values, axis=0).max() > 1e-12 * length:
        raise _bad("the states do not change over time, so they have no principal component", "states")
    few = min(values.shape) <= _MANY
    model = PCA(min(2, *values.shape), svd_solver="full" if few else "arpack", random_state=0).fit(values)
    components = model.components_
    largest = np.abs(components).argmax(axis=1)
    signs = np.sign(components[np.arange(len(components)), largest])
    points, explained = np.zeros((len(values), 2)), np.zeros(2)
    points[:, : len(components)] = (values - model.mean_) @ (components * signs[:, None]).T
    explained[: len(components)] = model.explained_variance_ratio_
    return Projection(points, explained, seconds)


def _signed(value: float) -> str:
    return f"{0.0 if abs(value) < 0.005 else value:.2f}"


def _bad(message: str, source: str) -> ArgumentError:
    return ArgumentError(message, code="bad_argument", source=source)
