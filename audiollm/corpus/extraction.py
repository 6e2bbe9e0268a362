"""`extract`: a table of clips and a snapshot -> a run folder of embeddings."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..errors import ArgumentError
from ..loading import load_model
from ..session import Session
from ..snapshot import Snapshot, identity
from .errors import RunError
from .folder import FORMAT, RunFolder
from .local import run_local
from .manifest import Manifest, read_manifest
from .preparing import Preparer
from .reading import Run, open_run
from .shards import COLUMNS
from .task import DTYPES, Task

ENGINES = ("local", "ray")
_SAMPLE = 256
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Estimate:
    """What is to be done, from the headers of a sample of rows: `rows`, `seconds` of audio, `nbytes` of shards."""

    rows: int
    seconds: float
    nbytes: int

    def __str__(self) -> str:
        return f"{self.rows:,} rows, about {self.seconds / 3600:,.1f} h of audio and {_size(self.nbytes)} of embeddings"


def extract(
    snapshot: str | Path | Session,
    manifest: str | Path,
    out: str | Path,
    what: Sequence[str] = ("projected",),
    layers: Sequence[int] = (-1,),
    pool: str = "none",
    prompt: str = "",
    dtype: str = "bfloat16",
    *,
    engine: str = "local",
    device: str | torch.device | None = None,
    model_dtype: torch.dtype | None = None,
    workers: int | None = None,
    batch_tokens: int | None = None,
    shard_bytes: int = 256 << 20,
    commit_s: float = 30.0,
    limit_bytes: int | None = None,
    retry_errors: bool = False,
    verify: bool = True,
    **ray: Any,
) -> Run:
    """Write embeddings of every row of a manifest to a run folder; called again, do what is missing.

    Parameters: `snapshot`, a model folder, or a Session that is loaded already; `manifest`, see
    `audiollm.corpus.manifest`; `out`, the run's folder. `what`, some of "raw", "projected", "contextual"; `layers` of
    contextual; `pool`, see `audiollm.corpus.pooling`; `prompt` of rows that have none; `dtype` as stored, "bfloat16" or
    "float32". These, the snapshot and the model's dtype must be the same whenever a run is continued.

    `device` and `model_dtype` of the weights: a GPU in bfloat16 where there is one, else the CPU in float32. `workers`,
    processes that decode and compute mel ahead of the model; 0 for none. `batch_tokens` at most in a padded batch.
    A shard is written at `shard_bytes` or after `commit_s` seconds; work since then is what a crash costs. More than
    `limit_bytes` (by default what the disk has free) as estimated from a sample of rows is refused. `retry_errors` does rows
    again that failed; `verify` checks the shards that are there by their SHA-256, else by size only.
    `engine` "ray" takes the parameters of `audiollm.corpus.on_ray.run_ray` as well.

    A row that cannot be used is recorded in the index with its error and stops nothing.

    Raises: before the model is loaded, ArgumentError, ManifestError, SnapshotError and RunError (`bad_run`, `locked`,
    `too_large`); while it runs, RunError `disk_full` and `worker_died`. What was written until then is kept.
    """
    _check_engine(engine, ray, snapshot)
    _check_numbers(workers=workers, batch_tokens=batch_tokens, shard_bytes=shard_bytes)
    folder = _snapshot_folder(snapshot)
    clips = read_manifest(manifest, COLUMNS)
    preparer = Preparer.of(folder, prompt)
    task = Task.of(preparer.adapter, what, layers, pool, prompt, dtype)
    place = _place(snapshot, device, model_dtype)
    with RunFolder(out, _description(folder, preparer, task, place, clips), verify) as run:
        index = run.schema(clips)
        clips = clips.cast(index)
        if retry_errors:
            run.forget_errors()
        pending = _pending(run, clips)
        if pending:
            estimate = _estimate(clips, pending, preparer, task)
            _log.info("%s", estimate)
            _check_room(estimate, run.path, limit_bytes)
            how: dict[str, Any] = {"batch_tokens": batch_tokens or _budget(place[0]), "shard_bytes": shard_bytes}
            if engine == "ray":
                from .on_ray import run_ray

                Snapshot.open(folder).check(preparer.adapter.model)  # what load_model would refuse, before Ray starts
                run_ray(run, clips, pending, index, folder, task, place, estimate.nbytes, workers=workers, **how, **ray)
            else:
                session = snapshot if isinstance(snapshot, Session) else load_model(folder, *place)
                count = _workers(place[0]) if workers is None else workers
                run_local(run, clips, pending, index, session, preparer, task, count, commit_s=commit_s, **how)
        result = open_run(run.path)
    _log.info("%s", result)
    return result


def _check_engine(engine: str, ray: dict[str, Any], snapshot: object) -> None:
    if engine not in ENGINES:
        raise ArgumentError(f"engine={engine!r}; pass {' or '.join(ENGINES)}", code="bad_argument", source="engine")
    if ray and engine != "ray":
        name = next(iter(ray))
        raise ArgumentError(f"{name} is for engine='ray'", code="bad_argument", source=name)
    if engine == "ray" and isinstance(snapshot, Session):
        raise ArgumentError(
            "engine='ray' loads the snapshot in its own processes; pass the folder",
            code="bad_argument",
            source="snapshot",
        )


def _check_numbers(**numbers: int | None) -> None:
    for name, value in numbers.items():
        least = 0 if name == "workers" else 1
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ArgumentError(
                f"{name}={value!r}; pass a whole number from {least} on", code="bad_argument", source=name
            )


def _snapshot_folder(snapshot: str | Path | Session) -> Path:
    if not isinstance(snapshot, Session):
        return Path(snapshot)
    if snapshot.folder is None:
        raise ArgumentError(
            "this Session does not know its folder; make it by load_model", code="bad_argument", source="snapshot"
        )
    return snapshot.folder


def _place(
    snapshot: str | Path | Session, device: str | torch.device | None, dtype: torch.dtype | None
) -> tuple[str, torch.dtype]:
    """Device and dtype of the weights."""
    if isinstance(snapshot, Session):
        if device is not None or dtype is not None:
            raise ArgumentError(
                "a Session has its device and dtype; leave out device and model_dtype",
                code="bad_argument",
                source="device",
            )
        return str(snapshot.device), snapshot.dtype
    if device is None:
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    if dtype is None:
        dtype = torch.float32 if str(device) == "cpu" else torch.bfloat16
    return str(device), dtype


def _description(
    folder: Path, preparer: Preparer, task: Task, place: tuple[str, torch.dtype], clips: Manifest
) -> dict[str, Any]:
    adapter = preparer.adapter
    shape = adapter.model_shape()
    return {
        "format": FORMAT,
        "snapshot": {
            "folder": str(folder),
            "identity": identity(folder),
            "family": shape.family,
            "n_layers": shape.n_blocks,
            "width": shape.width,
            "token_s": adapter.clock.token_s,
        },
        "arguments": task.arguments() | {"model_dtype": str(place[1]).removeprefix("torch.")},
        "versions": {
            "audiollm": __version__,
            "torch": torch.__version__,
            "transformers": importlib.metadata.version("transformers"),
        },
        "manifest": str(clips.path),
        "labels": list(clips.labels.values()),
    }


def _pending(run: RunFolder, clips: Manifest) -> list[int]:
    """Numbers of the rows that are not there. Raises: RunError for one that is there and was another clip."""
    done = run.done()
    if done:
        for row in clips.rows():
            if done.get(row.id, row.digest) != row.digest:
                raise RunError(
                    f"{run.path} holds the id {row.id!r} of another clip: its audio, prompt, start_s or end_s was different; "
                    "give it another id, or write to another folder",
                    code="bad_run",
                    source=row.id,
                )
    return [number for number, clip in enumerate(clips.ids()) if clip not in done]


def _estimate(clips: Manifest, pending: list[int], preparer: Preparer, task: Task) -> Estimate:
    step = max(1, len(pending) // _SAMPLE)
    sample = pending[::step]
    width, size = preparer.adapter.model_shape().width, DTYPES[task.dtype].itemsize
    raw = int(preparer.adapter.points()["encoder.out"].shape[-1]) if "raw" in task.what else 0
    per_row = sum(raw if what == "raw" else width for what, _ in task.kinds()) * size + 16
    seconds = nbytes = 0.0
    clock = preparer.adapter.clock
    for row in clips.rows(sample):
        cost = preparer.cost(row)
        seconds += cost.seconds
        n = max(1, len(row.audios))
        each = cost.seconds / n
        nbytes += n * per_row * task.pool.rows(row.id, round(each / clock.token_s), each)
    scale = len(pending) / len(sample)
    return Estimate(len(pending), seconds * scale, round(nbytes * scale))


def _check_room(estimate: Estimate, path: Path, limit: int | None) -> None:
    free = shutil.disk_usage(path).free if limit is None else limit
    if estimate.nbytes > free:
        have = "are free" if limit is None else "are allowed"
        raise RunError(
            f"{path} would take about {_size(estimate.nbytes)} and {_size(free)} {have}; pool, ask for fewer layers, or name "
            "another disk (limit_bytes overrides this)",
            code="too_large",
            source="limit_bytes" if limit is not None else path,
        )


def _workers(device: str) -> int:
    """Processes that keep a GPU busy; on a CPU one, because the model has the cores; none where there is one core."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores - 1, 1 if device == "cpu" else 8)


def _budget(device: str) -> int:
    return 2048 if device == "cpu" else 8192


def _size(nbytes: float) -> str:
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while nbytes >= 1024 and len(units) > 1:
        nbytes /= 1024
        units.pop(0)
    return f"{nbytes:,.0f} B" if units[0] == "B" else f"{nbytes:,.1f} {units[0]}"
