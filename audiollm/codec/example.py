"""The embedded codec: the real architecture at small widths with random weights.

It takes and gives codes and audio of the real shapes and rates, and what it decodes is noise: it is there to try every
call in a second, without a download. Made by `tools/make_tiny_codec.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import torch

from .audio import Audio
from .measures import (
    CodebookEnergy,
    CodebookUsage,
    PrefixDifference,
    codebook_energy,
    codebook_usage,
    prefix_difference,
)
from .model import Model

RANDOM = "The embedded codec has random weights: every call, shape and rate is real, what it decodes is noise."


@dataclass(frozen=True, eq=False, repr=False)
class CodecDemo:
    """What the codec's part of `audiollm demo` shows: a model, its codes decoded, and what the codes do."""

    model: Model
    codes: np.ndarray
    audio: Audio
    again: np.ndarray
    usage: CodebookUsage
    energy: CodebookEnergy
    difference: PrefixDifference

    @property
    def lines(self) -> tuple[str, ...]:
        """For a terminal, one line a result."""
        return (
            RANDOM,
            repr(self.model),
            f"codes {list(self.codes.shape)} -> {self.audio!r} -> codes {list(self.again.shape)}",
            repr(self.usage),
            repr(self.energy),
            repr(self.difference),
        )

    def __repr__(self) -> str:
        return "\n".join(self.lines)

    def _repr_html_(self) -> str:
        pairs = zip(self.difference.depths, self.difference.relative_rms, strict=True)
        rows = "".join(f"<tr><td>{depth}</td><td>{rms:.3f}</td></tr>" for depth, rms in pairs)
        return (
            f"<p><strong>{RANDOM}</strong></p>{self.model._repr_html_()}{self.audio._repr_html_()}"
            f"<table><tr><th>first codebooks</th><th>relative rms away from all</th></tr>{rows}</table>"
        )


def demo_folder() -> Path:
    """Where the embedded snapshot lies."""
    return Path(str(resources.files("audiollm.demo"))) / "codec"


def demo_model(device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> Model:
    """Load the embedded snapshot: 32 codebooks of 1024, 48 kHz stereo, RANDOM weights (its audio is noise)."""
    return Model.from_pretrained(demo_folder(), device=device, dtype=dtype)


def demo_codes() -> np.ndarray:
    """Two seconds of codes for it, int64 [25, 32]: the encoding of a gliding tone."""
    return np.load(demo_folder() / "codes.npy").astype(np.int64)


def run_demo() -> CodecDemo:
    """Decode the embedded codes, encode the result again, and measure: about a second on one core."""
    model, codes = demo_model(), demo_codes()
    audio = model.codes2speech.infer(codes, progress=False)
    return CodecDemo(
        model=model,
        codes=codes,
        audio=audio,
        again=model.speech2codes.infer(audio, progress=False),
        usage=codebook_usage(model, codes),
        energy=codebook_energy(model, codes),
        difference=prefix_difference(model, codes, depths=(1, 4, 12, 24), progress=False),
    )
