"""The cells of a patching sweep: which places, which positions of the prompt, and whether two prompts lie alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..batch import PreparedBatch
from ..errors import ArgumentError
from ..points import Point, resolve
from ..rows import prompt_rows
from .metric import Asked
from .sweep import in_windows

if TYPE_CHECKING:
    from ..session import Session

COLUMNS = ("audio", "text", "last", "all")


def chosen_columns(asked: Asked, windows: np.ndarray, also: Sequence[str], numbers: Sequence[int]) -> list[np.ndarray]:
    """For each variant, [W + C, L] bool: the columns of the prompt that each cell puts in."""
    found = []
    for variant in asked.variants:
        rows = prompt_rows(variant.runs[1])
        audio = np.isin(rows.source, numbers)
        named = {
            "audio": audio,
            "text": rows.source < 0,
            "last": rows.position == asked.prompt_width - 1,
            "all": np.ones(len(rows), bool),
        }
        by_window = audio & in_windows(windows, rows.intervals)  # seconds of text are NaN, which is in no window
        found.append(np.concatenate([by_window, np.stack([named[name] for name in also])]) if also else by_window)
    return found


def places_of(session: Session, point: str, layers: Sequence[int] | None) -> tuple[Point, ...]:
    """The rows of the grid. Raises: ArgumentError for an unknown place, or layers where there are none or not those."""
    points = session._adapter.points()
    indexed = isinstance(point, str) and f"{point}[0]" in points
    if not indexed and layers is not None:
        raise _bad(f"{point} has no layers; leave layers out", "layers")
    if isinstance(layers, (int, str)) or (layers is not None and not len(layers)):
        raise _bad(f"layers is {layers!r}; pass a sequence of numbers, such as (0, 8, 16)", "layers")
    names: Any = point if not indexed else f"{point}[*]" if layers is None else [f"{point}[{k}]" for k in layers]
    found = resolve(points, names, session.model)
    if any(place.axis == "module" or place.name == "logits" for place in found):
        raise _bad(
            f"{point} cannot be patched; pass 'resid', 'attn_out', 'mlp_out' or another of session.points()", "point"
        )
    return found


def sources_of(source: int | Sequence[int] | None, batch: PreparedBatch) -> list[int]:
    """Numbers of the sources asked for. Raises: ArgumentError for one that is not there."""
    every = list(range(len(batch.slots)))
    numbers = every if source is None else [source] if isinstance(source, (int, np.integer)) else list(source)
    if not numbers or not all(number in every for number in numbers):
        raise _bad(f"source is {source!r}; the requests have {len(every)} source(s), numbered from 0", "source")
    return [int(number) for number in numbers]


def columns_of(also: Sequence[str], places: Sequence[Point]) -> tuple[str, ...]:
    """Names of the other columns. Raises: ArgumentError for an unknown one, or one that the places have no rows of."""
    names = (also,) if isinstance(also, str) else tuple(also)
    for name in names:
        if name not in COLUMNS:
            raise _bad(f"also has {name!r}; pass some of {', '.join(map(repr, COLUMNS))}", "also")
        if name in ("text", "last") and any(place.axis == "audio" for place in places):
            raise _bad(f"{places[0].name} has audio rows only, so no column {name!r}; pass 'audio' or 'all'", "also")
    return names


def check_layout(clean: PreparedBatch, corrupted: PreparedBatch) -> bool:
    """Whether both prompts have the same text. Raises: ArgumentError where they do not lie alike, naming the difference."""
    for batch, name in ((clean, "clean"), (corrupted, "corrupted")):
        if len(batch) != 1 or not batch.slots:
            raise _bad(
                f"{name} holds {len(batch)} request(s) and {len(batch.slots)} source(s); pass one, with audio", name
            )
    if len(clean.slots) != len(corrupted.slots):
        raise _bad(f"clean has {len(clean.slots)} source(s) and corrupted {len(corrupted.slots)}", "corrupted")
    for k, (one, other) in enumerate(zip(clean.timeline, corrupted.timeline, strict=True)):
        if one.n_tokens != other.n_tokens:
            raise _bad(
                f"source {k} has {one.n_tokens} audio tokens ({one.used_s:.3f} s) in clean and {other.n_tokens} "
                f"({other.used_s:.3f} s) in corrupted; cut both to one length",
                "corrupted",
            )
    a, b = clean.prompts[0], corrupted.prompts[0]
    if len(a) != len(b):
        raise _bad(
            f"the prompt has {len(a)} tokens in clean and {len(b)} in corrupted; word both to as many tokens",
            "corrupted",
        )
    for k, role in enumerate(a.roles):
        if (role, a.sources[k]) != (b.roles[k], b.sources[k]):
            raise _bad(
                f"token {k} is {role} in clean and {b.roles[k]} in corrupted; put the sources in the same places",
                "corrupted",
            )
    return a.ids == b.ids


def _bad(what: str, source: str) -> ArgumentError:
    return ArgumentError(what, code="bad_argument", source=source)
