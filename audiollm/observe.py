"""Observe: keep what chosen places compute, for chosen rows, around any call.

    with session.observe(["resid[3]", "projected"], seconds=(1, 2)) as seen:
        session.generate(requests)
    seen["resid[3]"].values, seen["resid[3]"].rows.start_s

What is kept is what the next computation receives, edits included, whatever was registered first: the input of a
module is taken as its forward received it, after every pre-hook; an output is taken after every other hook, since ours is moved
behind them before the module runs. Only the chosen rows are kept, on `device` in `dtype`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .calls import Context, found_tensor, rows_of
from .errors import ArgumentError
from .hooks import Halt
from .points import Point
from .rows import Rows, Selection, audio_rows, prompt_rows

if TYPE_CHECKING:
    from .batch import PreparedBatch
    from .session import Session

LIMIT_BYTES = 4 << 30


@dataclass(frozen=True, eq=False)
class Activation:
    """What one place computed in one call: `point`, `values` [R, ...], and `rows`, what the R rows are.

    A module path whose output is not [B, L, ...] has `rows` None, and `values` as it came from its last pass; asking for
    some of its rows raises ArgumentError.
    """

    point: str
    values: torch.Tensor
    rows: Rows | None

    @property
    def prompt(self) -> Activation:
        """The rows of the prompt alone. Raises: ArgumentError where rows are not known."""
        return self._where(self.known_rows().step == 0)

    @property
    def generated(self) -> Activation:
        """The rows of generated tokens alone; `rows.step` k is the k-th, when it is fed back. Raises: as `prompt`."""
        return self._where(self.known_rows().step > 0)

    def source(self, number: int) -> Activation:
        """The rows of one source, numbered as in `batch.slots`, in order of time. Raises: as `prompt`."""
        return self._where(self.known_rows().source == number)

    def request(self, sample_index: int) -> Activation:
        """The rows of one request. Raises: as `prompt`."""
        return self._where(self.known_rows().sample_index == sample_index)

    def known_rows(self) -> Rows:
        """`rows`, where they are known. Raises: ArgumentError where the values' rows are no positions of the prompt."""
        if self.rows is None:
            raise ArgumentError(
                f"{self.point} gave {list(self.values.shape)}, whose rows are not positions of the prompt",
                code="bad_argument",
                source=self.point,
            )
        return self.rows

    def _where(self, mask: np.ndarray) -> Activation:
        return Activation(
            self.point, self.values[torch.from_numpy(mask).to(self.values.device)], self.known_rows()[mask]
        )

    def describe(self) -> str:
        """One sentence: point, shape, dtype, and what the rows are."""
        rows = "rows unknown" if self.rows is None else repr(self.rows)
        return f"{self.point}: {list(self.values.shape)} {str(self.values.dtype).removeprefix('torch.')}, {rows}"

    def __repr__(self) -> str:
        return f"Activation({self.describe()})"


class Observation(Mapping[str, Activation]):
    """What a block saw: a mapping from point to Activation, of the last call; `calls` has every call's.

    A mapping of its own, not a live view of the model; values stay after the block ends.
    """

    def __init__(self, calls: Sequence[Mapping[str, Activation]], context: Mapping[str, Any] | None = None) -> None:
        self.calls = tuple(dict(call) for call in calls)
        self.context = dict(context or {})

    def __getitem__(self, point: str) -> Activation:
        return self.calls[-1][_seen(point, self.calls[-1] if self.calls else {})]

    def __iter__(self) -> Iterator[str]:
        return iter(self.calls[-1] if self.calls else ())

    def __len__(self) -> int:
        return len(self.calls[-1]) if self.calls else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all values of all calls."""
        return sum(a.values.numel() * a.values.itemsize for call in self.calls for a in call.values())

    def save(self, path: str | Path) -> Path:
        """Write the last call's values to `path` (.safetensors) and what they are to a .json beside; see `load_observation`.

        Raises: ArgumentError where nothing was seen, or the block's batch is not known.
        """
        from .storage import save_observation

        return save_observation(self, path)

    def __repr__(self) -> str:
        lines = [f"  {self[point].describe()}" for point in self]
        return "\n".join([f"Observation({len(self.calls)} call(s), {self.nbytes:,} bytes)", *lines])


class Observing(Context, Mapping[str, Activation]):
    """The open block of `Session.observe`; a mapping like Observation, also once it has ended."""

    def __init__(
        self,
        session: Session,
        points: Sequence[Point],
        selection: Selection,
        batch: PreparedBatch | None = None,
        device: str | torch.device | None = "cpu",
        dtype: torch.dtype | None = None,
        limit_bytes: int = LIMIT_BYTES,
        must_fire: bool = True,
        halt: bool = False,
    ) -> None:
        super().__init__(session, points, selection, batch, must_fire)
        self.device = None if device is None else torch.device(device)
        self.dtype = dtype
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ArgumentError(
                f"dtype is {dtype!r}; pass a torch.dtype, such as torch.bfloat16", code="bad_argument", source="dtype"
            )
        self.limit_bytes = limit_bytes
        self.halt = halt
        self.kept_bytes = 0
        self._calls: list[dict[str, list[tuple[torch.Tensor, Rows | None]]]] = []
        self._batches: list[PreparedBatch | None] = []

    def watch(self, point: Point) -> None:
        """See `Context`. The pre-hook moves the other one behind every hook registered since."""

        def see(module: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            self._see(point, found_tensor(point, args, kwargs, output))

        hook = self.hook(point.module, see)
        if point.side == "out":

            def to_the_end(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
                key = next(key for key, value in module._forward_hooks.items() if value is hook)
                module._forward_hooks.move_to_end(key)  # type: ignore[attr-defined]  # an OrderedDict, as torch makes it

            self.hook(point.module, to_the_end, before=True)

    def begun(self) -> None:
        """Refuse more bytes than the limit, before the model runs."""
        self._calls.append({})
        self._batches.append(self.batch)
        if self.batch is not None:
            wanted = self.kept_bytes + self.nbytes(self.batch, self.logits_kept)
            if wanted > self.limit_bytes:
                raise too_large(wanted, self.limit_bytes, "choose rows (source=, seconds=, tokens='last'), fewer points, "
                                "dtype=torch.bfloat16, or raise limit_bytes")  # fmt: skip

    def nbytes(self, batch: PreparedBatch, logits_kept: int | None = None) -> int:
        """Bytes that one prompt pass of a batch keeps; generated tokens and module paths are not counted.

        `logits_kept` last positions have logits, None: all.
        """
        prompt = prompt_rows(batch)
        mask = self.selection.mask(prompt, batch)
        has_logits = mask if logits_kept is None else mask & (prompt.position >= batch.width - logits_kept)
        audio = int(self.selection.mask(audio_rows(batch), batch).sum()) if batch.slots else 0
        itemsize = (self.dtype or batch.model_shape.dtype).itemsize
        total = 0
        for point in self.points:
            if point.width is not None:
                rows = audio if point.axis == "audio" else int((has_logits if point.name == "logits" else mask).sum())
                total += rows * math.prod(point.width) * itemsize
        return total

    def wants_steps(self) -> bool:
        """See `Context`."""
        return self.selection.takes_steps

    def columns_of(self, batch: PreparedBatch) -> np.ndarray:
        """Columns of the padded prompt [columns] that hold a chosen row of any request, ascending."""
        rows = prompt_rows(batch)
        return np.unique(rows.position[self.selection.mask(rows, batch)])

    def _see(self, point: Point, tensor: torch.Tensor | None) -> None:
        if tensor is None:
            return
        if self._is_plain(point, tensor):
            if not self._calls:  # a module called by itself, outside any call of the model
                self._calls.append({})
                self._batches.append(None)
            self._keep(point, tensor, None)
            return
        slice_ = self.slice(point, tensor)
        if slice_ is None:
            return
        if self.is_step or self.selection.tokens != "steps":
            self._keep(point, rows_of(tensor, point)[slice_.index], slice_.rows)
        else:
            self.advance(point)
        if self.halt and all(self.counts.get(p.name, 0) >= self.expected(p) for p in self.points):
            raise Halt

    def _is_plain(self, point: Point, tensor: torch.Tensor) -> bool:
        """Whether a module path gives something whose rows are not positions of the running pass."""
        if point.axis != "module":
            return False
        batch = len(self.batch) if self.batch is not None else tensor.shape[0] if tensor.dim() else 0
        return self.depth != 1 or tensor.dim() < 2 or tuple(tensor.shape[:2]) != (batch, self.columns)

    def _keep(self, point: Point, values: torch.Tensor, rows: Rows | None) -> None:
        self.advance(point)
        kept = values.to(device=self.device or values.device, dtype=self.dtype or values.dtype)
        if rows is None and kept is values:
            kept = values.clone()
        parts = self._calls[-1].setdefault(point.name, [])
        if rows is None:
            parts.clear()
        else:
            self.kept_bytes += kept.numel() * kept.itemsize
        parts.append((kept, rows))

    def result(self) -> Observation:
        """What was seen so far, apart from the block."""
        order = [point.name for point in self.points]
        calls = [{name: _joined(name, call[name]) for name in sorted(call, key=order.index)} for call in self._calls]
        batch = self._batches[-1] if self._batches else None
        told = {} if batch is None else told_of(self.session, batch)
        return Observation(calls, told)

    @property
    def calls(self) -> tuple[dict[str, Activation], ...]:
        """Every call's activations."""
        return self.result().calls

    def save(self, path: str | Path) -> Path:
        """As `Observation.save`."""
        return self.result().save(path)

    def __getitem__(self, point: str) -> Activation:
        last = self._calls[-1] if self._calls else {}
        return _joined(_seen(point, last), last[point])

    def __iter__(self) -> Iterator[str]:
        return iter(self._calls[-1] if self._calls else ())

    def __len__(self) -> int:
        return len(self._calls[-1]) if self._calls else 0

    def __repr__(self) -> str:
        return repr(self.result())


def told_of(session: Session, batch: PreparedBatch) -> dict[str, Any]:
    """What an Observation remembers of where it is from, without holding the model or its inputs."""
    return {
        "folder": session.folder,
        "family": session.family,
        "session": repr(session),
        "requests": batch.requests,
        "timeline": batch.timeline,
        "prompt_width": batch.width,
    }


def _seen(point: str, call: Mapping[str, Any]) -> str:
    if point not in call:
        raise KeyError(f"{point!r} was not seen; there are {', '.join(call) or 'none'}")
    return point


def _joined(point: str, parts: list[tuple[torch.Tensor, Rows | None]]) -> Activation:
    """One call's parts (encoder calls by chunk width, steps of a generation) as one array, in order of rows.

    The parts become that one array themselves, so that nothing is held or joined twice.
    """
    if len(parts) == 1:
        return Activation(point, *parts[0])
    known = [(values, rows) for values, rows in parts if rows is not None]
    values = torch.cat([values for values, _ in known])
    rows = Rows.join([rows for _, rows in known])
    if not (rows.step > 0).any():
        order = np.lexsort((rows.token, rows.source))  # encoder calls come by chunk width; sources are wanted in order
        values, rows = values[torch.from_numpy(order).to(values.device)], rows[order]
    parts[:] = [(values, rows)]
    return Activation(point, values, rows)


def too_large(wanted: int, limit: int, cure: str) -> ArgumentError:
    """The refusal of a result past its limit, both in bytes."""
    return ArgumentError(
        f"this would keep {wanted / 2**20:,.1f} MiB, and the limit is {limit / 2**20:,.1f} MiB; {cure}",
        code="too_large",
        source="limit_bytes",
    )
