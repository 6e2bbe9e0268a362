"""Hooks that know whose they are and are always removed; and the engine's own reading of layers with them.

What is read is what the next computation receives: the input of a decoder block, or of the output head. That tells the
truth whatever else is attached. The library's own `output_hidden_states` does not always: its recorder hooks stay
from the first call on, and an edit that is registered after them does not show, although the model computes with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")
Keep = Callable[[int, torch.Tensor], None]


class Halt(Exception):
    """Leaves a forward once the deepest asked layer was read; never seen by a caller."""


class Hook:
    """A hook that knows its owner, and keeps still once the owner is no longer live."""

    def __init__(self, owner: Any, act: Callable) -> None:
        self.owner = owner
        self.act = act

    def __call__(self, *arguments: Any) -> Any:
        """What torch calls."""
        return self.act(*arguments) if self.owner.is_live() else None


def remove_hooks(owner: object, modules: Iterable[torch.nn.Module]) -> None:
    """Remove every hook of `owner` from `modules`, also where registering one was interrupted halfway.

    Hooks are found by what they are and not by the handles that registering gave, so that this may be done again.
    """
    for module in modules:
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            hooks = getattr(module, name)
            for key in [key for key, hook in hooks.items() if isinstance(hook, Hook) and hook.owner is owner]:
                for flags in (f"{name}_with_kwargs", f"{name}_always_called"):
                    getattr(module, flags, {}).pop(key, None)
                hooks.pop(key, None)  # last, so that a second sweep finds what an interrupt left


class Reading:
    """One call's reading of layers; its hooks are found again by their owner, and do nothing once it is over.

    Layer k of 0..n-1 is what `blocks[k]` receives [B, L, D], layer n is what `head` receives after `decoder` returned. Each
    is taken once, in this thread, and from the outermost pass of the decoder: a hook of the user's that calls the
    head or the model itself is none of our business.
    """

    def __init__(
        self,
        blocks: Sequence[torch.nn.Module],
        decoder: torch.nn.Module,
        head: torch.nn.Module,
        layers: Sequence[int],
        keep: Keep,
        halt_after: int | None = None,
        head_rows: slice | None = None,
    ) -> None:
        self.places = [*blocks, head]
        self.decoder = decoder
        self.wanted = set(layers)
        self.keep = keep
        self.halt_after = halt_after
        self.head_rows = head_rows
        self.thread = threading.get_ident()
        self.depth = 0
        self.returned = False
        self.over = False

    def attach(self) -> None:
        """Register after the user's hooks, so that their edits are seen."""
        self.decoder.register_forward_pre_hook(Hook(self, self._enter))
        self.decoder.register_forward_hook(Hook(self, self._leave), always_call=True)
        for layer in sorted(self.wanted):
            self.places[layer].register_forward_pre_hook(Hook(self, self._reader(layer)), with_kwargs=True)

    def detach(self) -> None:
        """Remove every hook of this reading, wherever registering was interrupted."""
        self.over = True
        remove_hooks(self, (self.decoder, *self.places))

    def is_live(self) -> bool:
        """Whether hooks act: not in other threads, and not after the reading."""
        return not self.over and threading.get_ident() == self.thread

    def _enter(self, *_: Any) -> None:
        self.depth += 1

    def _leave(self, *_: Any) -> None:
        self.depth -= 1
        self.returned = self.returned or self.depth == 0

    def _reader(self, layer: int) -> Callable:
        is_head = layer == len(self.places) - 1

        def read(module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            here = self.returned and self.depth == 0 if is_head else self.depth == 1
            if not here or layer not in self.wanted:
                return None
            self.wanted.discard(layer)
            states = args[0] if args else next(value for value in kwargs.values() if isinstance(value, torch.Tensor))
            self.keep(layer, states)
            if layer == self.halt_after:
                raise Halt
            if not is_head or self.head_rows is None:
                return None
            rows = states[:, self.head_rows]
            if args:
                return (rows, *args[1:]), kwargs
            return args, {name: rows if value is states else value for name, value in kwargs.items()}

        return read


def read_layers(run: Callable[[], Result], reading: Reading) -> Result | None:
    """`run()` while `reading` takes its layers; None where it halted the forward after the deepest.

    Every hook is gone when this returns or raises, an interrupt included: a removal that is itself interrupted is done
    once more.
    """
    try:
        try:
            reading.attach()
            return run()
        except Halt:
            return None
        finally:
            reading.detach()
    finally:
        reading.detach()
