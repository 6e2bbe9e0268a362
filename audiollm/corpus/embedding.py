"""The model's part: a prepared batch -> what is stored of each row, with its line in the index."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..batch import PreparedBatch
from ..errors import AudioLLMError
from ..session import Session
from .clip import Failure, Heard
from .preparing import Preparer, Ready, for_session
from .task import DTYPES, Task

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Entry:
    """One row's tensors by their names in the shard, on the CPU, and its lines in the index."""

    id: str
    tensors: Mapping[str, torch.Tensor]
    lines: Sequence[Mapping[str, Any]]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def embed(session: Session, ready: Ready, task: Task, preparer: Preparer) -> list[Entry]:
    """Run the model on a prepared batch, once; a row that failed gives a line with its error.

    Where projected and contextual are both asked for, projected is layer 0 at the audio positions: the same numbers, and
    the audio tower runs once. A batch that does not fit the device is prepared again in halves; a single row that does
    not fit fails with `too_large`.
    """
    entries = [_failed(failure) for failure in ready.failures]
    if ready.batch is None:
        return entries
    try:
        return entries + _embedded(session, ready, task)
    except torch.OutOfMemoryError:
        pass  # what the failed call held is free only once its error is gone
    if session.device.type == "cuda":
        torch.cuda.empty_cache()
    rows = [heard.row for heard in ready.heard]
    _log.warning("a batch of %d rows does not fit %s", len(rows), session.device)
    if len(rows) == 1:
        message = f"the row alone does not fit the memory of {session.device}; send shorter audio, or fewer layers"
        return [*entries, _failed(Failure(rows[0], "too_large", message))]
    for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
        entries += embed(session, preparer.prepare(half), task, preparer)
    return entries


def _embedded(session: Session, ready: Ready, task: Task) -> list[Entry]:
    assert ready.batch is not None
    batch = for_session(ready.batch, session)
    slots = list(zip(batch.slots, batch.timeline, _states(session, batch, task), strict=True))
    entries = []
    for b, heard in enumerate(ready.heard):
        mine = [
            (slot.audio_index, line.token_intervals(), found) for slot, line, found in slots if slot.sample_index == b
        ]
        try:
            entries.append(_entry(heard, mine, task))
        except AudioLLMError as error:
            entries.append(_failed(Failure.of(heard.row, error)))
    return entries


def _states(session: Session, batch: PreparedBatch, task: Task) -> list[dict[tuple[str, int | None], torch.Tensor]]:
    """For each source, its states [U, D] by what and layer."""
    found: list[dict[tuple[str, int | None], torch.Tensor]] = [{} for _ in batch.slots]
    contextual = "contextual" in task.what
    if contextual:
        with_projected = (0,) if "projected" in task.what else ()
        asked = dict.fromkeys((*with_projected, *task.layers))
        for mine, states in zip(found, session.extract_contextual_embeddings(batch, tuple(asked)), strict=True):
            if with_projected:
                mine["projected", None] = states[0]
            mine |= {("contextual", layer): states[layer] for layer in task.layers}
    if "raw" in task.what or ("projected" in task.what and not contextual):
        for mine, embedding in zip(found, session.extract_audio_embeddings(batch), strict=True):
            mine["raw", None] = embedding.raw
            mine.setdefault(("projected", None), embedding.projected)
    return found


def _entry(
    heard: Heard, sources: Sequence[tuple[int, np.ndarray, Mapping[tuple[str, int | None], torch.Tensor]]], task: Task
) -> Entry:
    tensors: dict[str, torch.Tensor] = {}
    lines = []
    for k, seconds, states in sources:
        groups = task.pool.groups(heard.row.id, seconds)
        times = f"{heard.row.id}:{k}:seconds"
        tensors[times] = torch.from_numpy(np.ascontiguousarray(groups.seconds))
        for what, layer in task.kinds():
            key = f"{heard.row.id}:{k}:{what}" + ("" if layer is None else f".{layer}")
            tensors[key] = _stored(groups.apply(states[what, layer]), DTYPES[task.dtype])
            lines.append(
                _line(heard.row.id, heard.row.digest, heard.row.labels)
                | {
                    "source": k,
                    "name": heard.names[k],
                    "what": what,
                    "layer": layer,
                    "key": key,
                    "seconds_key": times,
                    "shape": list(tensors[key].shape),
                    "dtype": task.dtype,
                    "offset_s": heard.offsets_s[k],
                    "duration_s": heard.durations_s[k],
                    "tokens": len(seconds),
                    "segments": None if groups.names is None else list(groups.names),
                    "warning": heard.warning,
                }
            )
    return Entry(heard.row.id, tensors, lines)


def _stored(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of its own on the CPU: views of one batch must not be kept, nor written, as a whole."""
    return states.detach().to("cpu", dtype, copy=True).contiguous()


def _failed(failure: Failure) -> Entry:
    row = failure.row
    return Entry(row.id, {}, [_line(row.id, row.digest, row.labels) | {"code": failure.code, "error": failure.message}])


def _line(clip: str, digest: str, labels: Mapping[str, Any]) -> dict[str, Any]:
    return {**labels, "id": clip, "row": digest}
