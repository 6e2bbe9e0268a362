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

from .calls import Context, Slice, found_tensor, rows_of, undisturbed
from .errors import ArgumentError
from .points import Point
from .rows import Rows, Selection, is_whole

if TYPE_CHECKING:
    from .batch import PreparedBatch
    from .session import Session

EditFunction = Callable[[torch.Tensor, Rows], torch.Tensor]


class Moment:
    """What an edit may look at beside its own rows.

    `order` [m], the number of each of its rows among all that are chosen at the point: an encoder that runs once a chunk
    width shows them in pieces; `total`, how many are chosen; and by `everything()` all rows of the tensor.
    """

    def __init__(self, flat: torch.Tensor, every: Callable[[], Slice], order: np.ndarray, total: int) -> None:
        self.order, self.total = order, total
        self._flat, self._every = flat, every

    def everything(self) -> tuple[torch.Tensor, Rows]:
        """All rows of the tensor but padding [M, ...], and what they are."""
        found = self._every()
        return self._flat[found.index], found.rows


class Edit:
    """One edit of chosen rows. Subclass it where a function of (values, rows) is not enough."""

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
        every, every_rows = moment.everything()
        for request, source in sorted(set(zip(rows.sample_index.tolist(), rows.source.tolist(), strict=True))):
            mine = (rows.sample_index == request) & (rows.source == source)
            whole = (every_rows.sample_index == request) & (every_rows.source == source)
            at = torch.from_numpy(np.flatnonzero(whole)).to(values.device)
            mean = every[at].float().mean(0).to(values.dtype)
            new[torch.from_numpy(np.flatnonzero(mine)).to(values.device)] = mean
        return new


@dataclass(frozen=True, eq=False)
class _Add(Edit):
    vector: torch.Tensor
    factor: float

    def apply(self, values: torch.Tensor, rows: Rows, moment: Moment) -> torch.Tensor:
        added = self.factor * self.vector.to(values.device)  # in the vector's own dtype, rounded once
        return values + _fitting(added, values, "vector", moment)


@dataclass(frozen=True, eq=False)
class _Replace(Edit):
    new: torch.Tensor

    def apply(self, values: torch.Tensor, rows: Rows, moment: Moment) -> torch.Tensor:
        return _fitting(self.new, values, "values", moment)


@dataclass(frozen=True, eq=False)
class _Swap(Edit):
    other: PreparedBatch

    def apply(self, values: torch.Tensor, rows: Rows, moment: Moment) -> torch.Tensor:
        raise AssertionError("a block puts what the other batch computed in its place")  # see Editing.__enter__


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

    The other batch runs once for all points of a block, as it is entered, without the edits of other open blocks, and at
    most `limit_bytes` of `Session.capture` are kept. Row by row both must be the same: the same token of the same source, or the
    same place in the same request's text.
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
        places: dict[tuple, str] = {}
        for point in every:
            place = (id(point.module), point.side)
            if place in places:
                raise ArgumentError(
                    f"{places[place]} and {point.name} are one place that is edited twice; nest two blocks, whose order says "
                    "which edit is first",
                    code="bad_argument",
                    source="edits",
                )
            places[place] = point.name
            if point.axis == "module":
                raise ArgumentError(
                    f"{point.name} is a module path, whose rows are not known; edit a named point (session.points()), or "
                    "register a torch hook of your own",
                    code="bad_argument",
                    source="edits",
                )
        super().__init__(session, every, selection, batch, must_fire)
        self.steps = "all" if selection.tokens == "steps" and steps is None else _checked_steps(steps)
        self.edits = {point.name: _as_edit(edit, name) for name, edit in edits.items() for point in points[name]}

        if self.steps and any(isinstance(edit, (_Mean, _Swap)) for edit in self.edits.values()):
            raise ArgumentError(
                "mean and swap are of a prompt's rows, and a generated token has no others; leave steps out",
                code="bad_argument",
                source="steps",
            )

    def __enter__(self) -> Editing:
        self.ready = dict(self.edits)
        self.donors: dict[str, np.ndarray] = {}
        swaps = {name: edit.other for name, edit in self.edits.items() if isinstance(edit, _Swap)}
        for other in {id(batch): batch for batch in swaps.values()}.values():
            names = [name for name, batch in swaps.items() if batch is other]
            chosen = self.selection
            with undisturbed(self.session):
                seen = self.session.capture(other, names, chosen.tokens, chosen.seconds, chosen.source, device=None)
            for name in names:
                self.ready[name] = _Replace(seen[name].values)
                self.donors[name] = _identities(seen[name].known_rows(), other)
        return super().__enter__()

    def wants_steps(self) -> bool:
        """See `Context`."""
        return bool(self.steps)

    def begun(self) -> None:
        """Refuse rows to swap that are not the same ones, before the model runs."""
        for point in self.points:
            if point.name not in self.donors:
                continue
            if self.batch is None:
                raise ArgumentError(
                    "which rows are swapped is not known for a direct call of session.model; pass batch=",
                    code="bad_argument",
                    source="batch",
                )
            rows = self.audio[self.chosen_audio] if point.axis == "audio" else self.prompt[self.chosen]
            mine, its = _identities(rows, self.batch), self.donors[point.name]
            if len(mine) != len(its) or (mine != its).any():
                raise ArgumentError(
                    f"the other batch of swap has not the same rows at {point.name}: {len(its)} against {len(mine)}, or of "
                    "other requests, sources or tokens; prepare both with requests of equal texts and lengths",
                    code="bad_argument",
                    source=point.name,
                )

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
        if self.is_step and point.axis == "prompt" and not self._takes_this_step():
            return None
        chosen = self.slice(point, tensor)
        if chosen is None:
            return None
        every = self._every(point, tensor)
        order, total = self._order(point, chosen.rows)
        self.advance(point, len(chosen.rows) > 0)
        if len(chosen.rows) == 0:
            return None
        flat = rows_of(tensor, point)
        old = flat[chosen.index]
        new = self.ready[point.name].apply(old, chosen.rows, Moment(flat, every, order, total))
        if not isinstance(new, torch.Tensor) or new.shape != old.shape or new.is_complex():
            got = f"{list(new.shape)} of {new.dtype}" if isinstance(new, torch.Tensor) else type(new).__name__
            raise ArgumentError(
                f"the edit of {point.name} returned {got}; it must return real values {list(old.shape)}, as it was given",
                code="bad_argument",
                source=point.name,
            )
        return flat.index_put((chosen.index,), new.to(old)).view(tensor.shape)

    def _every(self, point: Point, tensor: torch.Tensor) -> Callable[[], Slice]:
        """All rows of this very tensor, found only where an edit asks: the call's count has moved on by then."""
        count = self.counts.get(point.name, 0)

        def find() -> Slice:
            now, self.counts[point.name] = self.counts[point.name], count
            try:
                found = self.slice(point, tensor, chosen=False)
            finally:
                self.counts[point.name] = now
            assert found is not None
            return found

        return find

    def _order(self, point: Point, rows: Rows) -> tuple[np.ndarray, int]:
        """Each row's number among all chosen ones at a point, and how many those are."""
        if point.axis != "audio" or len(self._layouts_of(point)) == 1:
            return np.arange(len(rows)), len(rows)
        first = np.cumsum([0, *(t.n_tokens for t in self.batch.timeline)])  # type: ignore[union-attr]
        return (np.cumsum(self.chosen_audio) - 1)[first[rows.source] + rows.token], int(self.chosen_audio.sum())

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
    if isinstance(steps, str) and steps == "all":
        return "all"
    numbers: list[Any] = list(steps) if hasattr(steps, "__iter__") and not isinstance(steps, str) else [None]
    if not all(is_whole(step) and step >= 1 for step in numbers):
        raise ArgumentError(
            f"steps is {steps!r}; pass None (the prompt only), 'all', or numbers from 1",
            code="bad_argument",
            source="steps",
        )
    return frozenset(int(step) for step in numbers)


def _identities(rows: Rows, batch: PreparedBatch) -> np.ndarray:
    """[R, 3] what each row is, whatever stands before it: (0, source, token), or for text (1, request, place in it)."""
    starts = np.array([batch.width - len(prompt) for prompt in batch.prompts])
    text = rows.source < 0
    return np.stack(
        [
            text.astype(int),
            np.where(text, rows.sample_index, rows.source),
            np.where(text, rows.position - starts[rows.sample_index], rows.token),
        ],
        axis=1,
    )


def _fitting(value: torch.Tensor, values: torch.Tensor, what: str, moment: Moment) -> torch.Tensor:
    """`value` on the device and in the dtype of `values` [m, ...]: one row for all, or those of all chosen rows."""
    value = value.to(values)
    if value.shape == values.shape[1:]:
        return value.expand_as(values)
    if value.shape != (moment.total, *values.shape[1:]):
        raise ArgumentError(
            f"{what} is {list(value.shape)}; it must be {[moment.total, *values.shape[1:]]}, one for each chosen row, or "
            f"{list(values.shape[1:])}",
            code="bad_argument",
            source=what,
        )
    return value if moment.total == len(values) else value[torch.from_numpy(moment.order).to(values.device)]
