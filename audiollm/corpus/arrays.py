"""Embeddings of a run as one table of numbers, for probes and plots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False, repr=False)
class Arrays:
    """R rows of one kind of embedding, in the order of the index.

    `values` [R, D] float32; `ids` [R] and `sources` [R], where each comes from; `seconds` [R, 2] float64, its start and
    end within the clip; `segments` [R], the names of intervals where the run was pooled by labels, else None; `labels`,
    the manifest's other columns by name, [R] each.
    """

    what: str
    layer: int | None
    values: np.ndarray
    ids: np.ndarray
    sources: np.ndarray
    seconds: np.ndarray
    segments: np.ndarray | None
    labels: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        layer = "" if self.layer is None else f" of layer {self.layer}"
        names = f", labels {', '.join(self.labels)}" if self.labels else ""
        clips = len(set(self.ids.tolist()))
        return (
            f"Arrays({self.what}{layer}: {len(self)} rows of {self.values.shape[1]} numbers from {clips} clips{names})"
        )
