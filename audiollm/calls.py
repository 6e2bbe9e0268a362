"""What a model is in the middle of: which batch, the prompt or which step, which columns. Shared by observing and editing.

A context follows every call on a model while it is open: a Session's, which says its batch itself, and direct ones of
`session.model(...)`, for which the caller gave a batch or nothing is known but the shapes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .errors import ArgumentError
from .hooks import Hook, remove_hooks
from .points import Layout, Point
from .rows import Rows, Selection, audio_rows, prompt_rows

if TYPE_CHECKING:
    from .batch import PreparedBatch
    from .session import Session


@dataclass(frozen=True, eq=False)
class Slice:
    """Rows within one tensor of one call: `index` picks them from the tensor flattened to rows; both have length m."""

    index: torch.Tensor
    rows: Rows


class Context:
    """One open `with` block on a session: hooks at its points, and what call they are in.

    Subclasses give `watch(point)`, which registers what they need with `hook`. Points of the prompt are taken
    from the outermost pass only: a hook of the user's that calls the model or its head is none of our business.
    """

    def __init__(
        self,
        session: Session,
        points: Sequence[Point],
        selection: Selection,
        batch: PreparedBatch | None,
        must_fire: bool,
    ) -> None:
        self.session = session
        self.points = tuple(points)
        self.selection = selection
        self.given = batch
        self.must_fire = must_fire
        self.fired: set[str] = set()
        self.open = self.told = self.asleep = False
        self.thread = 0
        self.logits_kept: int | None = None
        self.batch: PreparedBatch | None = None
        self._start()

    # What a subclass does.

    def watch(self, point: Point) -> None:
        """Register the hooks of one point."""
        raise NotImplementedError

    def begun(self) -> None:
        """Called as each call begins, when its batch is known, before the model runs."""

    def wants_steps(self) -> bool:
        """Whether generated tokens are looked at."""
        return True

    def modules(self) -> Sequence[torch.nn.Module]:
        """Where `attach` registers hooks."""
        return [point.module for point in self.points]

    def attach(self) -> None:
        """Register the hooks of all points."""
        for point in self.points:
            self.watch(point)

    # The block.

    def __enter__(self) -> Any:
        if self.open:
            raise ArgumentError(
                "this block is open already; call the session's method once more for another",
                code="bad_argument",
                source="block",
            )
        try:
            adapter = self.session._adapter
            self.open, self.told, self.thread = True, False, threading.get_ident()
            self.session._contexts.append(self)
            self.hook(self.session.model, self._root_begins, before=True)
            self.hook(self.session.model, self._root_ends, always=True)
            self.hook(adapter.decoder(), self._decoder_begins, before=True)
            self.hook(adapter.decoder(), self._decoder_ends, always=True)
            self.attach()
            return self
        except BaseException:
            self._close()
            raise

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        try:
            self._close()
        finally:
            self._close()  # once more, where an interrupt cut the first short
        if kind is None and self.must_fire:
            self._check_fired()

    def is_live(self) -> bool:
        """Whether hooks act: not in another thread's call that was under way when the block was opened."""
        if not self.open or self.asleep:
            return False
        return self.told or not self.session._running or threading.get_ident() == self.thread

    def hook(self, module: torch.nn.Module, act: Callable, before: bool = False, always: bool = False) -> Hook:
        """Register a hook of this context, called as act(module, args, kwargs[, output])."""
        hook = Hook(self, act)
        if before:
            module.register_forward_pre_hook(hook, with_kwargs=True)
        else:
            module.register_forward_hook(hook, with_kwargs=True, always_call=always)
        return hook

    def _close(self) -> None:
        self.open = False
        adapter = self.session._adapter
        remove_hooks(self, (self.session.model, adapter.decoder(), *self.modules()))
        self.session._contexts[:] = [other for other in self.session._contexts if other is not self]

    def _check_fired(self) -> None:
        silent = [point.name for point in self.points if point.name not in self.fired]
        if silent:
            raise ArgumentError(
                f"{', '.join(silent)} never fired: no call inside the block reached it (a call that extracts stops at its "
                "deepest layer, and audio points need a request with audio); pass must_fire=False if that is meant",
                code="bad_argument",
                source="points",
            )

    # The call.

    def begin(self, batch: PreparedBatch | None, logits_kept: int | None = None) -> None:
        """A call begins, on this batch if one is known, that keeps the logits of so many last positions (None: all).

        Raises: ArgumentError where the selection does not fit the batch, or chooses nothing of it.
        """
        self._start()
        self.told, self.batch, self.logits_kept = True, batch, logits_kept
        if batch is None and not self.selection.is_everything:
            raise ArgumentError(
                "which columns are meant is not known for a direct call of session.model; pass batch=, or call the "
                "session's own methods",
                code="bad_argument",
                source="batch",
            )
        if batch is not None:
            rows = prompt_rows(batch)
            self.chosen = self.selection.mask(rows, batch)
            self.prompt = rows
            self.audio = audio_rows(batch)
            self.chosen_audio = self.selection.mask(self.audio, batch)
            self._check_chosen(batch)
        self.begun()

    def _check_chosen(self, batch: PreparedBatch) -> None:
        some = {"prompt": self.chosen.any() or self.selection.tokens == "steps"}
        some["audio"] = self.chosen_audio.any() or not batch.slots
        empty = [point.name for point in self.points if not some.get(point.axis, True)]
        if empty:
            raise ArgumentError(
                f"tokens, seconds and source together choose no row of {', '.join(empty)}: audio points have rows of audio "
                "alone, and source and seconds leave text out",
                code="bad_argument",
                source="tokens",
            )

    def _start(self) -> None:
        self.depth = 0
        self.inner = 0
        self.returned = False
        self.past = 0
        self.columns = 0
        self.width = 0
        self.kept: int | torch.Tensor = 0
        self.logits_kept = None
        self.attention: torch.Tensor | None = None
        self.over: np.ndarray | None = None
        self.counts: dict[str, int] = {}
        self._slices: dict[Any, Slice] = {}
        self._layouts: dict[Any, Sequence[Layout]] = {}

    def _root_begins(self, module: Any, args: tuple, kwargs: dict) -> None:
        filled = _filled(kwargs)
        if self.depth and not _is_under_way(module):
            self.depth = self.inner = 0  # an interrupt left the pass before, without its hooks
        ids = kwargs.get("input_ids", args[0] if args else None)
        if self.depth == 0 and filled == 0 and not (self.session._running and self.told):
            self._check_given(ids)
            self.begin(self.given)
        self.depth += 1
        if self.depth == 1:
            self.kept = kwargs.get("logits_to_keep", 0)
            self.attention = kwargs.get("attention_mask")
            if filled and ids is not None and self.wants_steps():
                self._finish_rows(ids[:, -1])

    def _check_given(self, ids: torch.Tensor | None) -> None:
        if self.given is not None and ids is not None and not torch.equal(ids, self.given.inputs["input_ids"].to(ids)):
            raise ArgumentError(
                "the call's input_ids are not those of batch=; pass the batch whose inputs are run",
                code="bad_argument",
                source="batch",
            )

    def _root_ends(self, *_: Any) -> None:
        self.depth = max(0, self.depth - 1)

    def _decoder_begins(self, module: Any, args: tuple, kwargs: dict) -> None:
        self.inner += 1
        if self.depth == 1 and self.inner == 1:
            self.returned = False
            self.past = _filled(kwargs)
            embeds = kwargs.get("inputs_embeds", args[0] if args else None)
            self.columns = 0 if embeds is None else embeds.shape[1]
            if self.is_step:
                self._slices.clear()
            else:
                self.width = self.columns

    def _decoder_ends(self, *_: Any) -> None:
        self.inner = max(0, self.inner - 1)
        self.returned = self.returned or (self.depth == 1 and self.inner == 0)

    def _is_due(self, point: Point) -> bool:
        """Whether a point of the prompt can be meant: the head's after the decoder returned, others while it runs."""
        return self.inner == 0 and self.returned if point.name == "logits" else self.inner == 1

    def _finish_rows(self, ids: torch.Tensor) -> None:
        """Requests whose answer has ended are fed padding from then on, which is nobody's row."""
        ended = (ids == self.session._adapter.end_id).cpu().numpy()
        self.over = ended if self.over is None else self.over | ended

    @property
    def is_step(self) -> bool:
        """Whether the running pass is a step of a generation, not a prompt."""
        return self.past > 0

    # Rows of a tensor.

    def slice(self, point: Point, tensor: torch.Tensor, chosen: bool = True) -> Slice | None:
        """The rows of a tensor at a point, chosen ones or all; None where the point is not ours just now.

        Counts nothing; `advance` does. Raises: ArgumentError where the tensor does not fit the batch.
        """
        if point.axis == "audio":
            return self._audio_slice(point, tensor, chosen) if self.depth <= 1 else None
        if self.is_step and not self.wants_steps():
            return None
        if self.depth != 1 or (point.axis == "prompt" and not self._is_due(point)):
            return None
        key = ("prompt", tensor.shape[1], self.past, chosen, tensor.device)
        if key not in self._slices:
            rows, flat = self._step_rows(tensor) if self.is_step else self._prompt_rows(tensor, chosen)
            self._slices[key] = Slice(torch.from_numpy(flat).to(tensor.device), rows)
        return self._slices[key]

    def advance(self, point: Point, fired: bool = True) -> None:
        """One more tensor of this call was seen at a point, and whether any of its rows was meant."""
        self.counts[point.name] = self.counts.get(point.name, 0) + 1
        if fired:
            self.fired.add(point.name)

    def expected(self, point: Point) -> int:
        """Tensors that a prompt pass gives at a point."""
        if point.axis != "audio":
            return 1
        return len(self._layouts_of(point)) if self.batch is not None and self.batch.slots else 0

    def _layouts_of(self, point: Point) -> Sequence[Layout]:
        assert point.layouts is not None and self.batch is not None
        if point.layouts not in self._layouts:
            self._layouts[point.layouts] = point.layouts(self.batch)
        return self._layouts[point.layouts]

    def _audio_slice(self, point: Point, tensor: torch.Tensor, chosen: bool) -> Slice | None:
        alone = self.depth == 0 and not self.session._running  # the encoder by itself, outside any call of the model
        if alone and (self.batch is None or self.counts.get(point.name, 0) >= self.expected(point)):
            self.begin(self.given)
        if self.batch is None:
            raise ArgumentError(
                f"which source is where at {point.name} is not known for a direct call of session.model; pass batch=",
                code="bad_argument",
                source="batch",
            )
        which = self.counts.get(point.name, 0)
        layouts = self._layouts_of(point)
        if which >= len(layouts):
            return None
        key = ("audio", point.layouts, which, chosen, tensor.device)
        if key not in self._slices:
            layout = layouts[which]
            take, numbers = layout.take.numpy(), layout.rows.numpy()
            if chosen:
                mine = self.chosen_audio[numbers]
                take, numbers = take[mine], numbers[mine]
            self._slices[key] = Slice(torch.from_numpy(take).to(tensor.device), self.audio[numbers])
        return self._slices[key]

    def _prompt_rows(self, tensor: torch.Tensor, chosen: bool) -> tuple[Rows, np.ndarray]:
        columns = self._kept_columns(tensor)
        if self.batch is None:
            rows = self._unknown_rows(len(tensor))
        else:
            if (len(tensor), self.columns) != (len(self.batch), self.batch.width):
                raise ArgumentError(
                    f"the call runs {len(tensor)} x {self.columns} positions and the batch has {len(self.batch)} x "
                    f"{self.batch.width}; pass the batch whose inputs are run",
                    code="bad_argument",
                    source="batch",
                )
            rows = self.prompt[self.chosen] if chosen else self.prompt
        place = np.full(self.columns, -1)
        place[columns] = np.arange(len(columns))
        rows = rows[place[rows.position] >= 0]
        return rows, rows.sample_index * tensor.shape[1] + place[rows.position]

    def _kept_columns(self, tensor: torch.Tensor) -> np.ndarray:
        """The columns of this pass that a tensor [B, T, ...] holds: all, or those that `logits_to_keep` kept."""
        everything = np.arange(self.columns)
        if tensor.shape[1] == self.columns:
            return everything
        if isinstance(self.kept, torch.Tensor):
            return everything[self.kept.cpu().numpy()]
        return everything[-tensor.shape[1] :]

    def _unknown_rows(self, n_requests: int) -> Rows:
        real = np.ones((n_requests, self.columns), bool)
        if isinstance(self.attention, torch.Tensor) and tuple(self.attention.shape) == real.shape:
            real = self.attention.bool().cpu().numpy()
        requests, columns = np.nonzero(real)
        return Rows.text(requests, columns)

    def _step_rows(self, tensor: torch.Tensor) -> tuple[Rows, np.ndarray]:
        width = tensor.shape[1]
        requests = np.arange(len(tensor))
        if self.batch is not None and (self.selection.source is not None or self.selection.seconds is not None):
            requests = np.unique(self.prompt.sample_index[self.chosen])
        going = requests if self.over is None else requests[~self.over[requests]]
        parts, flat = [], []
        for column in range(width):
            position = self.past + column
            parts.append(Rows.text(going, np.full(len(going), position), position - self.width + 1))
            flat.append(going * width + column)
        return Rows.join(parts), np.concatenate(flat)


@contextmanager
def undisturbed(session: Session) -> Iterator[None]:
    """The session's open blocks sleep: what runs now is none of their calls, and their edits do not act."""
    others = [context for context in session._contexts if not context.asleep]
    try:
        try:
            for context in others:
                context.asleep = True
            yield
        finally:
            _wake(others)
    finally:
        _wake(others)


def _wake(contexts: Sequence[Context]) -> None:
    for context in contexts:
        context.asleep = False


def _is_under_way(module: torch.nn.Module) -> bool:
    """Whether a module is being called further up this thread's stack, beside the call that asks."""
    found, frame = 0, sys._getframe()
    while frame is not None:
        if frame.f_code is torch.nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module:
            found += 1
        frame = frame.f_back  # type: ignore[assignment]
    return found > 1


def rows_of(tensor: torch.Tensor, point: Point) -> torch.Tensor:
    """A tensor at a point, flattened to rows [n, ...]."""
    if point.axis == "audio" and point.width is not None:
        return tensor.reshape(-1, *point.width)
    return tensor.flatten(0, 1)


def found_tensor(point: Point, args: tuple, kwargs: dict, output: Any) -> torch.Tensor | None:
    """The tensor of a point among what a hook is given."""
    if point.side == "in":
        values: Any = (*args, *kwargs.values())
    elif isinstance(output, dict):
        values = output.values()
    else:
        values = output if isinstance(output, (tuple, list)) else (output,)
    return next((value for value in values if isinstance(value, torch.Tensor)), None)


def _filled(kwargs: dict) -> int:
    """Positions in the cache that a call was given, under whichever name."""
    cache = kwargs.get("cache")
    cache = kwargs.get("past_key_values") if cache is None else cache
    return 0 if cache is None else int(cache.get_seq_length())
