"""One piece of long work on a thread of its own, which says how far it is and can be cancelled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..points import Point

if TYPE_CHECKING:
    from ..session import Session


class Cancelled(Exception):
    """The user cancelled; raised inside the work, at its next `check` or `report`."""


class Job:
    """`work(job)` on a daemon thread without gradients, then `done(result)`, `failed(error)` or `cancelled()` on it.

    Exactly one of the three is called, and `ended()` after it whatever happened.
    """

    def __init__(
        self,
        work: Callable[[Job], Any],
        done: Callable[[Any], None],
        failed: Callable[[Exception], None],
        cancelled: Callable[[], None],
        ended: Callable[[], None],
        progress: Callable[[float, str], None] = lambda fraction, text: None,
    ) -> None:
        self.stop = threading.Event()
        self._work, self._done, self._failed = work, done, failed
        self._cancelled, self._ended, self._progress = cancelled, ended, progress
        self._percent = -1
        self._thread = threading.Thread(target=self._run, daemon=True, name="audiollm-job")

    def start(self) -> Job:
        """Begin."""
        self._thread.start()
        return self

    @property
    def is_running(self) -> bool:
        """Whether it is under way."""
        return self._thread.is_alive()

    @property
    def is_mine(self) -> bool:
        """Whether the caller is the job's own thread."""
        return threading.current_thread() is self._thread

    def wait(self, timeout: float | None = None) -> None:
        """Until it has ended, or for so many seconds."""
        if not self.is_mine:
            self._thread.join(timeout)

    def check(self) -> None:
        """Raises: Cancelled once the user cancelled."""
        if self.stop.is_set():
            raise Cancelled

    def report(self, fraction: float, text: str = "") -> None:
        """Say how much is done, 0 to 1; the frontend hears of whole percents only. Raises: as `check`."""
        self.check()
        percent = int(100 * fraction)
        if percent != self._percent or text:
            self._percent = percent
            self._progress(fraction, text)

    @contextmanager
    def watching(self, session: Session) -> Iterator[None]:
        """While this is open a cancelled job leaves the session's model at its next decoder block, and reports blocks."""
        blocks = [point for point in session.points("resid*") if point.layer is not None]
        handles: list[Any] = []
        try:
            for k, point in enumerate(blocks):
                handles.append(point.module.register_forward_pre_hook(self._passing(point, k / len(blocks))))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _passing(self, point: Point, fraction: float) -> Callable[..., None]:
        def passed(*_: Any) -> None:
            if self.is_mine:
                self.report(fraction, f"block {point.layer}")

        return passed

    def _run(self) -> None:
        try:
            try:
                with torch.no_grad():
                    result = self._work(self)
                self.check()
                self._done(result)
            except Cancelled:
                self._cancelled()
            except Exception as error:  # noqa: BLE001  the thread's door: whatever it is, the panel shows it
                self._failed(error)
        finally:
            self._ended()
