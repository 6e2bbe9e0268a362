"""The held-out questions through the public API: `load_model` on the exported folder, greedy `session.generate`.

Answers go to a file, one JSON line each, so a run that was stopped goes on, and every figure of the card can be counted again.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from audiollm import load_model

from .bank import Bank
from .heldout import N_QUESTIONS, N_WINDOWS, TASKS, Item, items
from .prompts import request
from .questions import SINGLE, Asked, Scene, is_right

BATCH = 12
MAX_NEW_TOKENS = 16
# What issue and card ask for: least shares of right answers on train programs and on held-out programs.
TARGETS = {
    "pitch_class": (0.93, 0.93), "note": (0.90, 0.85), "family": (0.93, 0.75), "chord": (0.90, 0.88),
    "quality": (0.90, 0.88), "drums": (0.98, 0.97), "higher": (0.95, 0.88), "tempo": (0.93, 0.90),
    "onset": (0.93, 0.90), "direction": (0.95, 0.93),
}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """One held-out question as it was answered."""

    task: str
    stratum: str
    held_out_programs: bool
    number: int
    question: str
    answer: str
    said: str
    right: bool


def evaluate(
    folder: Path,
    bank: Bank,
    out: Path,
    tasks: tuple[str, ...] = TASKS,
    n: int = N_QUESTIONS,
    n_windows: int = N_WINDOWS,
) -> list[Answer]:
    """Answer the held-out questions that `out` does not hold yet; all answers."""
    session = load_model(folder, device="cpu", dtype=torch.float32)
    done = read_answers(out)
    known = {(a.task, a.stratum == "windows", a.number) for a in done}
    begin, count = time.perf_counter(), 0
    with out.open("a", encoding="utf-8") as file:
        for batch in _batches(items(bank, tasks, n, n_windows, known)):
            said = session.generate([request(_only(i.scene, i.asked)) for i in batch], max_new_tokens=MAX_NEW_TOKENS)
            for item, text in zip(batch, said, strict=True):
                answer = _answer(item, text)
                done.append(answer)
                file.write(json.dumps(asdict(answer)) + "\n")
            file.flush()
            count += len(batch)
            if count % (20 * BATCH) < BATCH:
                print(f"{count} answers in {time.perf_counter() - begin:.0f} s: {summary(done)}", flush=True)
    return done


def _only(scene: Scene, asked: Asked) -> Scene:
    return Scene(scene.kind, scene.clips, scene.opening, (asked,))


def _answer(item: Item, said: str) -> Answer:
    right = is_right(item.task, said, item.asked.answer)
    return Answer(
        item.task, item.stratum, item.held_out_programs, item.number, item.asked.words, item.asked.answer, said, right
    )


def _batches(stream: Iterator[Item], ahead: int = 16) -> Iterator[list[Item]]:
    """Batches of clips of like length, looking some batches ahead."""
    held: list[Item] = []
    for item in stream:
        held.append(item)
        if len(held) == ahead * BATCH:
            yield from _sorted(held)
            held = []
    yield from _sorted(held)


def _sorted(held: list[Item]) -> Iterator[list[Item]]:
    held = sorted(held, key=lambda i: sum(len(c.samples) for c in i.scene.clips))
    for start in range(0, len(held), BATCH):
        yield held[start : start + BATCH]


def read_answers(path: Path) -> list[Answer]:
    """The answers that a file holds; none where it does not exist."""
    if not path.is_file():
        return []
    return [Answer(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def share(
    answers: list[Answer], task: str, held_out: bool | None = None, stratum: str | None = None
) -> tuple[int, int]:
    """How many answers of a kind are right, of how many; "windows" count only where they are asked for."""
    right = Counter(
        a.right
        for a in answers
        if a.task == task
        and held_out in (None, a.held_out_programs)
        and (a.stratum != "windows" if stratum is None else a.stratum == stratum)
    )
    return right[True], right[True] + right[False]


def summary(answers: list[Answer]) -> str:
    """Each task's shares on train and held-out programs, on one line."""
    parts = []
    for task in TASKS:
        (a, n), (b, m) = share(answers, task, False), share(answers, task, True)
        if n and m:
            parts.append(f"{task} {a / n:.2f}/{b / m:.2f}")
    return " ".join(parts)


def is_single(task: str) -> bool:
    """Whether a task is about one source."""
    from .heldout import KINDS

    return KINDS[task][0] in SINGLE
