"""What one step learns from: a few groups of scenes of like length, drawn by the step's number.

A group is run at once, so its clips should be equally long: those under 4 s are exactly so (MOSS-Music then runs its tower
once), longer ones within 15 %. Lengths are log-uniform; at first they end at 3 s, then at 6 s, then at 12 s, and some
at 36 s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .bank import Bank
from .questions import MULTIPLE, SINGLE, Scene, draw, least_s, text_scene
from .scenes import Palette, Studio

GROUP_S = 26.0  # seconds of audio in a group
WIDE_AGAIN = 0.88  # the part of the training from which lengths are wide again
QUESTIONS_S = 1.0  # what a clip's questions cost, in seconds of audio
# Notes and chords are learned first; what takes a whole clip needs more examples from then on.
SHARES_FIRST = {"note": 0.30, "chord": 0.26, "melody": 0.13, "tempo": 0.11, "onset": 0.20}
SHARES_WHOLE = {"note": 0.05, "chord": 0.12, "melody": 0.28, "tempo": 0.27, "onset": 0.28}
SHARES = {"note": 0.14, "chord": 0.20, "melody": 0.25, "tempo": 0.18, "onset": 0.23}
SHARES_MULTIPLE = {"pair": 0.55, "stems": 0.27, "triple": 0.18}


@dataclass(frozen=True)
class Phase:
    """What is drawn at some part (0-1) of the training."""

    shares: dict[str, float]
    shortest_s: float
    longest_s: float
    share_multiple: float
    share_windows: float


def phase_at(part: float) -> Phase:
    """Short clips first, then all lengths."""
    if part < 0.10:
        return Phase(SHARES_FIRST, 0.6, 3.0, 0.0, 0.0)
    if part < 0.25:
        return Phase(SHARES_FIRST, 0.6, 6.0, 0.15, 0.0)
    if part < 0.47:
        return Phase(SHARES_FIRST, 0.6, 12.0, 0.27, 0.0 if part < 0.35 else 0.05)
    if part < 0.62:
        return Phase(SHARES, 1.2, 12.0, 0.22, 0.05)
    if part < WIDE_AGAIN:
        return Phase(SHARES_WHOLE, 1.4, 3.4, 0.08, 0.0)
    return Phase(SHARES, 0.8, 12.0, 0.22, 0.05)


def groups(bank: Bank, seed: int, step: int, part: float) -> list[list[Scene]]:
    """The groups of one step, the same for the same arguments."""
    rng = np.random.default_rng([seed, step])
    studio = Studio(bank, Palette(), rng)
    n_groups = 3 if 0.62 <= part < WIDE_AGAIN else 2
    made = [_group(studio, phase_at(part)) for _ in range(n_groups)]
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
