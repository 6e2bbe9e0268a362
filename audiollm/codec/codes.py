"""Codes as callers hold them -> a checked [T, n_codebooks] table.

Conventions: frame-major, one row per frame (12.5 a second for v2), column k is codebook k; an id is a whole number in
0 ... codebook_size - 1, or the absent id where the model declares one. Nothing is clamped, rounded or wrapped: what is
not such a table raises CodesError naming frame and codebook.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from .errors import CodesError

MAX_FRAMES = 4096


@dataclass(frozen=True)
class CodeSpace:
    """What ids a model takes: `n_codebooks`, `codebook_size`, and the `absent` id or None."""

    n_codebooks: int
    codebook_size: int
    absent: int | None


def check_codes(
    codes: object, space: CodeSpace, max_frames: int | None = MAX_FRAMES, num_codebooks: int | None = None
) -> np.ndarray:
    """Rows, a flat list, a numpy array or a torch tensor -> int64 [T, n], n <= n_codebooks.

    Absent codes come back as `space.codebook_size`, whatever id the model declares for them. With `num_codebooks` only
    the first that many columns are kept (all are checked). Rows narrower than the model are filled with the absent id
    where the model declares one; a 1-D sequence is frame-major with n_codebooks ids a frame.

    Raises: CodesError `bad_codes` or `too_many_frames`.
    """
    table = _as_table(codes, space, max_frames)
    _check_range(table, space)
    if space.absent is not None:
        table = np.where(table == space.absent, space.codebook_size, table)
    keep = space.n_codebooks
    if num_codebooks is not None:
        keep = check_prefix(num_codebooks, space)
    if table.shape[1] < keep:
        if num_codebooks is not None:
            _fail(f"num_codebooks is {num_codebooks}, but the rows hold {table.shape[1]} codes")
        if space.absent is None:
            _fail(
                f"frame 0 has {table.shape[1]} codes, this model takes {space.n_codebooks} and declares no absent id; "
                f"pass whole rows, or num_codebooks={table.shape[1]} to decode that prefix"
            )
    _warn_if_sideways(table, space)
    return np.ascontiguousarray(table[:, :keep])


def check_prefix(num_codebooks: object, space: CodeSpace) -> int:
    """A prefix depth, 1 ... n_codebooks. Raises: CodesError `bad_codes`."""
    whole = isinstance(num_codebooks, (int, np.integer)) and not isinstance(num_codebooks, bool)
    if not whole or not 1 <= num_codebooks <= space.n_codebooks:  # type: ignore[operator]
        _fail(
            f"num_codebooks is {num_codebooks!r}, not a whole number in 1-{space.n_codebooks}",
            source="num_codebooks",
        )
    return int(num_codebooks)  # type: ignore[call-overload]


def _as_table(codes: object, space: CodeSpace, max_frames: int | None) -> np.ndarray:
    if isinstance(codes, (str, bytes, dict, set, frozenset)) or codes is None:
        _fail(f"codes is a {type(codes).__name__}; pass rows of {space.n_codebooks} ids, one row per frame")
    if hasattr(codes, "detach") and hasattr(codes, "cpu"):  # a torch tensor, from any device
        codes = codes.detach().cpu().numpy() if _numpy_can_hold(codes) else codes.detach().cpu().float().numpy()
    if isinstance(codes, np.ndarray) and codes.dtype != object:
        return _table_of_array(codes, space, max_frames)
    try:
        rows = list(codes)  # type: ignore[call-overload]
    except TypeError:
        _fail(f"codes is a {type(codes).__name__}; pass rows of {space.n_codebooks} ids, one row per frame")
    if not rows:
        _fail("codes is empty; at least one frame is needed")
    if not any(_is_row(row) for row in rows):
        return _table_of_array(_ids(rows, None), space, max_frames)
    _check_frames(len(rows), max_frames)
    for frame, row in enumerate(rows):
        if not _is_row(row):
            _fail(f"frame {frame} is a {type(row).__name__}, the others are rows; pass one row per frame")
    return _rows_of_lists([_ids(list(row), frame) for frame, row in enumerate(rows)], space)


def _table_of_array(array: np.ndarray, space: CodeSpace, max_frames: int | None) -> np.ndarray:
    """1-D (flat) or 2-D array of any real dtype -> int64 [T, width]."""
    if array.ndim not in (1, 2):
        _fail(f"codes has shape {array.shape}; pass [frames, {space.n_codebooks}], one clip at a time")
    if array.size == 0:
        _fail(f"codes has shape {array.shape}; at least one frame is needed")
    n = space.n_codebooks
    if array.ndim == 1:
        if array.size % n:
            _fail(
                f"{array.size} is not a multiple of {n}: a flat list holds {n} codes per frame, frame after frame; "
                "pass rows for fewer codebooks"
            )
        array = array.reshape(-1, n)
    _check_frames(len(array), max_frames)
    if array.shape[1] > n:
        hint = "; this looks codebook-major, pass codes.T" if len(array) == n else ""
        _fail(f"codes has shape {array.shape}: rows of {array.shape[1]}, this model takes {n} codebooks{hint}")
    if array.dtype.kind not in "iuf":
        _fail(f"codes has dtype {array.dtype}; ids are whole numbers")
    if array.dtype.kind == "f":
        bad = np.argwhere(~np.isfinite(array) | (array != np.trunc(array)) | (np.abs(array) > 2**53))
        if len(bad):
            frame, codebook = bad[0]
            _fail(f"frame {frame}, codebook {codebook}: {array[frame, codebook]} is not a whole number")
    if array.dtype.kind == "u" and array.dtype.itemsize == 8:
        array = np.minimum(array, np.uint64(2**62))  # stays out of range, and fits int64
    return array.astype(np.int64)


def _rows_of_lists(rows: Sequence[np.ndarray], space: CodeSpace) -> np.ndarray:
    """Rows that may be narrow or ragged -> [T, widest], filled with the absent id."""
    widths = [len(row) for row in rows]
    n = space.n_codebooks
    for frame, width in enumerate(widths):
        if width == 0:
            _fail(f"frame {frame} is empty; a frame has {n} codes")
        if width > n:
            hint = "; this looks codebook-major, pass one row per frame" if len(rows) == n else ""
            _fail(f"frame {frame} has {width} codes, this model takes {n} codebooks{hint}")
    widest = max(widths)
    if min(widths) < widest and space.absent is None:
        frame = next(i for i, width in enumerate(widths) if width < widest)
        _fail(
            f"frame {frame} has {widths[frame]} codes, others have {widest}; this model declares no absent id to fill "
            "short rows with"
        )
    table = np.full((len(rows), widest), -1 if space.absent is None else space.absent, dtype=np.int64)
    for frame, row in enumerate(rows):
        table[frame, : len(row)] = _table_of_row(row, frame)
    return table


def _table_of_row(row: np.ndarray, frame: int) -> np.ndarray:
    if row.dtype.kind == "f":
        bad = np.flatnonzero(~np.isfinite(row) | (row != np.trunc(row)) | (np.abs(row) > 2**53))
        if len(bad):
            _fail(f"frame {frame}, codebook {bad[0]}: {row[bad[0]]} is not a whole number")
    return row.astype(np.int64)


def _ids(values: list, frame: int | None) -> np.ndarray:
    """Python or numpy numbers -> an int64 or float64 array; everything else raises. `frame` None: a flat list."""
    for k, value in enumerate(values):
        number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, (bool, np.bool_))
        scalar = not number and getattr(value, "ndim", None) == 0 and hasattr(value, "item")
        if scalar:  # a 0-d tensor or array
            values[k] = value = value.item()
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number:
            where = f"codes[{k}]" if frame is None else f"frame {frame}, codebook {k}"
            _fail(f"{where} is {value!r:.40}, a {type(value).__name__}; ids are whole numbers")
        if isinstance(value, int) and abs(value) > 2**62:
            values[k] = 2**62 if value > 0 else -(2**62)  # stays out of range, and fits int64
    kind = np.float64 if any(isinstance(value, (float, np.floating)) for value in values) else np.int64
    return np.array(values, dtype=kind)


def _check_range(table: np.ndarray, space: CodeSpace) -> None:
    legal = (table >= 0) & (table < space.codebook_size)
    if space.absent is not None:
        legal |= table == space.absent
    if not legal.all():
        frame, codebook = np.argwhere(~legal)[0]
        absent = "" if space.absent is None else f" (or {space.absent} for an absent code)"
        _fail(
            f"frame {frame}, codebook {codebook}: id {table[frame, codebook]} is outside "
            f"0-{space.codebook_size - 1}{absent}; {int((~legal).sum())} of {table.size} ids are"
        )


def check_frames(frames: int, max_frames: int | None) -> None:
    """Raises: CodesError `too_many_frames`, or `bad_codes` for a ceiling that is none."""
    _check_frames(frames, max_frames)


def _check_frames(frames: int, max_frames: int | None) -> None:
    if max_frames is None:
        return
    if isinstance(max_frames, bool) or not isinstance(max_frames, (int, np.integer)) or max_frames < 1:
        _fail(
            f"max_frames is {max_frames!r}; pass a whole number of frames, or None for no ceiling", source="max_frames"
        )
    if frames > max_frames:
        raise CodesError(
            f"{frames} frames are more than the ceiling of {max_frames}; pass max_frames={frames}, or None for no ceiling",
            code="too_many_frames",
            source="codes",
        )


def _warn_if_sideways(table: np.ndarray, space: CodeSpace) -> None:
    """As many rows as the model has codebooks, and narrow ones: probably [codebooks, frames]."""
    if table.shape[1] < space.n_codebooks == len(table):
        warnings.warn(
            f"codes has {len(table)} rows of {table.shape[1]}: it looks codebook-major and is read frame-major, as "
            f"{len(table)} frames of the first {table.shape[1]} codebooks; pass codes.T if that is not meant",
            UserWarning,
            stacklevel=4,
        )


def _is_row(value: object) -> bool:
    if isinstance(value, (str, bytes, dict, set, frozenset)):
        return False
    if hasattr(value, "ndim"):
        return value.ndim > 0
    return hasattr(value, "__iter__")


def _numpy_can_hold(tensor: object) -> bool:
    return "bfloat16" not in str(tensor.dtype)  # type: ignore[attr-defined]


def _fail(message: str, source: str = "codes") -> NoReturn:
    raise CodesError(message, code="bad_codes", source=source)
