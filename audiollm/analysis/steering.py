"""Steering: a direction from two sets of requests, added to what a model computes (Turner et al., 2023; Rimsky et al., 2024).

Conventions. A request's state at a point is the mean over its pooled rows, in float32. The vector is the mean state of the
positives minus that of the negatives. A projection is the dot product with the unit vector; 0 is the midpoint of the two
means, so that positives should lie above it and negatives below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from .. import edits
from ..batch import PreparedBatch
from ..errors import ArgumentError
from ..points import Point, resolve
from ..request import Request
from .separation import Separation, direction, separation
from .sweep import Progress, checked_batch_size, prepared

if TYPE_CHECKING:
    from ..edits import Editing
    from ..session import Session

POOLS = {"audio": "audio", "text": "text", "last": "last", "all": None}


@dataclass(frozen=True, eq=False)
class SteeringVector:
    """A direction at a point: `vector` [D] float32 on the CPU, positives minus negatives.

    `pool`, the rows that were averaged; `state_norm`, the mean norm of the pooled states; `offset`, the midpoint's dot product
    with the unit vector; `separation` of the two sets; `n_forwards` and `forwards_per_s`.
    """

    point: str
    pool: str
    vector: torch.Tensor
    state_norm: float
    offset: float
    separation: Separation
    n_forwards: int
    forwards_per_s: float

    @property
    def norm(self) -> float:
        """Euclidean length of the vector."""
        return float(self.vector.norm())

    def apply(
        self,
        session: Session,
        factor: float = 1.0,
        tokens: str | Sequence[int] | None = None,
        seconds: tuple[float, float] | None = None,
        source: int | Sequence[int] | None = None,
        steps: str | Sequence[int] | None = "all",
        batch: PreparedBatch | None = None,
    ) -> Editing:
        """A block in which `factor` times the vector is added: `with found.apply(session, 2.0): session.generate(...)`.

        By default to every position of the prompt and every generated token; `tokens`, `seconds`, `source`, `steps` and
        `batch` as in `Session.edit`. Raises: ArgumentError as that, for a factor that is not a finite number, and for a
        model whose point has another width.
        """
        if isinstance(factor, bool) or not isinstance(factor, (int, float, np.number)) or not np.isfinite(factor):
            raise _bad(f"factor is {factor!r}; pass a finite number", "factor")
        place = _place(session, self.point)
        if place.width != tuple(self.vector.shape):
            raise _bad(
                f"the vector has {len(self.vector)} dimensions and {self.point} of this model {list(place.width or ())}",
                "session",
            )
        edit = edits.add(self.vector, float(factor))
        return session.edit({self.point: edit}, tokens, seconds, source, steps, batch)

    def describe(self) -> str:
        """What the vector is and how well its sets separate, in words."""
        separation = self.separation
        return (
            f"Steering vector at {self.point}: mean of {len(separation.positives)} positive minus mean of "
            f"{len(separation.negatives)} negative requests ({self.pool} positions). Its norm is {self.norm:.3g}, "
            f"{self.norm / self.state_norm:.0%} of a state's; the cosine of the two means is {separation.cosine:.3f}. "
            f"{separation.describe()}"
        )

    def __repr__(self) -> str:
        return (
            f"SteeringVector({self.point}, {self.pool} positions, [{len(self.vector)}], norm {self.norm:.4g}; "
            f"{self.separation!r})"
        )


@dataclass(frozen=True, eq=False)
class SteeringTrace:
    """Projection of one source's tokens on a steering vector: `values` [U_i] float64, `intervals` [U_i, 2] seconds."""

    sample_index: int
    audio_index: int
    name: str
    point: str
    values: np.ndarray
    intervals: np.ndarray

    def describe(self) -> str:
        """What a plot of it shows, in words."""
        k = int(np.argmax(self.values))
        above = float((self.values > 0).mean())
        return (
            f"{self.name} along the steering vector at {self.point}: {above:.0%} of {len(self.values)} audio tokens lie on "
            f"the positive side; the highest is {self.values[k]:+.3g} at {self.intervals[k, 0]:.2f}-{self.intervals[k, 1]:.2f} s."
        )

    def __repr__(self) -> str:
        return (
            f"SteeringTrace(request {self.sample_index}, audio {self.audio_index}, {self.name!r}, {self.point}: "
            f"{len(self.values)} tokens, mean {self.values.mean():.4g})"
        )


def steering_vector(
    session: Session,
    positives: Sequence[Request],
    negatives: Sequence[Request],
    point: str,
    pool: str = "last",
    paired: bool = False,
    batch_size: int = 8,
) -> SteeringVector:
    """The difference of two sets' mean states at a point, with a report on how well the sets separate along it.

    `pool` says which rows of a request are averaged: "last", the prompt's last position; "audio"; "text", all that is no
    audio; "all". The report holds each request out in turn, and with `paired` (the k-th positive belongs to the k-th
    negative, such as a clip with and without its bass) the pair. Where the sets do not differ the held-out accuracy is at
    chance or a little below, as a request's own set is the one that its absence moves; separation on the direction of
    all is near perfect with few requests in many dimensions, whatever they are, and says nothing. Requests that share a clip
    are no independent draws: audio that stands before the question has the same states whatever is asked.

    Cost: one forward a request, `batch_size` at a time, stopped after the point; only pooled states are kept.
    Raises: ArgumentError for an empty set, an unknown point or pool, a request without audio where audio is pooled, or
    `paired` sets of different sizes; SessionBusyError.

    >>> from audiollm import Request, demo
    >>> session = demo.load("moss_music")
    >>> ask = lambda name: [Request(prompt, [demo.clips()[name]]) for prompt in ("What is it?", "Who plays?")]
    >>> found = steering_vector(session, ask("bass"), ask("drums"), point="resid[3]", pool="audio")
    >>> found.vector.shape, found.separation.n_tested
    (torch.Size([64]), 4)
    >>> with found.apply(session, factor=2.0):
    ...     answer = session.generate(ask("keys")[:1], max_new_tokens=2)
    """
    place = _place(session, point)
    if pool not in POOLS:
        raise _bad(f"pool is {pool!r}; pass one of {', '.join(map(repr, POOLS))}", "pool")
    if place.axis == "audio" and pool in ("text", "last"):
        raise _bad(f"{place.name} has audio rows only; pass pool='audio'", "pool")
    needs_audio = pool == "audio" or place.axis == "audio"
    for name, requests in (("positives", positives), ("negatives", negatives)):
        _check_requests(requests, name, needs_audio)
    if paired and len(positives) != len(negatives):
        raise _bad(f"paired sets must be equally large; there are {len(positives)} and {len(negatives)}", "paired")
    size, every = checked_batch_size(batch_size), [*positives, *negatives]
    states = []
    with Progress("steering vector", len(every)) as progress:
        for first in range(0, len(every), size):
            batch = session.prepare(every[first : first + size])
            seen = session.capture(batch, place.name, POOLS[pool], device=None)[place.name]
            states += [seen.request(b).values.float().mean(0).cpu() for b in range(len(batch))]
            progress.add(len(batch))
    both = torch.stack(states).double().numpy()
    positive, negative = both[: len(positives)], both[len(positives) :]
    towards, middle = direction(positive, negative)
    norm = float(np.linalg.norm(towards))
    return SteeringVector(
        point=place.name,
        pool=pool,
        vector=torch.from_numpy(towards).float(),
        state_norm=float(np.linalg.norm(both, axis=1).mean()),
        offset=float(middle @ towards / norm) if norm else 0.0,
        separation=separation(positive, negative, paired),
        n_forwards=progress.done,
        forwards_per_s=progress.forwards_per_s,
    )


def steering_trace(
    session: Session, batch: Request | PreparedBatch, steering: SteeringVector
) -> tuple[SteeringTrace, ...]:
    """Where in time each source lies along a steering vector: the projection of every audio token, one result a source.

    Cost: one forward a request, stopped after the vector's point; all audio tokens' states of one point are kept.
    Raises: ArgumentError for a batch without audio, or a model whose point has another width; SessionBusyError.

    >>> from audiollm import Request, demo
    >>> session = demo.load("moss_music")
    >>> bass, drums = ([Request("What is it?", [demo.clips()[name]])] for name in ("bass", "drums"))
    >>> found = steering_vector(session, bass, drums, point="resid[3]", pool="audio")
    >>> steering_trace(session, bass[0], found)[0].values.shape
    (150,)
    """
    batch = prepared(session, batch, "batch")
    if not batch.slots:
        raise _bad("the batch has no audio, so there are no seconds to show", "batch")
    if _place(session, steering.point).width != tuple(steering.vector.shape):
        raise _bad(
            f"the vector has {len(steering.vector)} dimensions, and this model's {steering.point} others", "session"
        )
    unit = steering.vector / max(steering.norm, 1e-30)
    seen = session.capture(batch, steering.point, "audio", device=None)[steering.point]
    found = []
    for number, (slot, timeline) in enumerate(zip(batch.slots, batch.timeline, strict=True)):
        values = (seen.source(number).values.float() @ unit.to(seen.values.device)).double().cpu().numpy()
        found.append(
            SteeringTrace(
                slot.sample_index, slot.audio_index, slot.name, steering.point, values - steering.offset,
                timeline.token_intervals(),
            )
        )  # fmt: skip
    return tuple(found)


def _place(session: Session, point: str) -> Point:
    found = resolve(session._adapter.points(), point, session.model)
    if len(found) != 1 or found[0].axis == "module" or found[0].width is None or len(found[0].width) != 1:
        raise _bad(f"point is {point!r}; pass one place whose rows are [D], such as 'resid[3]' or 'projected'", "point")
    return found[0]


def _check_requests(requests: object, name: str, needs_audio: bool) -> None:
    listed = isinstance(requests, Sequence) and not isinstance(requests, str)
    if not listed or not requests or not all(isinstance(request, Request) for request in requests):  # type: ignore
        raise _bad(f"{name} must be a list of Requests, at least one", name)
    for k, request in enumerate(requests):  # type: ignore[arg-type, var-annotated]
        if needs_audio and not request.audios:
            raise _bad(f"{name}[{k}] has no audio, and audio positions are asked for", name)


def _bad(what: str, source: str) -> ArgumentError:
    return ArgumentError(what, code="bad_argument", source=source)
