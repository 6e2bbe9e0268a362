"""Both directions of the codec, whole or in pieces that carry their state.

Decode: codes -> quantizer -> for each stage: transformer, then one row becomes `patch` rows -> interleaved samples.
Encode: interleaved samples -> for each stage: `patch` rows become one, then transformer -> quantizer.
Patching up turns [T, C] into [T*p, C/p]: channel c*p+j of row t is channel c of row t*p+j; patching down reverses it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .config import CodecConfig
from .quantizer import QuantizerWeights, SearchWeights, dequantize, quantize
from .stage import StageState, StageWeights, run_stage

# Rows that pass through a stage at once: enough for the matrix products, small enough to keep memory flat.
ROWS_PER_STEP = 2048

# Called with (stage index, layer or "output", rows).
CodecTap = Callable[[int, int | str, Tensor], None]
# Called with (stage index, rows done).
Tick = Callable[[int, int], None]


@dataclass(frozen=True)
class DecoderWeights:
    """Codes to audio."""

    config: CodecConfig
    quantizer: QuantizerWeights
    stages: tuple[StageWeights, ...]


@dataclass(frozen=True)
class EncoderWeights:
    """Audio to codes; `quantizer` is shared with the decoder."""

    config: CodecConfig
    quantizer: QuantizerWeights
    search: SearchWeights
    stages: tuple[StageWeights, ...]


class CodecState:
    """What a run remembers between pieces: one StageState a stage."""

    def __init__(self, stages: tuple[StageWeights, ...]) -> None:
        self.stages = [StageState() for _ in stages]

    @property
    def nbytes(self) -> int:
        """Bytes held (177 MB for v2 in float32, once every window is full)."""
        return sum(state.nbytes for state in self.stages)


def decode_step(
    weights: DecoderWeights,
    codes: Tensor,
    state: CodecState,
    tap: CodecTap | None = None,
    tick: Tick | None = None,
) -> Tensor:
    """Codes [T, n], the frames that follow those `state` has seen -> interleaved samples [T * samples_per_frame]."""
    rows = dequantize(weights.quantizer, codes)
    if tap is not None:
        tap(-1, "output", rows)
    for i, stage in enumerate(weights.stages):
        rows = _through(i, stage, rows, state.stages[i], tap, tick)
        rows = patch_up(rows, stage.config.patch)
    return rows.reshape(-1)


def encode_step(
    weights: EncoderWeights,
    samples: Tensor,
    state: CodecState,
    tap: CodecTap | None = None,
    tick: Tick | None = None,
) -> Tensor:
    """Interleaved samples [T * samples_per_frame] that follow those `state` has seen -> codes [T, n_codebooks]."""
    rows = samples.reshape(-1, 1)
    for i, stage in enumerate(weights.stages):
        rows = patch_down(rows, stage.config.patch)
        rows = _through(i, stage, rows, state.stages[i], tap, tick)
    return quantize(weights.quantizer, weights.search, rows)


def patch_up(rows: Tensor, patch: int) -> Tensor:
    """[T, C] -> [T * patch, C / patch]."""
    count, width = rows.shape
    return rows.view(count, width // patch, patch).transpose(1, 2).reshape(count * patch, width // patch)


def patch_down(rows: Tensor, patch: int) -> Tensor:
    """[T * patch, C] -> [T, C * patch]."""
    count, width = rows.shape
    return rows.view(count // patch, patch, width).transpose(1, 2).reshape(count // patch, width * patch)


def _through(
    index: int, stage: StageWeights, rows: Tensor, state: StageState, tap: CodecTap | None, tick: Tick | None
) -> Tensor:
    """All rows of one stage, ROWS_PER_STEP at a time."""
    result = rows.new_empty(len(rows), stage.config.output_dim)
    for start in range(0, len(rows), ROWS_PER_STEP):
        part = rows[start : start + ROWS_PER_STEP]
        stage_tap = None if tap is None else _bound(tap, index)
        out = run_stage(stage, part, state, stage_tap)
        result[start : start + len(part)] = out
        if tap is not None:
            tap(index, "output", out)
        if tick is not None:
            tick(index, len(part))
    return result


def _bound(tap: CodecTap, index: int) -> Callable[[int, Tensor], None]:
    def stage_tap(layer: int, rows: Tensor) -> None:
        tap(index, layer, rows)

    return stage_tap
