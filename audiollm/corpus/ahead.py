"""Work done ahead by other processes, and by this one where they are not quick enough.

One thread a process hands it work and takes what it answers, so that a process never waits for the model. A process
that dies takes nothing with it: it is started anew, and what it had in hand is tried again in smaller pieces.
"""

from __future__ import annotations

import logging
import multiprocessing
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

from .clip import Failure
from .errors import RunError
from .manifest import Row
from .preparing import Preparer, Ready, unpacked
from .worker import serve

_log = logging.getLogger(__name__)
Rows = Sequence[Row]
# Processes take seconds to start: they do so once preparing has taken this process as long.
START_AFTER_S = 1.0
# How often a single row may take its process along before it is held at fault.
_TRIES = 2


class Ahead:
    """`with Ahead(count, preparer, folder) as ahead: for ready in ahead.results(batches): ...`

    `count` processes prepare batches of rows, once that is worth their start; with 0 everything is done here. At most
    `2 * count + 2` batches are in hand, prepared or not, so memory does not grow with the corpus.
    """

    def __init__(self, count: int, preparer: Preparer, folder: object) -> None:
        self._preparer, self._folder = preparer, folder
        self._depth = 0
        self._here_s = 0.0
        self._todo: queue.Queue[Rows | None] = queue.Queue()
        self._done: queue.Queue[tuple[Rows, bytes | None]] = queue.Queue()
        self._threads = [threading.Thread(target=self._drive, daemon=True) for _ in range(count)]
        self._processes: dict[threading.Thread, multiprocessing.process.BaseProcess] = {}
        self._lock = threading.Lock()
        self._closing = False

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closing = True
            for process in self._processes.values():
                process.terminate()
        for _thread in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def results(self, batches: Iterator[Rows]) -> Iterator[Ready]:
        """Batches of rows, prepared, in the order in which they are done.

        Raises: RunError `worker_died` where the processes do not come up at all. A row whose process dies with it twice
        is one of the failures.
        """
        in_hand, tries, ended = 0, dict[str, int](), False
        while True:
            if not self._depth and self._threads and self._here_s >= START_AFTER_S:
                self._start()
            while in_hand < self._depth and not ended:
                batch = next(batches, None)
                if batch is None:
                    ended = True
                else:
                    self._todo.put(batch)
                    in_hand += 1
            try:
                rows, answer = self._done.get_nowait()
            except queue.Empty:
                mine = self._mine(batches, ended)
                if mine is not None:
                    in_hand -= mine[1]
                    began = time.monotonic()
                    ready = self._preparer.prepare(mine[0])
                    self._here_s += time.monotonic() - began
                    yield ready
                    continue
                if not in_hand:
                    return
                rows, answer = self._done.get()
            in_hand -= 1
            if answer is not None:
                yield unpacked(answer)
                continue
            if not rows:
                raise RunError(
                    "the processes that prepare audio die as they start, see what they printed. A script must call extract "
                    "below `if __name__ == '__main__':`; or pass workers=0",
                    code="worker_died",
                    source="workers",
                )
            again, failed = _smaller(rows, tries)
            for piece in again:
                self._todo.put(piece)
                in_hand += 1
            if failed:
                yield Ready((), None, failed)

    def _mine(self, batches: Iterator[Rows], ended: bool) -> tuple[Rows, int] | None:
        """A batch for this process and how many of those in hand it is: a fresh one first, then one not yet begun."""
        fresh = None if ended else next(batches, None)
        if fresh is not None:
            return fresh, 0
        try:
            waiting = self._todo.get_nowait()
        except queue.Empty:
            return None
        return (waiting, 1) if waiting is not None else None

    def _start(self) -> None:
        self._depth = 2 * len(self._threads) + 2
        for thread in self._threads:
            thread.start()

    # What the threads do.

    def _drive(self) -> None:
        connection = self._started()
        while connection is not None:
            rows = self._todo.get()
            if rows is None:
                connection.close()
                break
            try:
                connection.send(rows)
                answer = connection.recv_bytes()
            except (EOFError, OSError):
                connection.close()
                self._done.put((rows, None))
                connection = self._started()
            else:
                self._done.put((rows, answer))
        process = self._processes.get(threading.current_thread())
        if process is not None:
            process.join()

    def _started(self) -> Connection | None:
        """A process that is up, or None where this is over or none comes up."""
        context = multiprocessing.get_context("spawn")
        with self._lock:
            if self._closing:
                return None
            mine, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(theirs, self._folder, self._preparer.prompt), daemon=True, name="audiollm-prepare"
            )
            process.start()
            theirs.close()
            self._processes[threading.current_thread()] = process
        try:
            mine.recv_bytes()
        except (EOFError, OSError):
            mine.close()
            process.join()
            if not self._closing:
                self._done.put(((), None))
            return None
        _log.debug("process %s prepares audio", process.pid)
        return mine


def _smaller(rows: Rows, tries: dict[str, int]) -> tuple[list[Rows], tuple[Failure, ...]]:
    """What is tried again of rows whose process died, one by one, and which is given up."""
    if len(rows) > 1:
        return [[row] for row in rows], ()
    row = rows[0]
    tries[row.id] = tries.get(row.id, 0) + 1
    _log.warning("the process that prepared %r died", row.id)
    if tries[row.id] < _TRIES:
        return [rows], ()
    message = "the process that decoded it died, twice; the file may be damaged so that its decoder fails, or too large"
    return [], (Failure(row, "worker_died", message),)
