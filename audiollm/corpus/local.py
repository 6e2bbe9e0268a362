"""The engine on one machine: processes prepare ahead, this one runs the model, a thread writes."""

from __future__ import annotations

import pyarrow as pa
from tqdm.auto import tqdm

from ..session import Session
from .ahead import Ahead
from .batching import batches
from .embedding import embed
from .folder import RunFolder
from .manifest import Manifest
from .preparing import Preparer
from .shards import Writer
from .task import Task


def run_local(
    run: RunFolder,
    clips: Manifest,
    pending: list[int],
    index: pa.Schema,
    session: Session,
    preparer: Preparer,
    task: Task,
    workers: int,
    batch_tokens: int,
    shard_bytes: int,
    commit_s: float,
) -> None:
    """Do the `pending` rows of a manifest. An interrupt writes what is done before it goes on its way.

    Raises: RunError `disk_full` and `worker_died`.
    """
    writer = Writer(run.path, run.next_number(), index, shard_bytes, commit_s)
    keep, failed = False, 0
    bar = tqdm(total=len(clips), initial=len(clips) - len(pending), unit="row", desc=run.path.name, disable=None)
    try:
        with bar, Ahead(workers, preparer, session.folder) as ahead:
            for ready in ahead.results(batches(clips.rows(pending), preparer.cost, batch_tokens)):
                for entry in embed(session, ready, task, preparer):
                    writer.add(entry)
                    failed += not entry.tensors
                    bar.set_postfix(failed=failed, refresh=False)
                    bar.update()
        keep = True
    except KeyboardInterrupt:
        keep = True
        raise
    finally:
        writer.close(keep)
