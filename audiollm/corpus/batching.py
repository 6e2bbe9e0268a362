"""Rows -> batches of like length under a token budget, so that little of a batch is padding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from .manifest import Row
from .preparing import Cost

# Rows that are measured and sorted together; more of them are more alike, fewer are sooner at the model.
CHUNK = 256
# A batch may be padded by this share of its tokens, or by this many tokens.
_WASTE, _WASTE_TOKENS = 0.15, 128


def batches(rows: Iterable[Row], cost: Callable[[Row], Cost], budget: int) -> Iterator[list[Row]]:
    """Group rows so that a batch's padded prompts, and its encoder windows, are at most `budget` tokens each.

    A row above the budget is a batch of its own. Headers are read by a thread, one chunk ahead.
    """
    chunks = _chunks(rows)
    with ThreadPoolExecutor(1, thread_name_prefix="audiollm-headers") as thread:
        coming = thread.submit(_measured, next(chunks, []), cost)
        while measured := coming.result():
            coming = thread.submit(_measured, next(chunks, []), cost)
            yield from _grouped(measured, budget)


def _chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    iterator = iter(rows)
    while chunk := list(islice(iterator, CHUNK)):
        yield chunk


def _measured(rows: list[Row], cost: Callable[[Row], Cost]) -> list[tuple[Row, Cost]]:
    return [(row, cost(row)) for row in rows]


def _grouped(measured: list[tuple[Row, Cost]], budget: int) -> Iterator[list[Row]]:
    group: list[Row] = []
    total = encoder = 0
    for row, cost in sorted(measured, key=lambda pair: (pair[1].tokens, pair[1].encoder)):
        padded = cost.tokens * (len(group) + 1)
        waste = padded - total - cost.tokens
        full = padded > budget or encoder + cost.encoder > budget
        if group and (full or waste > max(_WASTE * (total + cost.tokens), _WASTE_TOKENS)):
            yield group
            group, total, encoder = [], 0, 0
        group.append(row)
        total += cost.tokens
        encoder += cost.encoder
    if group:
        yield group
