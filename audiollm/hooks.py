"""Observe what a model computes, with hooks that are always removed.

What is read is what the next computation receives: the input of a decoder block, or of the output head. That tells the
truth whatever else is attached. The library's own `output_hidden_states` does not always: its recorder hooks stay
from the first call on, and an edit that is registered after them does not show, although the model computes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch


class Halt(Exception):
    """Raised inside a forward to leave it once the deepest asked layer was read; never seen by a caller."""


@contextmanager
def reading(
    blocks: Sequence[torch.nn.Module],
    head: torch.nn.Module,
    layers: Sequence[int],
    keep: Callable[[int, torch.Tensor], None],
    halt_after: int | None = None,
    head_rows: slice | None = None,
) -> Iterator[None]:
    """While the block is active, hand layer states to `keep(layer, states)`.

    Layer k of 0..len(blocks)-1 is what `blocks[k]` receives [B, L, D]; layer len(blocks) is what `head` receives. With
    `halt_after`, `Halt` is raised once that layer was kept and is swallowed here: no later module runs. `head_rows`
    passes only these rows on to the head, after they were all kept. The hooks are registered after the user's own, so
    that they see their edits, and are removed whatever happens.
    """
    places = [*blocks, head]
    handles = []

    def hook(layer: int) -> Callable:
        def read(module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            states = args[0] if args else kwargs["hidden_states"]
            keep(layer, states)
            if layer == halt_after:
                raise Halt
            if module is head and head_rows is not None:
                return (states[:, head_rows], *args[1:]), kwargs
            return None

        return read

    try:
        for layer in sorted(set(layers)):
            handles.append(places[layer].register_forward_pre_hook(hook(layer), with_kwargs=True))
        with suppress(Halt):
            yield
    finally:
        for handle in handles:
            handle.remove()
