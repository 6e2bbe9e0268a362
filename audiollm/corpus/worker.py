"""The process that prepares ahead of the model. Nothing heavy is imported before the threads of its libraries are set."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path


def serve(connection: Connection, folder: Path, prompt: str) -> None:
    """Answer rows with a packed batch until the other side closes, however it ends.

    The first message, an empty one, says that this process is up. An interrupt is the business of the process that
    owns the run.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    import torch

    from .preparing import Preparer, packed

    torch.set_num_threads(1)
    preparer = Preparer.of(folder, prompt)
    try:
        connection.send_bytes(b"")
        while True:
            connection.send_bytes(packed(preparer.prepare(connection.recv())))
    except (EOFError, OSError):
        return
