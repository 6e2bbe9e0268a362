"""What the tests of looking inside share: three requests of every kind, and the hooks that a model has."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from audiollm import PreparedBatch, Request, Session, Waveform

FAMILIES = ("session_mf", "session_moss")


def noise(n_samples: int, seed: int = 0) -> Waveform:
    """Noise at 16 kHz."""
    return Waveform(np.random.default_rng(seed).normal(0, 0.1, n_samples).astype(np.float32), 16_000)


def mixed_requests() -> list[Request]:
    """One source, two sources of other lengths, none: padding on the left, several windows and chunk widths."""
    return [
        Request("hello there", [noise(32_000)]),
        Request("what", [noise(70_000, 1), noise(5_000, 2)]),
        Request("no audio"),
    ]


@lru_cache
def mixed_batch(session: Session) -> PreparedBatch:
    """`mixed_requests()` prepared once a session, which takes longer than most of what is asked of it."""
    return session.prepare(mixed_requests())


def positions(batch: PreparedBatch) -> torch.Tensor:
    return (batch.inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)


def hooks(session: Session) -> list[tuple]:
    """Every hook of every module, in order, with its flags."""
    names = (
        "_forward_pre_hooks",
        "_forward_hooks",
        "_forward_pre_hooks_with_kwargs",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_backward_hooks",
        "_backward_pre_hooks",
    )
    return [
        (path, name, tuple(getattr(module, name).items()))
        for path, module in session.model.named_modules()
        for name in names
    ]
