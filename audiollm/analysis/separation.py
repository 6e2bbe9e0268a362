"""How far two sets of states lie apart along the difference of their means, judged on states that were left out.

Conventions. A projection is the dot product with the unit vector from the negatives' mean to the positives'; 0 is the
midpoint, so that positives should lie above it and negatives below. All in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_Z = 1.959963984540054  # of a two-sided 95 % interval


@dataclass(frozen=True, eq=False)
class Separation:
    """How far two sets lie apart along the difference of their means.

    `positives` [P] and `negatives` [N] projections on the direction of all; `held_out_positives` and `held_out_negatives`
    the same on the direction and midpoint of the others only, NaN where no other of its set is left. `cosine` is that of the
    two means.
    """

    positives: np.ndarray
    negatives: np.ndarray
    held_out_positives: np.ndarray
    held_out_negatives: np.ndarray
    cosine: float

    @property
    def n_tested(self) -> int:
        """Requests that could be held out."""
        return int(np.isfinite(self.held_out_positives).sum() + np.isfinite(self.held_out_negatives).sum())

    @property
    def n_right(self) -> int:
        """Held-out requests on the right side of the midpoint."""
        return int((self.held_out_positives > 0).sum() + (self.held_out_negatives < 0).sum())

    @property
    def accuracy(self) -> float:
        """Share of held-out requests on the right side; NaN where none could be held out."""
        return self.n_right / self.n_tested if self.n_tested else float("nan")

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the accuracy (Wilson, 1927), as if the requests were independent draws."""
        n = self.n_tested
        if not n:
            return float("nan"), float("nan")
        centre = (self.accuracy + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
        half = _Z / (1 + _Z**2 / n) * np.sqrt(self.accuracy * (1 - self.accuracy) / n + _Z**2 / (4 * n**2))
        return max(0.0, float(centre - half)), min(1.0, float(centre + half))

    def describe(self) -> str:
        """The accuracy with what it rests on, in words."""
        if not self.n_tested:
            return "One request a set: none can be held out, so how well the sets separate is not known."
        low, high = self.interval
        larger = max(len(self.positives), len(self.negatives)) / (len(self.positives) + len(self.negatives))
        return (
            f"Held out, {self.n_right} of {self.n_tested} requests lie on the right side of the midpoint ({self.accuracy:.0%}, "
            f"95 % interval {low:.0%} to {high:.0%}; always naming the larger set: {larger:.0%})."
        )

    def __repr__(self) -> str:
        return f"Separation({self.n_right} of {self.n_tested} held-out requests right, cosine of the means {self.cosine:.3f})"


def separation(positives: np.ndarray, negatives: np.ndarray, paired: bool = False) -> Separation:
    """How far states [P, D] and [N, D] lie apart along the difference of their means, with each left out in turn."""
    held: list[list[float]] = [[], []]
    for side, mine in enumerate((positives, negatives)):
        for k, state in enumerate(mine):
            rest = [np.delete(s, k, axis=0) if side == i or paired else s for i, s in enumerate((positives, negatives))]
            held[side].append(_projection(state[None], *rest)[0] if len(rest[0]) and len(rest[1]) else float("nan"))
    a, b = positives.mean(axis=0), negatives.mean(axis=0)
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return Separation(
        positives=_projection(positives, positives, negatives),
        negatives=_projection(negatives, positives, negatives),
        held_out_positives=np.array(held[0]),
        held_out_negatives=np.array(held[1]),
        cosine=float(a @ b) / lengths if lengths else float("nan"),
    )


def direction(positives: np.ndarray, negatives: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Difference and midpoint [D] of two sets' means."""
    a, b = positives.mean(axis=0), negatives.mean(axis=0)
    return a - b, (a + b) / 2


def _projection(states: np.ndarray, positives: np.ndarray, negatives: np.ndarray) -> np.ndarray:
    """[n] of states [n, D] on the direction of two sets, from their midpoint."""
    towards, middle = direction(positives, negatives)
    norm = np.linalg.norm(towards)
    return (states - middle) @ towards / norm if norm else np.zeros(len(states))
