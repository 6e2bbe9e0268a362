"""States and labels of several sources -> the rows that a probe learns from, checked.

Conventions: `states` has one dict a source, layer -> [U_i, D], as `Session.extract_contextual_embeddings` returns
them; layers and widths are the same in all. Labels have one entry a source: `TokenLabels`, one value a token [U_i], or
one value for the whole source. At the level "frame" each labelled token is a sample, at the level "clip" each source,
with the mean over its tokens in float64.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import ArgumentError
from .labels import TokenLabels, token_seconds

LEVELS = ("frame", "clip")
States = Sequence[Mapping[int, Any]]


@dataclass(frozen=True, eq=False)
class Samples:
    """What a probe learns from, source after source: N samples of S sources in G groups.

    `targets` [N] numbers (classes as their index in `classes`); `source`, `group` [N] int64; `tokens`, for each source
    the tokens that are samples or are pooled; `intervals`, for each source its samples' seconds [K_i, 2], or None where
    they were not given; `classes` the labels of a classification, else None.
    """

    level: str
    layers: tuple[int, ...]
    targets: np.ndarray
    source: np.ndarray
    group: np.ndarray
    tokens: tuple[np.ndarray, ...]
    intervals: tuple[np.ndarray, ...] | None
    classes: tuple[Any, ...] | None

    def features(self, states: States, layer: int) -> np.ndarray:
        """The samples of one layer: [N, D], float32 for a classification and float64 for a regression.

        Raises: ArgumentError for states that are not finite, or not [U_i, D] with the D of the others.
        """
        dtype = np.float64 if self.classes is None else np.float32
        rows = []
        for s, (mine, tokens) in enumerate(zip(states, self.tokens, strict=True)):
            picked = as_array(mine[layer], f"states[{s}][{layer}]")[tokens]
            if not np.isfinite(picked).all():
                raise _bad(f"states[{s}][{layer}] holds NaN or infinity; leave that source out", "states")
            rows.append((picked.mean(axis=0, keepdims=True) if self.level == "clip" else picked).astype(dtype))
            if rows[-1].shape[1] != rows[0].shape[1]:
                raise _bad(
                    f"states[{s}][{layer}] is {rows[-1].shape[1]} wide and states[0][{layer}] {rows[0].shape[1]}; pass "
                    "states of one model",
                    "states",
                )
        return np.concatenate(rows)


def as_array(values: Any, what: str) -> np.ndarray:
    """States as float64 on the CPU, [U, D]; from a tensor of any float dtype and device, or an array.

    Raises: ArgumentError where they are not two-dimensional real numbers.
    """
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = values.to(torch.float64).numpy() if values.is_floating_point() else values.numpy()
    array = np.asarray(values)
    if array.ndim != 2 or array.dtype.kind not in "fiu" or 0 in array.shape:
        raise _bad(f"{what} has shape {list(array.shape)} of {array.dtype}; pass real states [tokens, width]", what)
    return array.astype(np.float64, copy=False)


def gather(
    states: States,
    labels: Sequence[Any],
    level: str,
    task: str | None,
    groups: Sequence[Hashable] | None,
    intervals: Sequence[Any] | None,
) -> Samples:
    """Check what goes into a probe and line it up as `Samples`; parameters as in `probe`.

    Raises: ArgumentError as `probe`, for all that can be told without looking at the states' values.
    """
    if level not in LEVELS:
        raise _bad(f"level is {level!r}; pass 'frame' or 'clip'", "level")
    layers = _layers(states)
    counts = [len(mine[layers[0]]) for mine in states]
    for what, given in (("labels", labels), ("groups", groups), ("intervals", intervals)):
        if given is not None and (isinstance(given, str) or len(given) != len(states)):
            raise _bad(f"{what} has {len(given)} entries and states {len(states)}; pass one a source", what)
    chosen = [_entry(entry, counts[s], s, level) for s, entry in enumerate(labels)]
    tokens = tuple(entry[0] for entry in chosen)
    values = _joined([entry[1] for entry in chosen])
    source = np.repeat(np.arange(len(states)), [len(entry[1]) for entry in chosen])
    keys = list(range(len(states))) if groups is None else list(groups)
    numbers = {key: k for k, key in enumerate(dict.fromkeys(keys))}
    task = _task(values, task)
    classes, targets = None, values.astype(np.float64) if task == "regression" else values
    if task == "classification":
        found, targets = np.unique(values, return_inverse=True)
        classes = tuple(found.tolist())
    return Samples(
        level=level,
        layers=layers,
        targets=targets,
        source=source,
        group=np.array([numbers[key] for key in keys])[source],
        tokens=tokens,
        intervals=_seconds(labels, tokens, counts, intervals, level),
        classes=classes,
    )


def _layers(states: States) -> tuple[int, ...]:
    if isinstance(states, (Mapping, torch.Tensor, np.ndarray)) or not len(states):
        raise _bad("states must be a list with one dict of layer -> [tokens, width] a source", "states")
    for s, mine in enumerate(states):
        if not isinstance(mine, Mapping) or not mine or mine.keys() != states[0].keys():
            raise _bad(f"states[{s}] does not hold the same layers as states[0]; extract them in one call", "states")
        if len({len(values) for values in mine.values()}) > 1:
            raise _bad(f"the layers of states[{s}] differ in their number of tokens", "states")
    return tuple(states[0])


def _entry(entry: Any, n_tokens: int, s: int, level: str) -> tuple[np.ndarray, np.ndarray]:
    """One source's tokens, and its labels: one a token, or a single one at the clip level."""
    every = np.arange(n_tokens)
    if isinstance(entry, TokenLabels):
        if entry.n_tokens != n_tokens:
            raise _bad(
                f"labels[{s}] is for {entry.n_tokens} tokens and states[{s}] has {n_tokens}; label the timeline of "
                "the batch that the states come from",
                "labels",
            )
        every, entry = entry.tokens, entry.labels
    values = np.asarray(entry)
    if values.ndim == 0:
        return every, np.repeat(values, 1 if level == "clip" else n_tokens)
    if values.shape != every.shape:
        raise _bad(
            f"labels[{s}] has shape {list(values.shape)} and its source {len(every)} tokens; pass one label a token, "
            "one for the whole source, or what label_tokens returns",
            "labels",
        )
    if level == "clip":
        if len(np.unique(values)) > 1:
            raise _bad(f"labels[{s}] changes within the source; at the clip level pass one label a source", "labels")
        values = values[:1]
    return every, values


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    kinds = {"U" if part.dtype.kind == "U" else "number" if part.dtype.kind in "biuf" else "other" for part in parts}
    if len(kinds) > 1 or "other" in kinds:
        raise _bad("labels must be all strings or all numbers, in every source", "labels")
    values = np.concatenate(list(parts))
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise _bad("labels hold NaN or infinity; leave those tokens out with label_tokens", "labels")
    return values


def _task(values: np.ndarray, task: str | None) -> str:
    found = "regression" if values.dtype.kind == "f" else "classification"
    if task not in (None, "classification", "regression"):
        raise _bad(f"task is {task!r}; pass 'classification' or 'regression'", "task")
    if task == "regression" and values.dtype.kind == "U":
        raise _bad("a regression needs numbers as labels, these are strings", "labels")
    return task or found


def _seconds(
    labels: Sequence[Any],
    tokens: Sequence[np.ndarray],
    counts: Sequence[int],
    intervals: Sequence[Any] | None,
    level: str,
) -> tuple[np.ndarray, ...] | None:
    """Each source's samples in seconds, from `intervals` or from its TokenLabels."""
    found = []
    for s, (entry, mine) in enumerate(zip(labels, tokens, strict=True)):
        if intervals is not None:
            seconds = token_seconds(intervals[s])[0]
            if len(seconds) != counts[s]:
                raise _bad(f"intervals[{s}] has {len(seconds)} tokens and states[{s}] {counts[s]}", "intervals")
            seconds = seconds[mine]
        elif isinstance(entry, TokenLabels):
            seconds = entry.intervals
        else:
            return None
        found.append(np.array([[seconds[0, 0], seconds[-1, 1]]]) if level == "clip" else seconds)
    return tuple(found)


def _bad(message: str, source: str) -> ArgumentError:
    return ArgumentError(message, code="bad_argument", source=source)
