"""What panels mean by a source and a selection: a number in `batch.slots`, and (source, start_s, end_s) or ()."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError

if TYPE_CHECKING:
    from ..batch import PreparedBatch


def checked_source(batch: PreparedBatch, number: Any, what: str = "source") -> int:
    """A source's number. Raises: ArgumentError, of the argument `what`, where the batch has no such source."""
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(batch.slots):
        raise _bad(f"source {number!r} is not one of the batch's {len(batch.slots)} source(s)", what)
    return number


def checked_selection(batch: PreparedBatch, selection: Any) -> tuple:
    """() or (source, start_s, end_s) within a source, in seconds. Raises: ArgumentError for anything else."""
    value = tuple(selection)
    if not value:
        return ()
    if len(value) != 3:
        raise _bad(f"selection is {value!r}; pass (source, start_s, end_s), or ()", "selection")
    number, start_s, end_s = value
    used_s = batch.timeline[checked_source(batch, number, "selection")].used_s
    if not 0 <= start_s < end_s <= used_s + 1e-9:
        raise _bad(
            f"selection {value!r} does not lie within source {number} of {used_s:.3f} s; pass 0 <= start_s < end_s in "
            "seconds (did you pass milliseconds?)",
            "selection",
        )
    return number, float(start_s), min(float(end_s), used_s)


def same_batch(batch: PreparedBatch, timeline: Any) -> None:
    """Raises: ArgumentError for a timeline that shows another batch than the panel that would follow it."""
    if timeline.batch is not batch:
        raise _bad("the timeline is of another batch; make both panels from one", "timeline")


def _bad(message: str, source: str) -> ArgumentError:
    return ArgumentError(message, code="bad_argument", source=source)
