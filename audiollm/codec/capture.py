"""Hidden states of the decoder while it decodes.

Conventions: stages are counted 0 ... (the published modules "decoder.0", "decoder.2" ...), -1 is the last. Layer 0 is
what enters a stage's first block (after its input projection), layer k what block k-1 hands on; there is no final norm.
A row of a stage at rate r Hz stands for the 1/r seconds from its index / r. Nothing stays attached to the model: the
states are copied out of one run.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..errors import ArgumentError
from ..vendor.moss_audio_tokenizer import StageConfig
from .audio import Audio
from .codes import check_codes
from .decoding import STEP_FRAMES, decode
from .errors import CodecError

if TYPE_CHECKING:
    from .model import Model


@dataclass(frozen=True, eq=False, repr=False)
class Capture:
    """What a run showed.

    `latents` [T, latent_dim], the dequantized codes; `outputs[stage]` [rows, output_dim], before patching up;
    `layers[stage, layer]` [rows, d_model]; all float32 on the CPU. `audio` is what was decoded meanwhile.
    """

    audio: Audio
    latents: Tensor
    outputs: dict[int, Tensor]
    layers: dict[tuple[int, int], Tensor]
    config: tuple[StageConfig, ...]

    def times_s(self, stage: int) -> np.ndarray:
        """Start of every row of a stage in seconds, float64 [rows]. Raises: ArgumentError for another stage."""
        index = _stage_index(stage, self.config)
        if index not in self.outputs:
            raise ArgumentError(
                f"stage {stage} was not captured; {sorted(self.outputs)} were", code="bad_argument", source="stage"
            )
        return np.arange(len(self.outputs[index])) / self.config[index].rate

    def __repr__(self) -> str:
        outputs = ", ".join(f"{i}: {list(t.shape)}" for i, t in sorted(self.outputs.items()))
        layers = ", ".join(f"{s}.{k}: {list(t.shape)}" for (s, k), t in sorted(self.layers.items()))
        return f"Capture({self.audio.duration:.2f} s; outputs {outputs}; layers {layers or 'none'})"

    def _repr_html_(self) -> str:
        rows = [("latents", "", self.latents)]
        rows += [(self.config[i].name, "output", t) for i, t in sorted(self.outputs.items())]
        rows += [(self.config[s].name, f"layer {k}", t) for (s, k), t in sorted(self.layers.items())]
        cells = "".join(
            f"<tr><td>{html.escape(name)}</td><td>{what}</td><td>{list(t.shape)}</td><td>{float(t.square().mean().sqrt()):.4g}"
            "</td></tr>"
            for name, what, t in rows
        )
        return f"<table><tr><th>stage</th><th>what</th><th>shape</th><th>rms</th></tr>{cells}</table>"


def capture(
    model: Model,
    codes: object,
    stages: object,
    layers: object,
    num_codebooks: int | None,
    max_frames: int | None,
    progress: bool | None,
) -> Capture:
    """Decode and copy the states asked for; see `Model.capture`.

    Raises: CodesError, ArgumentError; CodecError when a state that was asked for never came by.
    """
    config = model.config.decoder
    wanted = sorted({_stage_index(stage, config) for stage in _listed(stages, range(len(config)), "stages")})
    states = {
        (stage, _layer_index(layer, config[stage])) for stage in wanted for layer in _listed(layers, (), "layers")
    }
    table = check_codes(codes, model.code_space, max_frames, num_codebooks)
    found: dict[tuple[int, int | str], list[Tensor]] = {(stage, "output"): [] for stage in (-1, *wanted)}
    found.update({key: [] for key in states})

    def tap(stage: int, layer: int | str, rows: Tensor) -> None:
        if (stage, layer) in found:
            found[stage, layer].append(rows.detach().to("cpu", torch.float32, copy=True))

    samples = np.concatenate(list(decode(model.decoder, table, STEP_FRAMES, progress, tap)))
    silent = [key for key, pieces in found.items() if not pieces]
    if silent:
        raise CodecError(
            f"nothing came by at {silent}; this is a fault of the codec", code="bad_argument", source="layers"
        )
    joined = {key: torch.cat(pieces) for key, pieces in found.items()}
    return Capture(
        audio=Audio(samples, model.config.sample_rate, model.config.channels),
        latents=joined[-1, "output"],
        outputs={stage: joined[stage, "output"] for stage in wanted},
        layers={key: joined[key] for key in sorted(states)},
        config=config,
    )


def _listed(value: object, default: Iterable, source: str) -> list:
    if value is None:
        return list(default)
    if isinstance(value, (int, np.integer, str)):
        return [value]
    if isinstance(value, Iterable):
        return list(value)
    raise ArgumentError(f"{source} is a {type(value).__name__}; pass numbers", code="bad_argument", source=source)


def _stage_index(stage: object, config: tuple[StageConfig, ...]) -> int:
    names = [c.name for c in config]
    if isinstance(stage, str):
        if stage in names:
            return names.index(stage)
        raise ArgumentError(f"no stage {stage!r}; there is {', '.join(names)}", code="bad_argument", source="stages")
    return _index(stage, len(config), "stages", f"0-{len(config) - 1}, the published {', '.join(names)}")


def _layer_index(layer: object, stage: StageConfig) -> int:
    return _index(layer, stage.layers + 1, "layers", f"0-{stage.layers} in {stage.name}")


def _index(value: object, count: int, source: str, there_is: str) -> int:
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or not -count <= value < count:  # type: ignore[operator]
        raise ArgumentError(f"{source} holds {value!r}; there is {there_is}", code="bad_argument", source=source)
    return int(value) % count  # type: ignore[call-overload]
