"""DeepStack: audio added to the outputs of the first language layers, for one call and no longer.

The addition is a forward hook on each layer, registered with prepend=True at every call. So it runs before every hook
that was registered with `register_forward_hook` on that layer, whether by a user or by transformers' own recorder of
hidden states, before this call or during it: they all see the value after injection, as the next layer does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import Tensor, nn

Result = TypeVar("Result")

# The call whose injections are live in this thread. A hook of another call (a nested one, or one in another thread on
# the same model) finds a stranger here and keeps still.
_CALL: ContextVar[object | None] = ContextVar("moss_music_deepstack_call", default=None)


class Injection:
    """A forward hook that adds `stream` [U, D] to a layer's output at `rows`, `columns` [U]."""

    def __init__(self, call: object, rows: Tensor, columns: Tensor, stream: Tensor) -> None:
        self.call = call
        self.rows = rows
        self.columns = columns
        self.stream = stream

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The layer's output with the audio added, in a new tensor."""
        if _CALL.get() is not self.call:
            return None
        hidden = output[0] if isinstance(output, tuple) else output
        places = (self.rows.to(hidden.device), self.columns.to(hidden.device))
        hidden = hidden.index_put(places, hidden[places] + self.stream.to(hidden))
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def run_injected(
    run: Callable[[], Result], layers: Sequence[nn.Module], rows: Tensor, columns: Tensor, streams: Sequence[Tensor]
) -> Result:
    """`run()` while `streams[k]` [U, D] is added to the output of `layers[k]` at `rows`, `columns` [U].

    Every hook is gone when this returns or raises, KeyboardInterrupt included: they are found again by what they are
    and not by the handles that registering them gave, and a removal that is itself interrupted is done once more.
    """
    call = object()
    outer = _CALL.get()
    hooks = [Injection(call, rows, columns, stream) for stream in streams]
    try:
        try:
            for layer, hook in zip(layers, hooks, strict=False):
                layer.register_forward_hook(hook, prepend=True)
            _CALL.set(call)
            return run()
        finally:
            _remove(layers, call, outer)
    finally:
        _remove(layers, call, outer)


def _remove(layers: Sequence[nn.Module], call: object, outer: object | None) -> None:
    _CALL.set(outer)
    for layer in layers:
        ours = [key for key, hook in layer._forward_hooks.items() if isinstance(hook, Injection) and hook.call is call]
        for key in ours:
            del layer._forward_hooks[key]
