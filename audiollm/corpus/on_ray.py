"""The engine on many machines: the same run as a Ray Data pipeline, read -> prepare -> model -> write.

Rows go through in units of some dozens, each of which becomes one shard of a fixed name. Whatever dies, Ray does its
units again, and a unit that was written already is left as it is; so every row is there once. All machines must see
the snapshot, the clips and the run's folder under the same paths, and have audiollm[ray] installed.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from tqdm.auto import tqdm

from ..errors import ArgumentError, AudioLLMError
from ..loading import load_model
from .batching import batches
from .embedding import embed
from .folder import RunFolder
from .manifest import Manifest, Row
from .preparing import Preparer
from .shards import pack
from .task import Task
from .units import carried, unit_of, write_unit

UNIT_ROWS = 64


def run_ray(
    run: RunFolder,
    clips: Manifest,
    pending: list[int],
    index: pa.Schema,
    snapshot: Path,
    task: Task,
    place: tuple[str, torch.dtype],
    nbytes: int,
    *,
    workers: int | None,
    batch_tokens: int,
    shard_bytes: int,
    address: str | None = None,
    actors: int | None = None,
    actor_cpus: float = 1.0,
    actor_gpus: float | None = None,
) -> None:
    """Do the `pending` rows of a manifest on a Ray cluster.

    Parameters beside those of `extract`: `address` of a running cluster, such as "auto" or "host:6379"; without it one
    starts here and ends with the run. `actors`, sessions at a time: by default one a GPU of
    the cluster, or one on the CPU. Each takes `actor_gpus` (1, or 0 where `device` is the CPU) and `actor_cpus`; a process
    that prepares takes one CPU, `workers` of them at most.

    Raises: ArgumentError where Ray is not installed; RunError `disk_full` and `worker_died`.
    """
    ray = _ray()
    on_gpu = place[0] != "cpu"
    started = _connect(ray, address, (actors or 1) + 1)
    try:
        gpus = (1.0 if on_gpu else 0.0) if actor_gpus is None else actor_gpus
        there = ray.cluster_resources()
        count = actors or (int(there.get("GPU", 0) // gpus) if gpus else 1) or 1
        most = workers or max(1, int(there.get("CPU", 1) - count * actor_cpus))
        per_unit = max(1, min(UNIT_ROWS, shard_bytes * len(pending) // max(1, nbytes)))
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = context.print_on_execution_start = False
        told = (str(snapshot.absolute()), task, batch_tokens, *place)
        one = {"batch_size": 1, "batch_format": "pyarrow"}
        actors_of, tasks_of = ray.data.ActorPoolStrategy, ray.data.TaskPoolStrategy
        units = ray.data.from_arrow([unit_of(*unit) for unit in _units(clips, pending, per_unit)])
        prepared = units.map_batches(
            _Prepare, **one, fn_constructor_args=told[:3], num_cpus=1, compute=actors_of(min_size=1, max_size=most)
        )
        embedded = prepared.map_batches(
            _Embed, **one, fn_constructor_args=told, num_cpus=actor_cpus, num_gpus=gpus, compute=actors_of(size=count)
        )
        done = embedded.map_batches(
            write_unit, **one, fn_args=(str(run.path.absolute()), index), num_cpus=0, compute=tasks_of(size=count)
        )
        _follow(done, run, clips, pending)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, AudioLLMError):
            raise cause from error
        raise
    finally:
        if started:
            ray.shutdown()


def _follow(done: Any, run: RunFolder, clips: Manifest, pending: list[int]) -> None:
    failed = 0
    bar = tqdm(total=len(clips), initial=len(clips) - len(pending), unit="row", desc=run.path.name, disable=None)
    with bar:
        for unit in done.iter_rows():
            failed += unit["failed"]
            bar.set_postfix(failed=failed, refresh=False)
            bar.update(unit["rows"])


def _ray() -> Any:
    try:
        import ray
        import ray.data
        import ray.exceptions
    except ImportError:
        raise ArgumentError(
            "engine='ray' needs Ray: pip install 'audiollm[ray]'", code="bad_argument", source="engine"
        ) from None
    return ray


def _connect(ray: Any, address: str | None, cpus: int) -> bool:
    """Join a cluster, or start one here; whether it was started. Nothing is reported to anyone."""
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    told = {"log_to_driver": False, "logging_level": logging.WARNING}
    if address is not None:
        try:
            ray.init(address=address, **told)
        except ConnectionError as error:
            raise ArgumentError(
                f"no Ray cluster answers at {address!r}: {error}", code="not_found", source="address"
            ) from error
    else:
        cores = max(os.cpu_count() or 1, cpus)
        ray.init(address="local", num_cpus=cores, include_dashboard=False, **told)
    return True


def _units(clips: Manifest, pending: list[int], per_unit: int) -> Iterator[tuple[str, list[Row]]]:
    """(name of the shard, rows) of each unit; names are this run's own, so none meets those of a run before."""
    token, rows, number = uuid.uuid4().hex[:8], clips.rows(pending), 0
    while unit := list(islice(rows, per_unit)):
        yield f"{token}-{number:06d}", unit
        number += 1


class _Prepare:
    """Decodes and computes mel for units, in batches of like length."""

    def __init__(self, snapshot: str, task: Task, budget: int) -> None:
        torch.set_num_threads(1)
        self._preparer, self._budget = Preparer.of(snapshot, task.prompt), budget

    def __call__(self, unit: pa.Table) -> pa.Table:
        name, rows = carried(unit)
        ready = [self._preparer.prepare(group) for group in batches(rows, self._preparer.cost, self._budget)]
        return unit_of(name, ready)


class _Embed:
    """A session that embeds units; one an actor."""

    def __init__(self, snapshot: str, task: Task, budget: int, device: str, dtype: torch.dtype) -> None:
        self._session = load_model(snapshot, device, dtype)
        self._preparer, self._task = Preparer.of(snapshot, task.prompt), task

    def __call__(self, unit: pa.Table) -> pa.Table:
        name, batches_of_unit = carried(unit)
        return unit_of(
            name, pack([e for b in batches_of_unit for e in embed(self._session, b, self._task, self._preparer)])
        )
