"""Runs of the codec: codes to samples and back, whole or piece by piece.

Every run works in steps of at most `STEP_FRAMES` frames and carries the windows of all stages from one to the next, so
memory is flat in the length and the cut makes no difference past float noise. A run owns its state; the weights are
never written to, so an interrupted run leaves the model as it was.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import TracebackType

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..vendor.moss_audio_tokenizer import (
    CodecState,
    DecoderWeights,
    EncoderWeights,
    StageConfig,
    decode_step,
    encode_step,
)
from ..vendor.moss_audio_tokenizer.codec import CodecTap, Tick

STEP_FRAMES = 512


def decode(
    weights: DecoderWeights,
    codes: np.ndarray,
    step_frames: int,
    progress: bool | None,
    tap: CodecTap | None = None,
) -> Iterator[np.ndarray]:
    """Checked codes [T, n] -> interleaved float32 samples, `step_frames` frames at a time."""
    state = CodecState(weights.stages)
    stages = tuple(stage.config for stage in weights.stages)
    with Progress("decode", len(codes), len(codes) / weights.config.frame_rate, stages, progress) as bar:
        for start in range(0, len(codes), step_frames):
            yield decode_piece(weights, codes[start : start + step_frames], state, tap, bar.tick)


def decode_piece(
    weights: DecoderWeights,
    codes: np.ndarray,
    state: CodecState,
    tap: CodecTap | None = None,
    tick: Tick | None = None,
) -> np.ndarray:
    """The frames that follow those `state` has seen -> interleaved float32 samples."""
    with torch.inference_mode():
        ids = torch.from_numpy(codes).to(weights.quantizer.table.device)
        return _to_numpy(decode_step(weights, ids, state, tap, tick))


def encode(
    weights: EncoderWeights, samples: np.ndarray, step_frames: int, progress: bool | None, tap: CodecTap | None = None
) -> np.ndarray:
    """Interleaved samples of whole frames [T * samples_per_frame] -> codes int64 [T, n_codebooks]."""
    size = weights.config.samples_per_frame
    frames = len(samples) // size
    table = weights.quantizer.table
    state = CodecState(weights.stages)
    stages = tuple(stage.config for stage in weights.stages)
    codes = np.empty((frames, weights.quantizer.n_codebooks), dtype=np.int64)
    with (
        Progress("encode", frames, frames / weights.config.frame_rate, stages, progress) as bar,
        torch.inference_mode(),
    ):
        for start in range(0, frames, step_frames):
            stop = min(start + step_frames, frames)
            piece = torch.from_numpy(samples[start * size : stop * size]).to(table.device, table.dtype)
            codes[start:stop] = encode_step(weights, piece, state, tap, bar.tick).cpu().numpy()
    return codes


def _to_numpy(samples: Tensor) -> np.ndarray:
    return samples.to("cpu", torch.float32).numpy()


class Progress:
    """A bar in seconds of audio, weighed by what each stage costs; silent when not a terminal or notebook.

    `shown` None decides by itself, True and False insist.
    """

    def __init__(
        self, what: str, frames: int, seconds: float, stages: tuple[StageConfig, ...], shown: bool | None
    ) -> None:
        costs = [stage.layers * (4 * stage.d_model**2 + 2 * stage.d_model * stage.ff) for stage in stages]
        total = sum(cost * stage.rate for cost, stage in zip(costs, stages, strict=True))
        self._per_row = [cost / total for cost in costs]
        self._what, self._seconds = what, seconds
        self._disable = not shown if shown is not None else not (sys.stderr.isatty() or _in_notebook())

    def __enter__(self) -> Progress:
        self._bar = tqdm(
            total=round(self._seconds, 2),
            desc=self._what,
            unit="s",
            disable=self._disable,
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {n:.1f}/{total:.1f} s of audio [{elapsed}<{remaining}]",
            leave=False,
        )
        return self

    def tick(self, stage: int, rows: int) -> None:
        """`rows` more rows have passed a stage."""
        self._bar.update(rows * self._per_row[stage])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()


def _in_notebook() -> bool:
    """Whether this process is a Jupyter kernel; that its package was imported does not make it one."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return hasattr(shell, "kernel")
