"""CKA between the layers of one or two models over many requests, batch by batch: states are dropped as it goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import ArgumentError
from .cka import MINIBATCH, CKAMatrix, CKASums, minibatches
from .extraction import batches, checked_layers, headers
from .similarity import average_over

if TYPE_CHECKING:
    from ..request import Request
    from ..session import Session


def session_cka(
    session: Session,
    requests: Sequence[Request],
    layers: Sequence[int] | None = None,
    other: Session | None = None,
    other_layers: Sequence[int] | None = None,
    *,
    minibatch: int = MINIBATCH,
    pool: int = 8,
    batch_requests: int = 1,
    seed: int = 0,
) -> CKAMatrix:
    """Debiased linear CKA between the layers of a model, or of two models, over the audio tokens of all requests.

    With `other` (a fine-tune, `random_control(session)`, or a model of the other family) rows are this session's layers
    and columns the other's, which hears the same requests; where its tokens are of another length both are averaged over
    the longer ones, second by second. Tokens of `pool` minibatches are gathered, put in random order with `seed` and
    dealt into minibatches (Nguyen et al. 2021), so memory is layers x pool x minibatch x D values however long the input.
    Fewer than 4 tokens that are left over at the end are not counted.

    Cost: one prefill a request and session, and layers x minibatch x D multiplications a token.
    Raises: ArgumentError for layers out of range, a minibatch below 4 or a pool below 1, and fewer than 4 tokens in all;
    what `Session.prepare` raises.

    >>> from audiollm import Request, demo
    >>> from audiollm.analysis.comparison import session_cka
    >>> mf, moss = demo.load("music_flamingo"), demo.load("moss_music")
    >>> session_cka(mf, [Request("Listen.", [demo.clips()["drums"]])], (0, -1), moss, (0, 1, 2)).values.shape
    (2, 3)
    """
    headers(session, requests)
    layers = checked_layers(session, layers)
    others = None if other is None else checked_layers(other, other_layers)
    minibatches(4, minibatch)
    if isinstance(pool, bool) or not isinstance(pool, int) or pool < 1:
        raise ArgumentError(f"pool is {pool!r}; pass a whole number from 1 on", code="bad_argument", source="pool")
    sums, rows, other_rows = CKASums(), _Pool(layers), None if others is None else _Pool(others)
    tokens_s = 0.0
    for batch in batches(session, requests, batch_requests):
        states: Sequence[Any] = session.extract_contextual_embeddings(batch, layers)
        seconds = [timeline.token_intervals() for timeline in batch.timeline]
        theirs: Sequence[Any] = [None] * len(states)
        if other is not None and others is not None:
            heard = other.prepare(batch.requests)
            theirs = other.extract_contextual_embeddings(heard, others)
            their_seconds = [timeline.token_intervals() for timeline in heard.timeline]
            both = [aligned(*four) for four in zip(states, seconds, theirs, their_seconds, strict=True)]
            states, theirs = [three[0] for three in both], [three[1] for three in both]
            seconds = [three[2] for three in both]
        for mine, its, spans in zip(states, theirs, seconds, strict=True):
            rows.add(mine)
            if other_rows is not None:
                other_rows.add(its)
            tokens_s += float(np.diff(spans, axis=1).sum())
            if len(rows) >= pool * minibatch:
                _flush(sums, rows, other_rows, minibatch, seed)
    if len(rows) >= 4 or not sums.n_tokens:
        _flush(sums, rows, other_rows, minibatch, seed)
    return sums.result(tokens_s)


def aligned(mine: dict, seconds: np.ndarray, theirs: dict, their_seconds: np.ndarray) -> tuple[dict, dict, np.ndarray]:
    """Two models' states of one source as rows of the same time: (layer -> [V, D], layer -> [V, D'], seconds [V, 2]).

    Tokens of the same seconds stay as they are; else both are averaged over the longer tokens that both cover.
    """
    if seconds.shape == their_seconds.shape and np.allclose(seconds, their_seconds, atol=1e-6):
        return mine, theirs, seconds
    onto = seconds if len(seconds) <= len(their_seconds) else their_seconds
    averaged: list[dict] = []
    kept = np.ones(len(onto), dtype=bool)
    for states, spans in ((mine, seconds), (theirs, their_seconds)):
        found = {layer: average_over(values, spans, onto) for layer, values in states.items()}
        averaged.append({layer: mean for layer, (mean, _) in found.items()})
        kept &= next(iter(found.values()))[1] > 0
    first, second = ({layer: mean[kept] for layer, mean in means.items()} for means in averaged)
    return first, second, onto[kept]


class _Pool:
    """Rows of several layers, gathered on the CPU until there are enough to be dealt out."""

    def __init__(self, layers: Sequence[int]) -> None:
        self._pieces: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def add(self, states: dict) -> None:
        for layer, pieces in self._pieces.items():
            pieces.append(torch.as_tensor(states[layer]).cpu())
        self._n += len(pieces[-1])

    def take(self) -> dict[int, torch.Tensor]:
        """Everything, and begin anew."""
        rows = {layer: torch.cat(pieces) for layer, pieces in self._pieces.items()}
        self._pieces = {layer: [] for layer in self._pieces}
        self._n = 0
        return rows


def _flush(sums: CKASums, rows: _Pool, others: _Pool | None, minibatch: int, seed: int) -> None:
    everything, theirs = rows.take(), None if others is None else others.take()
    n = len(next(iter(everything.values())))
    for picks in minibatches(n, minibatch, seed):
        given = None if theirs is None else {layer: values[picks] for layer, values in theirs.items()}
        sums.update({layer: values[picks] for layer, values in everything.items()}, given)
