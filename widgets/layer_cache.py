"""States of layers that were computed already, the least recently used let go first, within a stated number of bytes.

`LayerCache` is a plain mapping with a limit; `LayerStates` fills it from a session, with as few prefills as its limit allows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import ArgumentError

if TYPE_CHECKING:
    from ..batch import PreparedBatch
    from ..session import Session

LIMIT_BYTES = 2 << 30
# Where all layers of a batch together need at most these bytes, one prefill keeps them all; else only those that are shown.
AHEAD_BYTES = 16 << 20


class LayerCache:
    """Values under keys, each with its size; `nbytes` never exceeds `limit_bytes`. What is larger than that is not kept.

    Raises: ArgumentError for a limit that is no whole number from 0 on.

    >>> cache = LayerCache(limit_bytes=10)
    >>> cache.put("a", "first", 6); cache.put("b", "second", 6)
    >>> cache.get("a"), cache.get("b"), cache.nbytes
    (None, 'second', 6)
    """

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        if isinstance(limit_bytes, bool) or not isinstance(limit_bytes, int) or limit_bytes < 0:
            raise ArgumentError(
                f"limit_bytes is {limit_bytes!r}; pass a whole number of bytes, such as 2 << 30",
                code="bad_argument",
                source="limit_bytes",
            )
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def get(self, key: Hashable) -> Any:
        """The value, now the most recently used, or None."""
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key][0]

    def put(self, key: Hashable, value: Any, nbytes: int) -> None:
        """Keep a value of so many bytes, and let go of the least recently used until all fit."""
        self._drop(key)
        if nbytes > self.limit_bytes:
            return
        while self.nbytes + nbytes > self.limit_bytes:
            self._drop(next(iter(self._kept)))
        self._kept[key] = value, nbytes
        self.nbytes += nbytes

    def clear(self) -> None:
        """Let go of everything."""
        self._kept.clear()
        self.nbytes = 0

    def _drop(self, key: Hashable) -> None:
        if key in self._kept:
            self.nbytes -= self._kept.pop(key)[1]

    def __contains__(self, key: object) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def __repr__(self) -> str:
        return f"LayerCache({len(self)} values, {self.nbytes:,} of {self.limit_bytes:,} bytes)"


class LayerStates:
    """States and norms of the audio tokens of one batch, layer by layer, computed when they are asked for and then kept.

    Where all layers of the batch need at most `ahead_bytes`, the first prefill keeps them all; else just those asked for are
    computed, which leaves out the blocks above. States are kept on the CPU in the model's dtype. What a hook or an edit
    changes later does not show until `cache.clear()`.

    Raises: ArgumentError for a batch of another model, and `too_large` where two layers, which one view may compare, need more
    than `limit_bytes`.
    """

    def __init__(
        self,
        session: Session,
        batch: PreparedBatch,
        limit_bytes: int = LIMIT_BYTES,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:
        session._check_batch(batch)
        self.session, self.batch = session, batch
        self.cache = LayerCache(limit_bytes)
        self.layer_bytes = batch.nbytes((0,))
        if 2 * self.layer_bytes > limit_bytes:
            raise ArgumentError(
                f"two layers of this batch are {2 * self.layer_bytes:,} bytes and limit_bytes is {limit_bytes:,}; pass a "
                "larger limit_bytes, or prepare shorter sources",
                code="too_large",
                source="limit_bytes",
            )
        n_layers = session.n_layers + 1
        self.keeps_all = n_layers * self.layer_bytes <= min(ahead_bytes, limit_bytes)

    def states(self, layers: Sequence[int]) -> dict[int, tuple[torch.Tensor, ...]]:
        """Each asked layer's states, one tensor [U_i, D] a source; at most two layers. At most one prefill runs."""
        found = {layer: self.cache.get(layer) for layer in layers}
        missing = [layer for layer, states in found.items() if states is None]
        if missing:
            computed = self._computed(self._every() if self.keeps_all else missing)
            found.update((layer, computed[layer]) for layer in missing)
        return found

    def norms(self, source: int, layers: Sequence[int]) -> np.ndarray:
        """Euclidean norms of one source's states, [n_layers, U_i] float32.

        Layers that the limit does not hold together are computed a group at a time, one prefill a group.
        """
        found: dict[int, Any] = {layer: self._known_norms(layer) for layer in layers}
        missing = [layer for layer, norms in found.items() if norms is None]
        for group in groups(self._every() if missing and self.keeps_all else missing, self._at_once):
            for layer, states in self._computed(group).items():
                found[layer] = self._normed(layer, states)
        return np.stack([found[layer][source] for layer in layers])

    def is_quick(self, layers: Sequence[int]) -> bool:
        """Whether the batch is small and these layers are kept, so that what is made of them takes no time to speak of."""
        return self.keeps_all and all(layer in self.cache for layer in layers)

    @property
    def _at_once(self) -> int:
        """How many layers the limit holds together."""
        return max(1, self.cache.limit_bytes // max(1, self.layer_bytes))

    def _every(self) -> list[int]:
        return list(range(self.session.n_layers + 1))

    def _computed(self, layers: Sequence[int]) -> dict[int, tuple[torch.Tensor, ...]]:
        """The states of some layers from one prefill, which are kept as well."""
        extracted = self.session.extract_contextual_embeddings(self.batch, layers)
        found = {layer: tuple(mine[layer].detach().cpu() for mine in extracted) for layer in layers}
        for layer, states in found.items():
            self.cache.put(layer, states, self.layer_bytes)
        return found

    def _known_norms(self, layer: int) -> tuple[np.ndarray, ...] | None:
        norms = self.cache.get(("norms", layer))
        if norms is None and layer in self.cache:
            norms = self._normed(layer, self.cache.get(layer))
        return norms

    def _normed(self, layer: int, states: Sequence[torch.Tensor]) -> tuple[np.ndarray, ...]:
        norms = tuple(each.float().norm(dim=-1).numpy() for each in states)
        self.cache.put(("norms", layer), norms, sum(each.nbytes for each in norms))
        return norms


def groups(layers: Sequence[int], at_once: int) -> list[list[int]]:
    """Layers in order, at most so many a group.

    >>> groups([0, 1, 2, 3, 4], 2)
    [[0, 1], [2, 3], [4]]
    """
    ordered = sorted(layers)
    return [ordered[first : first + at_once] for first in range(0, len(ordered), at_once)]
