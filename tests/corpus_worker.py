"""A worker for test_corpus_kill.py that is up at once and dies of one row; it imports nothing heavy."""

from __future__ import annotations

import os
import pickle
import signal
import time
from multiprocessing.connection import Connection


def serve(connection: Connection, folder: object, prompt: str) -> None:
    """As audiollm.corpus.worker.serve, but that an answer is only the rows' ids."""
    connection.send_bytes(b"")
    while True:
        rows = connection.recv()
        if any(row.id == "poison" for row in rows):
            os.kill(os.getpid(), signal.SIGKILL)
        connection.send_bytes(pickle.dumps([row.id for row in rows]))


def slow(connection: Connection, folder: object, prompt: str) -> None:
    """One that takes long to come up."""
    time.sleep(60)


def stillborn(connection: Connection, folder: object, prompt: str) -> None:
    """One that never comes up."""
    os._exit(3)
