"""What flows through the Ray pipeline: a few dozen rows under the name of the shard that they become.

Kept apart from the engine because the processes that write need neither torch nor a model.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa

from .shards import is_written, write_shard


def unit_of(name: str, what: Any) -> pa.Table:
    """A unit as a table of one row: `name`, and what it carries as bytes."""
    data = pickle.dumps(what, protocol=5)
    return pa.table({"name": [name], "data": pa.array([data], pa.large_binary())})


def carried(unit: pa.Table) -> tuple[str, Any]:
    """The name of a unit and what it carries; only ever what another process of the same run has packed."""
    return unit["name"][0].as_py(), pickle.loads(unit["data"][0].as_buffer())


def write_unit(unit: pa.Table, folder: str, index: pa.Schema) -> pa.Table:
    """Write a unit as its shard, unless it is there: Ray does a unit again whose answer was lost.

    Returns a table of one row, `rows` and `failed`. Raises: RunError `disk_full`.
    """
    name, packed = carried(unit)
    if not is_written(Path(folder), name):
        write_shard(Path(folder), name, packed, index)
    return pa.table({"rows": [packed.rows], "failed": [packed.failed]})
