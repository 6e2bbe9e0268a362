"""What one step learns from: a few groups of scenes of like length, drawn by the step's number.

A group is run at once, so its clips should be equally long: those under 4 s are exactly so (MOSS-Music then runs its tower
once), longer ones within 15 %. Lengths are log-uniform; for the first half they end at 3.4 s, since many short clips
a step are what tempo, direction and onset are learned from, then at 6 s, then at 12 s, and some at 36 s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .bank import Bank
from .questions import MULTIPLE, SINGLE, Scene, draw, least_s, text_scene
from .scenes import Palette, Studio

GROUP_S = 26.0  # seconds of audio in a group
QUESTIONS_S = 1.0  # what a clip's questions cost, in seconds of audio
SHARES_FIRST = {"note": 0.45, "chord": 0.40, "melody": 0.05, "tempo": 0.0, "onset": 0.10}
SHARES = {"note": 0.14, "chord": 0.22, "melody": 0.22, "tempo": 0.19, "onset": 0.23}
SHARES_MULTIPLE = {"pair": 0.55, "stems": 0.27, "triple": 0.18}


@dataclass(frozen=True)
class Phase:
    """What is drawn at some part (0-1) of the training."""

    shares: dict[str, float]
    shortest_s: float
    longest_s: float
    share_multiple: float
    share_windows: float
    n_groups: int


def phase_at(part: float) -> Phase:
    """Notes and chords, then every kind on short clips until what takes a whole clip is learned too, then all lengths."""
    if part < 0.08:
        return Phase(SHARES_FIRST, 0.6, 3.0, 0.0, 0.0, 2)
    if part < 0.55:
        return Phase(SHARES, 1.4, 3.4, 0.10, 0.0, 3)
    if part < 0.75:
        return Phase(SHARES, 0.8, 6.0, 0.22, 0.0, 2)
    return Phase(SHARES, 0.8, 12.0, 0.25, 0.05, 2)


def groups(bank: Bank, seed: int, step: int, part: float) -> list[list[Scene]]:
    """The groups of one step, the same for the same arguments."""
    rng = np.random.default_rng([seed, step])
    studio = Studio(bank, Palette(), rng)
    phase = phase_at(part)
    made = [_group(studio, phase) for _ in range(phase.n_groups)]
    if step % 4 == 0:
        made[0] += [text_scene(studio) for _ in range(2)]
    return made


def _group(studio: Studio, phase: Phase) -> list[Scene]:
    rng = studio.rng
    multiple = studio.chance(phase.share_multiple)
    if not multiple and studio.chance(phase.share_windows):
        length = studio.between(12.0, 36.0)
    else:
        shortest = 0.6 if studio.chance(0.15) else phase.shortest_s
        length = float(np.exp(rng.uniform(np.log(shortest), np.log(phase.longest_s))))
    shares = SHARES_MULTIPLE if multiple else phase.shares
    kinds = [kind for kind in (MULTIPLE if multiple else SINGLE) if least_s(kind) <= length]
    weights = np.array([shares[kind] for kind in kinds])
    if length > 12:
        weights = np.where(np.array(kinds) == "onset", 2 * weights, weights)
    sources = 2.2 if multiple else 1.0
    n = int(np.clip(GROUP_S / (length * sources + QUESTIONS_S), 1, 32))
    scenes = []
    for _ in range(n):
        kind = str(rng.choice(kinds, p=weights / weights.sum()))
        this = length if length < 4 else max(4.0, length * studio.between(0.85, 1.0))
        scenes.append(_shuffled(draw(studio, kind, this), rng))
    return scenes


def _shuffled(scene: Scene, rng: np.random.Generator) -> Scene:
    """The scene with its questions in another order, since only the first four are asked."""
    order = rng.permutation(len(scene.asked))
    return Scene(scene.kind, scene.clips, scene.opening, tuple(scene.asked[i] for i in order))
