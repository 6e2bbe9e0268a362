"""What is attached to a model, as plain values: which place, what is done there, for which tokens; and a block that opens all.

Conventions. An Attachment holds no hook; `Attached` registers them while its block is open, in the order of the list, as
nested blocks of `Session.edit` and `Session.observe` would. Its hooks act on calls of the thread that opened it alone, so
that a panel's work on a thread of its own never changes what a cell computes meanwhile. A firing is one tensor of which
rows were meant: one a prompt pass for most points, one a generated token.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import edits
from .calls import Context, undisturbed
from .edits import Editing, Moment, _fitting, _identities
from .errors import ArgumentError
from .observe import Observation, Observing
from .points import Point, resolve
from .rows import Rows, Selection, prompt_rows

if TYPE_CHECKING:
    from .batch import PreparedBatch
    from .session import Session

ACTS = ("observe", "zero", "mean", "scale", "add", "replace", "swap")


@dataclass(frozen=True)
class Firings:
    """How often one attachment fired: in passes over the `prompt`, and at generated `steps`."""

    prompt: int = 0
    steps: int = 0

    def __repr__(self) -> str:
        return f"{self.prompt} in the prompt, {self.steps} in generated tokens"


@dataclass(frozen=True, eq=False)
class Attachment:
    """One thing to do at one place.

    `point`, a name, pattern or module path; `act`, one of `ACTS`: "observe", or an edit of `audiollm.edits`. "scale" and
    "add" use `factor`; "add" adds `vector`, an array [D] or a SteeringVector; "replace" puts the rows of source `donor` of
    the same batch in their place; "swap" those of the batch `other`. `tokens`, `seconds`, `source` choose rows as in
    `Session.edit`, and `steps="all"` edits generated tokens as well.
    """

    point: str
    act: str = "observe"
    tokens: str | Sequence[int] | None = None
    seconds: tuple[float, float] | None = None
    source: int | Sequence[int] | None = None
    steps: str | None = None
    factor: float = 1.0
    vector: Any = None
    other: PreparedBatch | None = None
    donor: int | None = None

    def check(self, session: Session, batch: PreparedBatch) -> Attachment:
        """Itself, where it fits. Raises: ArgumentError with the engine's message, before any model runs.

        That is: for an unknown act, place or selection, rows that the batch does not have, a vector or rows of a donor of
        another size, another batch to swap with that has other rows, and what an act needs and was not given.
        """
        points, chosen = self._points(session), self._selection()
        if self.act == "observe":
            ObservingHere(session, points, chosen).begin(batch)
            return self
        values = self._stand_in(batch, points[0]) if self.act == "replace" else None
        block = EditingHere(session, {self.point: self._edit(values)}, {self.point: points}, chosen, batch, self.steps)
        block.donors = self._donors(session, points)
        block.begin(batch)
        given = self._tensor() if self.act == "add" else values
        for point in points:
            if given is not None and point.width is not None:
                self._fits(given, point, block)
        return self

    def block(self, session: Session, batch: PreparedBatch) -> Here:
        """A block that does it once entered, on calls of the thread that enters it. Raises: as `check`.

        For "replace" the donor's rows are computed here, by one prefill without the edits of open blocks.
        """
        points, chosen = self.check(session, batch)._points(session), self._selection()
        if self.act == "observe":
            return ObservingHere(session, points, chosen, batch, must_fire=False)
        values = None
        if self.act == "replace":
            with undisturbed(session):
                seen = session.capture(batch, self.point, self.tokens, self.seconds, self.donor, device=None)
            values = seen[points[0].name].values
        edit = self._edit(values)
        return EditingHere(session, {self.point: edit}, {self.point: points}, chosen, batch, self.steps, False)

    def code(self, session: Session, vector: str = "vector", other: str = "other_batch") -> str:
        """The expression that makes a block of the same, from `session`, `batch`, `edits`, and names for what it holds.

        Raises: as `check`, for an act or place that is not there or a factor that is no number.
        """
        where = self._arguments() + ", must_fire=False"
        if self.act == "observe":
            return f"session.observe({self.point!r}{where})"
        edit = {
            "scale": f"scale({self._number()!r})",
            "add": f"add({vector}, {self._number()!r})",
            "swap": f"swap({other})",
        }
        if self.act == "add" and isinstance(getattr(self.vector, "vector", None), torch.Tensor):
            edit["add"] = f"add({vector}.vector, {self._number()!r})"  # a SteeringVector
        if self.act == "replace":
            name = self._points(session)[0].name
            donor = replace(self, source=self.donor, steps=None)._arguments()
            edit["replace"] = f"replace(session.capture(batch, {self.point!r}{donor})[{name!r}].values)"
        return f"session.edit({{{self.point!r}: edits.{edit.get(self.act, self.act + '()')}}}{where})"

    def describe(self, vector: str = "vector", other: str = "the other batch") -> str:
        """What is done where and for which tokens, in words, with names for what it holds."""
        done = {
            "scale": f"scale by {self.factor:g}",
            "add": f"add {self.factor:g} x {vector}",
            "replace": f"replace from source {self.donor}",
            "swap": f"swap with {other}",
        }.get(self.act, self.act)
        return f"{self.point}: {done}, {self._where()}"

    def __repr__(self) -> str:
        return f"Attachment({self.describe()})"

    def _arguments(self) -> str:
        """The arguments that choose its rows, as Python: `, tokens='audio', source=0`; empty where all are meant."""
        given = {"tokens": self.tokens, "seconds": self.seconds, "source": self.source}
        if self.act != "observe":
            given["steps"] = self.steps
        return "".join(f", {name}={value!r}" for name, value in given.items() if value is not None)

    def _where(self) -> str:
        tokens = "all tokens" if self.tokens is None else f"{self.tokens} tokens"
        if not isinstance(self.tokens, str) and self.tokens is not None:
            tokens = f"columns {', '.join(map(str, self.tokens))}"
        source = "" if self.source is None else f" of source {self.source}"
        seconds = "" if self.seconds is None else f" in {self.seconds[0]:.2f}-{self.seconds[1]:.2f} s"
        return f"{tokens}{source}{seconds}" + (" and generated ones" if self.steps and self.act != "observe" else "")

    def _fits(self, given: torch.Tensor, point: Point, block: EditingHere) -> None:
        """Refuse values that are not one row for all, or one for each row that is chosen at a point."""
        width = tuple(point.width or ())
        if block.steps and tuple(given.shape) != width:
            raise _bad(
                f"{list(given.shape)} is of a prompt's rows, and generated tokens are edited as well; leave steps out, or give "
                f"one row {list(width)} for all",
                "steps",
            )
        count = int((block.chosen_audio if point.axis == "audio" else block.chosen).sum())
        rows = torch.empty(count, *width, device="meta")
        _fitting(given, rows, "vector" if self.act == "add" else "values", _moment(count))

    def _stand_in(self, batch: PreparedBatch, point: Point) -> torch.Tensor | None:
        """A tensor without values, of the shape of the donor's rows; None where a row's shape is not known."""
        if point.width is None:
            return None
        rows = Selection.of(self.tokens, self.seconds, self.donor).mask(prompt_rows(batch), batch)
        return torch.empty(int(rows.sum()), *point.width, device="meta")

    def _donors(self, session: Session, points: Sequence[Point]) -> dict[str, np.ndarray]:
        """What rows of the other batch a swap would put in, by point; empty for other acts."""
        if self.act != "swap" or self.other is None:
            return {}
        session._check_batch(self.other)
        its = EditingHere(session, {self.point: edits.zero()}, {self.point: points}, self._selection())
        its.donors = {}
        its.begin(self.other)
        rows = {"audio": its.audio[its.chosen_audio], "prompt": its.prompt[its.chosen]}
        return {point.name: _identities(rows[point.axis], self.other) for point in points}

    def _points(self, session: Session) -> tuple[Point, ...]:
        if self.act not in ACTS:
            raise _bad(f"act is {self.act!r}; pass one of {', '.join(map(repr, ACTS))}", "act")
        points = resolve(session._adapter.points(), self.point, session.model)
        if self.act == "replace" and len(points) != 1:
            raise _bad(f"replace is of one place, and {self.point!r} names {len(points)}", "point")
        return points

    def _selection(self) -> Selection:
        return Selection.of(self.tokens, self.seconds, self.source)

    def _edit(self, values: torch.Tensor | None) -> edits.Edit:
        if self.act == "scale":
            return edits.scale(self._number())
        if self.act == "add":
            return edits.add(self._tensor(), self._number())
        if self.act == "swap":
            if self.other is None:
                raise _bad("swap needs another batch; pass other=, prepared with texts and sources as long", "other")
            return edits.swap(self.other)
        if self.act == "replace":
            if self.donor is None or self.source is None:
                raise _bad("replace needs source=, whose rows are replaced, and donor=, whose rows are put in", "donor")
            return edits.replace(torch.empty(0) if values is None else values)
        return edits.zero() if self.act == "zero" else edits.mean()

    def _number(self) -> float:
        number = isinstance(self.factor, (int, float, np.number)) and not isinstance(self.factor, bool)
        if not number or not math.isfinite(self.factor):
            raise _bad(f"factor is {self.factor!r}; pass a finite number", "factor")
        return float(self.factor)

    def _tensor(self) -> torch.Tensor:
        given = getattr(self.vector, "vector", self.vector)
        if not isinstance(given, (torch.Tensor, np.ndarray, list, tuple)):
            raise _bad(
                f"vector is {type(given).__name__}; add needs an array [D], or what steering_vector returns", "vector"
            )
        return torch.as_tensor(given)


class Here(Context):
    """A block that counts its firings, and sleeps in every thread but the one that opened it."""

    prompt_firings = 0
    step_firings = 0
    _sleeps = False

    @property
    def asleep(self) -> bool:  # type: ignore[override]
        """Whether calls pass it by."""
        return self._sleeps or threading.get_ident() != self.thread

    @asleep.setter
    def asleep(self, value: bool) -> None:
        self._sleeps = value

    @property
    def firings(self) -> Firings:
        """How often it fired since it was made."""
        return Firings(self.prompt_firings, self.step_firings)

    def count(self) -> None:
        """One firing, of the prompt or of a step."""
        if self.is_step:
            self.step_firings += 1
        else:
            self.prompt_firings += 1


class ObservingHere(Here, Observing):
    """The block of an attachment that observes."""

    def _keep(self, point: Point, values: torch.Tensor, rows: Rows | None) -> None:
        super()._keep(point, values, rows)
        if rows is None or len(rows):
            self.count()


class EditingHere(Here, Editing):
    """The block of an attachment that edits."""

    def advance(self, point: Point, fired: bool = True) -> None:
        """See `Context`."""
        super().advance(point, fired)
        if fired:
            self.count()


class Attached:
    """A block in which attachments act: `with Attached(session, batch, [...]) as attached: session.generate(requests)`.

    `batch` is what direct calls of `session.model` run on, and where "replace" finds its donor. Afterwards `firings` has one
    Firings an attachment and `seen` what those that observe saw. `close` ends it from wherever; it may be entered again.
    Raises: ArgumentError as `Attachment.check`; where it is open already.

    >>> from audiollm import Request, demo
    >>> session = demo.load("moss_music")
    >>> batch = session.prepare([Request("Which instrument?", [demo.clips()["bass"]])])
    >>> with Attached(session, batch, [Attachment("resid[3]", "zero", seconds=(1, 2)), Attachment("final")]) as attached:
    ...     out = session.forward(batch)
    >>> attached.firings
    (1 in the prompt, 0 in generated tokens, 1 in the prompt, 0 in generated tokens)
    >>> attached.seen[1]["final"].values.shape[1]
    64
    """

    def __init__(self, session: Session, batch: PreparedBatch, attachments: Sequence[Attachment]) -> None:
        self.session, self.batch, self.attachments = session, batch, tuple(attachments)
        self.blocks: tuple[Here, ...] = ()
        self.is_open = False

    def __enter__(self) -> Attached:
        if self.is_open:
            raise _bad("this block is open already; make another", "block")
        try:
            self.is_open, self.blocks = True, ()
            for attachment in self.attachments:
                block = attachment.block(self.session, self.batch)
                self.blocks = (*self.blocks, block)  # known before it is entered, so that `close` finds it
                block.__enter__()
            return self
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: Any) -> None:
        try:
            self.close()
        finally:
            self.close()  # once more, where an interrupt cut the first short

    def close(self) -> None:
        """Remove every hook; what was counted and seen stays."""
        for block in self.blocks:
            block._close()
        self.is_open = False

    @property
    def firings(self) -> tuple[Firings, ...]:
        """One Firings an attachment, of the last time it was open."""
        missing = len(self.attachments) - len(self.blocks)
        return (*(block.firings for block in self.blocks), *[Firings()] * missing)

    @property
    def seen(self) -> tuple[Observation | None, ...]:
        """One Observation an attachment that observes, None for one that edits, of the last time it was open."""
        return tuple(block.result() if isinstance(block, Observing) else None for block in self.blocks)


def _moment(total: int) -> Moment:
    def nothing() -> Any:
        raise AssertionError("only the number of rows is asked")

    return Moment(torch.empty(0), nothing, np.arange(total), total)


def _bad(what: str, source: str) -> ArgumentError:
    return ArgumentError(what, code="bad_argument", source=source)
