"""What a run computes and keeps: which embeddings, which layers, how they are pooled, in which dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ArgumentError
from ..families import Family
from .pooling import Pool

WHAT = ("raw", "projected", "contextual")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Task:
    """Parameters of `extract` that decide what its numbers are; `layers` count from 0."""

    what: tuple[str, ...]
    layers: tuple[int, ...]
    pool: Pool
    prompt: str
    dtype: str

    @classmethod
    def of(
        cls, adapter: Family, what: Sequence[str], layers: Sequence[int], pool: str, prompt: str, dtype: str
    ) -> Task:
        """Check the parameters against a model. Raises: ArgumentError naming the one at fault; ManifestError."""
        asked = (what,) if isinstance(what, str) else tuple(what)
        wrong = [name for name in asked if name not in WHAT]
        if wrong or not asked:
            raise ArgumentError(f"what={what!r}; pass some of {', '.join(WHAT)}", code="bad_argument", source="what")
        if dtype not in DTYPES:
            raise ArgumentError(f"dtype={dtype!r}; pass {' or '.join(DTYPES)}", code="bad_argument", source="dtype")
        if isinstance(layers, (int, str)) or not hasattr(layers, "__iter__"):
            raise ArgumentError(
                f"layers is {layers!r}; pass a sequence, such as (0, 8, -1)", code="bad_argument", source="layers"
            )
        numbers = tuple(dict.fromkeys(adapter.model_shape().layer(layer) for layer in layers))
        if "contextual" in asked and not numbers:
            raise ArgumentError("contextual without layers; pass layers=(-1,)", code="bad_argument", source="layers")
        if not isinstance(prompt, str):
            raise ArgumentError(f"prompt is a {type(prompt).__name__}, not text", code="bad_argument", source="prompt")
        parsed = Pool.parse(pool)
        parsed.check_token(adapter.clock.token_s)
        return cls(
            what=tuple(name for name in WHAT if name in asked),
            layers=numbers if "contextual" in asked else (),
            pool=parsed,
            prompt=prompt,
            dtype=dtype,
        )

    def kinds(self) -> list[tuple[str, int | None]]:
        """(what, layer) of every tensor that a source gives; layer is None but for contextual."""
        plain: list[tuple[str, int | None]] = [(name, None) for name in self.what if name != "contextual"]
        return plain + [("contextual", layer) for layer in self.layers]

    def arguments(self) -> dict[str, Any]:
        """The parameters for run.json; those of two runs are compared by it."""
        return {
            "what": list(self.what),
            "layers": list(self.layers),
            "pool": self.pool.text,
            "pool_file_sha256": self.pool.sha256,
            "prompt": self.prompt,
            "dtype": self.dtype,
        }
