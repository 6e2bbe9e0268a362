"""Edits: what may be done to the rows of a point while a model runs, for `session.edit({point: edit}, ...)`.

    with session.edit({"resid[3]": edits.zero()}, seconds=(1.0, 2.0)):
        session.generate(requests)

An edit is a function (values [m, ...], rows) -> new values of the same shape, or one of those made here. Values are the
chosen rows alone, in the model's dtype on its device, with the graph where the call keeps one. An edit applies to the
prompt; `steps` names the generated tokens, if any, that it applies to as well. Blocks nest: what was entered first is
applied first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .calls import Context, found_tensor, rows_of
from .errors import ArgumentError
from .points import Point
from .rows import Rows, Selection

if TYPE_CHECKING:
    from .batch import PreparedBatch
    from .session import Session

EditFunction = Callable[[torch.Tensor, Rows], torch.Tensor]


class Moment:
    """What an edit may look at beside its own rows: `every` row of the tensor [M, ...], and `every_rows`, what they are."""

    def __init__(self, flat: torch.Tensor, index: torch.Tensor, rows: Rows) -> None:
        self.every_rows = rows
        self._flat, self._index = flat, index

    @property
    def every(self) -> torch.Tensor:
        """All rows but padding [M, ...], gathered when asked for."""
        return self._flat[self._index]


class Edit:
    """One edit of chosen rows. Subclass it where a function of (values, rows) is not enough."""

    def ready(self, session: Session, point: Point, selection: Selection) -> Edit:
        """Called as the block is entered; returns the edit to use in it."""
        return self

    def apply(self, values: torch.Tensor, rows: Rows, moment: Moment) -> torch.Tensor:
        """New values [m, ...] for `values` [m, ...], which are of `rows`."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class _Function(Edit):
    function: EditFunction

    def apply(self, values: torch.Tensor, rows: Rows, moment: Moment) -> torch.Tensor:
        return self.function(values, rows)


@dataclass(frozen=True, eq=False)
class _Mean(Edit):
    def apply(self, values: torch.Tensor, rows: Rows, moment: Moment) -> torch.Tensor:
        new = values.clone()
        for request, source in sorted(set(zip(rows.sample_index.tolist(), rows.source.tolist(), strict=True))):
            mine = (rows.sample_index == request) & (rows.source == source)
            whole = (moment.every_rows.sample_index == request) & (moment.every_rows.source == source)
            at = torch.from_numpy(np.flatnonzero(whole)).to(values.device)
            mean = moment.every[at].float().mean(0).to(values.dtype)
            new[torch.from_numpy(mine).to(values.device)] = mean
        return new


@dataclass(frozen=True, eq=False)
class _Add(Edit):
    vector: torch.Tensor
    factor: float

    def apply(self, values: torch.Tensor, rows: Rows, moment: Moment) -> torch.Tensor:
        return values + self.factor * _fitting(self.vector, values, "vector")


@dataclass(frozen=True, eq=False)
class _Replace(Edit):
    new: torch.Tensor

    def apply(self, values: torch.Tensor, rows: Rows, moment: Moment) -> torch.Tensor:
        return _fitting(self.new, values, "values")


@dataclass(frozen=True, eq=False)
class _Swap(Edit):
    other: PreparedBatch

    def ready(self, session: Session, point: Point, selection: Selection) -> Edit:
        seen = session.capture(
            self.other,
            [point.name],
            selection.tokens,
            selection.seconds,
            selection.source,
            device=None,
            limit_bytes=1 << 62,
        )
        return _Replace(seen[point.name].values)


def zero() -> Edit:
    """Set the rows to 0 (zero ablation)."""
    return _Function(lambda values, rows: torch.zeros_like(values))


def mean() -> Edit:
    """Set each row to the mean over its whole source (of a text row: over its request's text), mean ablation."""
    return _Mean()


def scale(factor: float) -> Edit:
    """Multiply the rows."""
    return _Function(lambda values, rows: values * factor)


def add(vector: torch.Tensor | np.ndarray, factor: float = 1.0) -> Edit:
    """Add `factor` times a vector [D], or values [m, D], to the rows."""
    return _Add(torch.as_tensor(vector), factor)


def replace(values: torch.Tensor | np.ndarray) -> Edit:
    """Put values [m, D], or one [D] for all, in place of the rows. Gradients reach a tensor that requires them."""
    return _Replace(torch.as_tensor(values))


def swap(other_batch: PreparedBatch) -> Edit:
    """Put the same rows of another batch's run in their place (activation patching).

    The other batch runs once, as the block is entered. Both must choose equally many rows.
    """
    return _Swap(other_batch)


class Editing(Context):
    """The open block of `Session.edit`."""

    def __init__(
        self,
        session: Session,
        edits: Mapping[str, Edit | EditFunction],
        points: Mapping[str, Sequence[Point]],
        selection: Selection,
        batch: PreparedBatch | None = None,
        steps: str | Iterable[int] | None = None,
        must_fire: bool = True,
    ) -> None:
        every = [point for name in edits for point in points[name]]
        for point in every:
            if point.axis == "module":
                raise ArgumentError(
                    f"{point.name} is a module path, whose rows are not known; edit a named point (session.points()), or "
                    "register a torch hook of your own",
                    code="bad_argument",
                    source="edits",
                )
        super().__init__(session, every, selection, batch, must_fire)
        self.steps = _checked_steps(steps)
        self.edits = {point.name: _as_edit(edit, name) for name, edit in edits.items() for point in points[name]}

    def __enter__(self) -> Editing:
        self.ready = {
            point.name: self.edits[point.name].ready(self.session, point, self.selection) for point in self.points
        }
        return super().__enter__()

    def watch(self, point: Point) -> None:
        """See `Context`. What is registered raises ArgumentError for an edit that returns another shape."""
        if point.side == "in":

            def before(module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
                old = found_tensor(point, args, kwargs, None)
                new = None if old is None else self._edited(point, old)
                if new is None:
                    return None
                args = tuple(new if value is old else value for value in args)
                return args, {name: new if value is old else value for name, value in kwargs.items()}

            self.hook(point.module, before, before=True)
        else:

            def after(module: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
                old = found_tensor(point, args, kwargs, output)
                new = None if old is None else self._edited(point, old)
                if new is None:
                    return None
                return (new, *output[1:]) if isinstance(output, tuple) else new

            self.hook(point.module, after)

    def _edited(self, point: Point, tensor: torch.Tensor) -> torch.Tensor | None:
        if self.is_step and not self._takes_this_step():
            return None
        chosen, every = self.slice(point, tensor), self.slice(point, tensor, chosen=False)
        if chosen is None or every is None:
            return None
        self.advance(point)
        if len(chosen.rows) == 0:
            return None
        flat = rows_of(tensor, point)
        old = flat[chosen.index]
        new = self.ready[point.name].apply(old, chosen.rows, Moment(flat, every.index, every.rows))
        if not isinstance(new, torch.Tensor) or new.shape != old.shape:
            got = list(new.shape) if isinstance(new, torch.Tensor) else type(new).__name__
            raise ArgumentError(
                f"the edit of {point.name} returned {got}; it must return {list(old.shape)}, as it was given",
                code="bad_argument",
                source=point.name,
            )
        return flat.index_put((chosen.index,), new.to(old)).view(tensor.shape)

    def _takes_this_step(self) -> bool:
        return self.steps == "all" or (self.past - self.width + 1) in self.steps


def _as_edit(edit: Any, name: str) -> Edit:
    if isinstance(edit, Edit):
        return edit
    if isinstance(edit, type) or not callable(edit):
        raise ArgumentError(
            f"the edit of {name} is {edit!r}; pass a function (values, rows) or one of audiollm.edits, called",
            code="bad_argument",
            source="edits",
        )
    if edit in (zero, mean, scale, add, replace, swap):
        raise ArgumentError(
            f"the edit of {name} is edits.{edit.__name__} itself; call it, as in edits.zero()",
            code="bad_argument",
            source="edits",
        )
    return _Function(edit)


def _checked_steps(steps: Any) -> Any:
    if steps is None:
        return frozenset()
    if steps == "all":
        return "all"
    numbers = frozenset(steps) if hasattr(steps, "__iter__") and not isinstance(steps, str) else None
    if numbers is None or not all(isinstance(step, int) and step >= 1 for step in numbers):
        raise ArgumentError(
            f"steps is {steps!r}; pass None (the prompt only), 'all', or numbers from 1",
            code="bad_argument",
            source="steps",
        )
    return numbers


def _fitting(value: torch.Tensor, values: torch.Tensor, what: str) -> torch.Tensor:
    """`value` on the device and in the dtype of `values`, broadcast to its shape [m, ...]."""
    value = value.to(values)
    if value.shape != values.shape and value.shape != values.shape[1:]:
        raise ArgumentError(
            f"{what} is {list(value.shape)}; it must be {list(values.shape)}, one for each chosen row, or "
            f"{list(values.shape[1:])}",
            code="bad_argument",
            source=what,
        )
    return value.expand_as(values)
