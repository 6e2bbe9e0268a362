"""The unbiased estimator HSIC_1 (Song et al. 2012, eq. 5) of linear kernels, in the two shapes that CKA needs.

Conventions: rows are tokens, [n, D]; float64. With K = X X^T, L = Y Y^T and zeros on both diagonals, HSIC_1 is
(tr(K L) + 1'K1 1'L1 / ((n - 1)(n - 2)) - 2 1'K L 1 / (n - 2)) / (n (n - 3)). It does not change with an offset of X or Y.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..errors import ArgumentError


class PairSums:
    """What HSIC_1 of two linear kernels needs of n tokens: sums over rows p_i, q_i, in memory that n does not change."""

    def __init__(self) -> None:
        self.n = 0
        self._sums: tuple[torch.Tensor, ...] = ()

    def update(self, p: torch.Tensor, q: torch.Tensor) -> None:
        """Add rows [m, Dp] and [m, Dq] of the same m tokens."""
        pp, qq = p.square().sum(dim=1), q.square().sum(dim=1)
        terms = (p.T @ q, p.sum(dim=0), q.sum(dim=0), p.T @ qq, q.T @ pp, pp @ qq, pp.sum(), qq.sum())
        self._sums = terms if self.n == 0 else tuple(a + b for a, b in zip(self._sums, terms, strict=True))
        self.n += len(p)

    def variance(self) -> float:
        """Mean squared norm of the rows p less their mean."""
        p, pp = self._sums[1], self._sums[6]
        return float(pp - p @ p / self.n) / self.n

    def hsic(self) -> float:
        """HSIC_1 of all rows, at least 4: the diagonals of K and L are taken out of each term."""
        n, (cross, p, q, p_qq, q_pp, pp_qq, pp, qq) = self.n, self._sums
        trace = cross.square().sum() - pp_qq
        totals = (p @ p - pp) * (q @ q - qq) / ((n - 1) * (n - 2))
        rows = p @ cross @ q - p @ p_qq - q @ q_pp + pp_qq
        return float(trace + totals - 2 / (n - 2) * rows) / (n * (n - 3))


def u_centred(named: Mapping[Any, Any]) -> tuple[torch.Tensor, np.ndarray]:
    """U-centred linear kernels (Szekely and Rizzo 2014) of R representations, and mean squared norms, array [R, 2].

    The norms are of the rows less their mean, and of the rows as they are.

    The kernels are flat, [R, n * n]; the product of two is n (n - 3) HSIC_1. n is the same for all, 4 or more.
    """
    flat, scales = [], []
    for name, values in named.items():
        x = matrix(values, str(name))
        whole = float(x.square().sum(dim=1).mean())
        x = x - x.mean(dim=0)
        scales.append((float(x.square().sum(dim=1).mean()), whole))
        n = len(x)
        gram = (x @ x.T).fill_diagonal_(0)
        means = gram.sum(dim=0) / (n - 2)
        gram = gram - means[:, None] - means[None, :] + means.sum() / (n - 1)
        flat.append(gram.fill_diagonal_(0).reshape(-1))
    return torch.stack(flat), np.array(scales)


def matrix(values: Any, what: str) -> torch.Tensor:
    """Rows [n, D] in float64 on the values' own device (the CPU where that has no float64).

    Raises: ArgumentError where they are not two-dimensional finite real numbers.
    """
    x = torch.as_tensor(values).detach()
    if x.ndim != 2 or x.is_complex() or x.dtype == torch.bool or 0 in x.shape:
        raise ArgumentError(
            f"{what} has shape {list(x.shape)} of {x.dtype}; pass real numbers [tokens, width]",
            code="bad_argument",
            source=what,
        )
    x = (x.cpu() if x.device.type == "mps" else x).to(torch.float64)
    if not bool(torch.isfinite(x).all()):
        raise ArgumentError(f"{what} holds NaN or infinity", code="bad_argument", source=what)
    return x
