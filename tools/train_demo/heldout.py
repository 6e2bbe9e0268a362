"""The held-out questions: 500 a task, fixed by seeds that were committed before the first training run.

Half of a task's questions play programs and drum kits that training hears (single notes at cells that it never plays), half
those that it never hears. Lengths go round "short" (0.6-3 s), "middle" (3-6 s) and "long" (6-12 s). Tasks on one source have
100 questions more on clips of 30.5-36 s ("windows": two windows for Music Flamingo, eight or nine chunks for MOSS-Music).
Nothing here may change once a model was trained; no number of training is chosen by looking at it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

import numpy as np

from .bank import Bank
from .questions import SINGLE, Asked, Scene, draw, least_s
from .scenes import Palette, Studio

SEED = 7_2026
N_QUESTIONS, N_WINDOWS = 500, 100
STRATA = {"short": (0.6, 3.0), "middle": (3.0, 6.0), "long": (6.0, 12.0)}
WINDOWS = (30.5, 36.0)
# Where a task's questions come from; the order of tasks is part of the seed.
KINDS: dict[str, tuple[str, ...]] = {
    "pitch_class": ("note",),
    "note": ("note",),
    "family": ("note", "note", "chord", "melody"),
    "chord": ("chord",),
    "quality": ("chord",),
    "drums": ("note", "chord", "melody", "tempo"),
    "higher": ("pair",),
    "tempo": ("tempo",),
    "onset": ("onset",),
    "direction": ("melody",),
    "same": ("pair",),
    "missing": ("stems",),
    "texture": ("note", "chord"),
    "highest": ("triple",),
}
TASKS = tuple(KINDS)


@dataclass(frozen=True, eq=False)
class Item:
    """One held-out question: the scene, which of its questions, whose programs, which lengths, its number."""

    task: str
    scene: Scene
    asked: Asked
    held_out_programs: bool
    stratum: str
    number: int


def item(bank: Bank, task: str, number: int, windows: bool = False) -> Item:
    """Question `number` of a task, the same at every call."""
    held_out = number % 2 == 1
    rng = np.random.default_rng([SEED, TASKS.index(task), int(windows), number])
    stratum = "windows" if windows else list(STRATA)[number // 2 % 3]
    low, high = WINDOWS if windows else STRATA[stratum]
    studio = Studio(bank, Palette(held_out, "any" if held_out else "new"), rng)
    wanted = ("yes", "no")[number // 6 % 2] if task in ("drums", "same") else None
    while True:
        kind = KINDS[task][int(rng.integers(len(KINDS[task])))]
        scene = draw(studio, kind, max(least_s(kind), float(rng.uniform(low, high))))
        for asked in scene.asked:
            if asked.task == task and wanted in (None, asked.answer):
                return Item(task, scene, asked, held_out, stratum, number)


def items(
    bank: Bank,
    tasks: tuple[str, ...] = TASKS,
    n: int = N_QUESTIONS,
    n_windows: int = N_WINDOWS,
    known: Container[tuple[str, bool, int]] = (),
) -> Iterator[Item]:
    """The first `n` questions of each task and the first `n_windows` on clips of two windows, tasks taking turns.

    Those in `known` (task, whether on two windows, number) are left out.
    """
    for number in range(max(n, n_windows)):
        for task in tasks:
            for windows, most in ((False, n), (True, n_windows if KINDS[task][0] in SINGLE else 0)):
                if number < most and (task, windows, number) not in known:
                    yield item(bank, task, number, windows)
