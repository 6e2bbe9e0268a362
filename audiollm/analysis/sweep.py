"""What sweeps share: windows over seconds, one request many times over, a bar that counts forwards, a file to resume.

Conventions. A forward is one request run through the whole model once, so a batch of 8 counts 8, and forwards per second
do not depend on the batch size. Windows are [start_s, end_s) of a source; the last one is cut at the source's end. An
audio token is in a window where its centre is.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm.auto import tqdm
from transformers import BatchFeature

from ..batch import PreparedBatch
from ..errors import ArgumentError
from ..generation import Stop, check_callbacks
from ..request import Request, Waveform
from ..timeline import Timeline

if TYPE_CHECKING:
    from ..session import Session

logger = logging.getLogger(__name__)


class Progress:
    """A block that counts forwards, shows a bar in a terminal or notebook, and is asked whether to stop.

    `what` is the bar's name and `total` its forwards, which are also logged (INFO) before the first one runs. `done`
    counts on as `add` is called; `forwards_per_s` is known once the block has ended. Raises: ArgumentError for a
    `stop` that is neither a threading.Event nor callable.
    """

    def __init__(self, what: str, total: int, width: int | None = None, stop: Stop | None = None) -> None:
        check_callbacks(None, stop)
        self.what, self.total, self.width = what, total, width
        self.stop = stop.is_set if isinstance(stop, threading.Event) else stop
        self.done = 0
        self.stopped = False
        self.seconds = 0.0

    def __enter__(self) -> Progress:
        length = "" if self.width is None else f" of {self.width} tokens"
        logger.info("%s: %d forwards%s", self.what, self.total, length)
        self._bar = tqdm(total=self.total, desc=self.what, unit="forward", disable=None, leave=False)
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: Any) -> None:
        self.seconds = time.perf_counter() - self._began
        self._bar.close()

    def add(self, forwards: int) -> None:
        """So many forwards have run."""
        self.done += forwards
        self._bar.update(forwards)

    def should_stop(self) -> bool:
        """Whether the caller wants no further forward; once true it stays so."""
        self.stopped = self.stopped or (self.stop is not None and bool(self.stop()))
        return self.stopped

    @property
    def forwards_per_s(self) -> float:
        """Forwards a second of wall time."""
        return self.done / self.seconds if self.seconds > 0 else float("nan")


def time_windows(used_s: float, window_s: float, hop_s: float | None, name: str = "window_s") -> np.ndarray:
    """Windows that cover a source of `used_s` seconds, [W, 2] float64 seconds; `hop_s` None is the window's length.

    Raises: ArgumentError for a window or hop that is not a positive number, a window past the source, a hop past the window.
    """
    window_s = _positive(window_s, name)
    hop_s = window_s if hop_s is None else _positive(hop_s, "hop_s")
    if window_s > used_s + 1e-9:
        raise _bad(
            f"a window of {window_s:g} s is longer than the source's {used_s:.3f} s (did you pass milliseconds?)",
            name,
        )
    if hop_s > window_s:
        raise _bad(f"hop_s {hop_s:g} is more than {name} {window_s:g}; seconds in between would be left out", "hop_s")
    count = 1 + max(0, int(np.ceil((used_s - window_s) / hop_s - 1e-6)))
    starts = np.arange(count) * hop_s
    return np.stack([starts, np.minimum(starts + window_s, used_s)], axis=1)


def in_windows(windows: np.ndarray, intervals: np.ndarray) -> np.ndarray:
    """[W, U] bool: which of U tokens (their `intervals` [U, 2] in seconds) have their centre in which window."""
    centres = intervals.mean(axis=1)
    return (centres >= windows[:, :1]) & (centres < windows[:, 1:])


def token_windows(windows: np.ndarray, intervals: np.ndarray, name: str = "window_s") -> tuple[np.ndarray, np.ndarray]:
    """Windows [W, 2] with at least one token, and `in_windows` of them; a last one past the last token is dropped.

    Raises: ArgumentError where an earlier window holds no token.
    """
    inside = in_windows(windows, intervals)
    some = np.asarray(inside.any(axis=1))
    count = int(np.flatnonzero(some)[-1]) + 1 if some.any() else 0
    if not count or not some[:count].all():
        raise _bad(
            f"a window of {windows[0, 1] - windows[0, 0]:g} s holds no audio token; a token is "
            f"{intervals[0, 1] - intervals[0, 0]:g} s",
            name,
        )
    return windows[:count], inside[:count]


def repeated(batch: PreparedBatch, times: int) -> PreparedBatch:
    """A batch of one request, that request `times` times; nothing is decoded or tokenized again."""
    inputs = {name: tensor.repeat(times, *[1] * (tensor.dim() - 1)) for name, tensor in batch.inputs.items()}
    return replace(
        batch,
        inputs=BatchFeature(inputs),
        slots=tuple(replace(slot, sample_index=b) for b in range(times) for slot in batch.slots),
        timeline=Timeline(tuple(replace(t, sample_index=b) for b in range(times) for t in batch.timeline)),
        requests=batch.requests * times,
        prompts=batch.prompts * times,
    )


def one_request(session: Session, given: Request | PreparedBatch, source: int, name: str) -> tuple[PreparedBatch, int]:
    """The batch of the one request that holds a source, and the source's number in it.

    `given` is a Request, or a batch in which `source` is a number of `batch.slots`; the other requests are left out.
    Raises: ArgumentError for anything else, or a source that is not there.
    """
    batch = prepared(session, given, name)
    whole = isinstance(source, (int, np.integer)) and not isinstance(source, bool)
    if not whole or not 0 <= source < len(batch.slots):
        raise _bad(f"source {source!r} is not one of the {len(batch.slots)} source(s) of {name}", "source")
    slot = batch.slots[source]
    if len(batch) == 1:
        return batch, int(source)
    return session.prepare([batch.requests[slot.sample_index]]), slot.audio_index


def prepared(session: Session, given: Request | PreparedBatch, name: str) -> PreparedBatch:
    """The batch of a Request, or a batch as it is. Raises: ArgumentError for anything else, or another model's batch."""
    if isinstance(given, Request):
        return session.prepare([given])
    if not isinstance(given, PreparedBatch):
        raise _bad(f"{name} is a {type(given).__name__}; pass a Request, or what session.prepare returns", name)
    session._check_batch(given)
    return given


def heard_request(batch: PreparedBatch, b: int, changed: Mapping[int, np.ndarray] | None = None) -> Request:
    """Request `b` with every source as the model heard it, or as `changed[audio_index]` [N] at the model's rate."""
    changed = changed or {}
    audios = [
        Waveform(changed.get(slot.audio_index, slot.waveform.numpy()), slot.sample_rate)
        for slot in batch.slots
        if slot.sample_index == b
    ]
    return Request(batch.requests[b].prompt, audios)


def silenced_request(batch: PreparedBatch, b: int) -> Request:
    """Request `b` with silence of equal length in place of every source."""
    slots = [slot for slot in batch.slots if slot.sample_index == b]
    return heard_request(batch, b, {slot.audio_index: np.zeros(len(slot.waveform), np.float32) for slot in slots})


def digest(batch: PreparedBatch) -> str:
    """SHA-256 of what a batch asks: its prompts' ids and every source as the model hears it."""
    found = hashlib.sha256()
    for prompt in batch.prompts:
        found.update(np.asarray([len(prompt), *prompt.ids], np.int64).tobytes())
    for slot in batch.slots:
        found.update(np.asarray([slot.sample_index, len(slot.waveform)], np.int64).tobytes())
        found.update(slot.waveform.numpy().tobytes())
    return found.hexdigest()


def checked_batch_size(batch_size: int) -> int:
    """Raises: ArgumentError for anything but a whole number from 1."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, (int, np.integer)) or batch_size < 1:
        raise _bad(f"batch_size is {batch_size!r}; pass a whole number from 1", "batch_size")
    return int(batch_size)


class SweepFile:
    """A grid on disk, written whole or not at all, that knows which sweep it belongs to.

    `fingerprint` names what the sweep is; its entries are compared one by one, so that a refusal can name what differs.
    """

    def __init__(self, path: str | Path, fingerprint: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.fingerprint = json.loads(json.dumps(fingerprint))
        if not self.path.parent.is_dir():
            raise _bad(f"{self.path.parent} is not a folder; make it first", str(path))

    def load(self) -> dict[str, np.ndarray] | None:
        """The arrays of `save`, or None where there is no file yet.

        Raises: ArgumentError for a file that cannot be read, or that belongs to another sweep, naming what differs.
        """
        if not self.path.exists():
            return None
        try:
            with np.load(self.path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            its = json.loads(str(arrays.pop("fingerprint")))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise _bad(
                f"{self.path} cannot be read as a sweep ({error}); remove it, or name another", str(self.path)
            ) from None
        keys = sorted({*its, *self.fingerprint})
        other = [key for key in keys if its.get(key) != self.fingerprint.get(key)]
        if other:
            raise _bad(
                f"{self.path} belongs to another sweep: {', '.join(other)} differ; name another file", str(self.path)
            )
        return arrays

    def save(self, **arrays: np.ndarray) -> None:
        """Put the arrays in the file's place, at once."""
        part = self.path.with_name(self.path.name + ".part")
        with part.open("wb") as file:
            np.savez(file, fingerprint=np.array(json.dumps(self.fingerprint)), **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.path)


def _positive(value: object, name: str) -> float:
    number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not number or not 0 < float(value) < float("inf"):  # type: ignore[arg-type]
        raise _bad(f"{name} is {value!r}; pass a positive number of seconds", name)
    return float(value)  # type: ignore[arg-type]


def _bad(what: str, source: str) -> ArgumentError:
    return ArgumentError(what, code="bad_argument", source=source)
