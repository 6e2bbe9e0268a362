"""What codes and their codebooks do: usage, energy, and what each depth of the residual adds.

Conventions: codes are checked as `codes2speech.infer` checks them; T frames, Q codebooks, ids 0 ... size - 1; an absent
code counts for nothing. Energies are mean squares over latent channels, audio differences are relative rms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from ..errors import ArgumentError
from .codes import MAX_FRAMES, check_codes, check_prefix
from .decoding import STEP_FRAMES, decode

if TYPE_CHECKING:
    from .model import Model


@dataclass(frozen=True, eq=False, repr=False)
class CodebookUsage:
    """How often each entry of each codebook occurs.

    `counts` int64 [Q, size]; `absent` int64 [Q], frames without a code; `used` int64 [Q], entries that occur at all;
    `entropy_bits` float64 [Q], of the entries that occur (log2(size) bits would be all equally often).
    """

    counts: np.ndarray
    absent: np.ndarray
    used: np.ndarray
    entropy_bits: np.ndarray

    def __repr__(self) -> str:
        codebooks, size = self.counts.shape
        return (
            f"CodebookUsage({codebooks} codebooks of {size}; {self.used.min()}-{self.used.max()} entries used, "
            f"{self.entropy_bits.min():.2f}-{self.entropy_bits.max():.2f} bits)"
        )


@dataclass(frozen=True, eq=False, repr=False)
class CodebookEnergy:
    """How much each codebook adds to the latents.

    `energy` float32 [T, Q], the mean square over latent channels of what codebook q adds at frame t (its projection's
    bias included); `times_s` float64 [T], the start of each frame in seconds.
    """

    energy: np.ndarray
    times_s: np.ndarray

    @property
    def share(self) -> np.ndarray:
        """Each codebook's part of the summed energy over the clip, float64 [Q]; the parts add up to 1."""
        total = self.energy.sum(axis=0, dtype=np.float64)
        return total / total.sum() if total.sum() else total

    def __repr__(self) -> str:
        frames, codebooks = self.energy.shape
        return f"CodebookEnergy({frames} frames, {codebooks} codebooks; share of the first {self.share[0]:.3f})"


@dataclass(frozen=True, eq=False, repr=False)
class PrefixDifference:
    """How far the audio of a prefix of the codebooks is from the audio of all of them.

    `depths` (D of them); `relative_rms` float64 [D], rms of the difference over rms of the full decode;
    `frame_rms` float64 [D, T], rms of the difference frame by frame, at full scale 1.0; `times_s` float64 [T].
    """

    depths: tuple[int, ...]
    relative_rms: np.ndarray
    frame_rms: np.ndarray
    times_s: np.ndarray

    def __repr__(self) -> str:
        pairs = ", ".join(f"{depth}: {rms:.3g}" for depth, rms in zip(self.depths, self.relative_rms, strict=True))
        return f"PrefixDifference(relative rms {pairs})"


def codebook_usage(model: Model, codes: object, *, max_frames: int | None = None) -> CodebookUsage:
    """Count the entries of a clip's codes. Raises: CodesError."""
    space = model.code_space
    table = check_codes(codes, space, max_frames)
    counts = np.zeros((space.n_codebooks, space.codebook_size + 1), dtype=np.int64)
    for q in range(table.shape[1]):
        counts[q] = np.bincount(table[:, q], minlength=space.codebook_size + 1)
    counts[table.shape[1] :, -1] = len(table)
    absent, counts = counts[:, -1].copy(), counts[:, :-1].copy()
    part = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    entropy = -np.where(part > 0, part * np.log2(np.where(part > 0, part, 1.0)), 0.0).sum(axis=1)
    return CodebookUsage(counts, absent, (counts > 0).sum(axis=1), np.abs(entropy))


def codebook_energy(model: Model, codes: object, *, max_frames: int | None = None) -> CodebookEnergy:
    """Energy that each codebook adds to the latents, frame by frame. Raises: CodesError."""
    space, quantizer = model.code_space, model.decoder.quantizer
    table = check_codes(codes, space, max_frames)
    energy = np.zeros((len(table), space.n_codebooks), dtype=np.float32)
    with torch.inference_mode():
        ids = torch.from_numpy(table).to(quantizer.table.device)
        for q in range(table.shape[1]):
            added = functional.linear(quantizer.table[ids[:, q] + q * (quantizer.size + 1)], quantizer.output_weight)
            energy[:, q] = added.float().square().mean(dim=1).cpu().numpy()
    return CodebookEnergy(energy, np.arange(len(table)) / model.config.frame_rate)


def prefix_difference(
    model: Model,
    codes: object,
    depths: Sequence[int] = (1, 2, 4, 8, 12, 16, 24),
    *,
    max_frames: int | None = MAX_FRAMES,
    progress: bool | None = None,
) -> PrefixDifference:
    """Decode at several depths and compare each with all codebooks; costs one decode per depth and one more.

    Raises: CodesError; ArgumentError for no depth.
    """
    wanted = tuple(check_prefix(depth, model.code_space) for depth in depths)
    if not wanted:
        raise ArgumentError("depths is empty", code="bad_argument", source="depths")
    table = check_codes(codes, model.code_space, max_frames)
    size = model.config.samples_per_frame
    squares = np.zeros((len(wanted), len(table)))
    full = np.zeros(len(table))
    runs = [decode(model.decoder, table, STEP_FRAMES, progress)]
    runs += [decode(model.decoder, np.ascontiguousarray(table[:, :depth]), STEP_FRAMES, False) for depth in wanted]
    at = 0
    for whole, *parts in zip(*runs, strict=True):
        frames = slice(at, at + len(whole) // size)
        full[frames] = np.square(whole.reshape(-1, size), dtype=np.float64).mean(axis=1)
        for d, part in enumerate(parts):
            squares[d, frames] = np.square((part - whole).reshape(-1, size), dtype=np.float64).mean(axis=1)
        at = frames.stop
    scale = full.mean() or 1.0
    times = np.arange(len(table)) / model.config.frame_rate
    return PrefixDifference(wanted, np.sqrt(squares.mean(axis=1) / scale), np.sqrt(squares), times)
