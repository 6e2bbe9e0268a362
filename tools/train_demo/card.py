"""The model card of a snapshot, written from what was measured, and the short table for the project's README."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from .evaluation import TARGETS, Answer, is_single, share
from .heldout import N_QUESTIONS, N_WINDOWS, STRATA, TASKS
from .instruments import FAMILIES, HELD_OUT_KITS, KITS

TITLES = {"music_flamingo": "Music Flamingo", "moss_music": "MOSS-Music"}
WHAT = {
    "pitch_class": "pitch class of a note", "note": "note with octave", "family": "instrument family", "chord": "chord name",
    "quality": "major or minor", "drums": "is there a drum", "higher": "higher of A and B", "tempo": "slow, medium or fast",
    "onset": "second note's begin, within 0.25 s", "direction": "rising or falling", "same": "same instrument in A and B",
    "missing": "stem missing from B", "texture": "one note or a chord", "highest": "highest of A, B and C",
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What is known of a training: its steps, minutes of one core, seed and parameters."""

    steps: int
    minutes: float
    seed: int
    n_parameters: int

    @classmethod
    def of(cls, checkpoint: Path) -> Run:
        state = torch.load(checkpoint, weights_only=True)
        n = sum(tensor.numel() for tensor in state["model"].values())
        return cls(state["step"], state["spent_s"] / 60, state["plan"]["seed"], n)


def card(name: str, run: Run, answers: list[Answer], probes: list[dict], notes: str) -> str:
    """The README.md of the snapshot folder; `probes` as `probes.curves` gives them, `notes` what was tried."""
    return "\n".join(
        [
            f"# A small {TITLES[name]} that has learned something",
            "",
            f"The published architecture and file layout of {TITLES[name]} at small width: {run.n_parameters:,} parameters, "
            "stored in bfloat16, meant to be run in float32. It was trained from scratch on audio rendered from MIDI, so that a "
            "newcomer without a GPU sees real structure: probes that climb through layers, attention that follows notes, "
            "answers that are right. It is for learning the tool, not for science, and it is not the published model: no "
            "weight of that one is in it.",
            "",
            *_data(),
            "",
            "## Training",
            "",
            f"{run.steps:,} steps in {run.minutes:.0f} minutes of one CPU core (the process's own time; float32, seed "
            f"{run.seed}), the two families side by side, by `tools/train_demo` of this repository. Loss on the answers; an "
            "auxiliary target a token (pitches, family, drums, onsets, tempo, chord, clock) helped in training and was dropped.",
            "",
            "## Held-out accuracy",
            "",
            *_accuracy(answers),
            "",
            "## What a linear probe reads, by place",
            "",
            *_probes(probes),
            "",
            "## What it cannot do",
            "",
            *_limits(),
            *(["", notes.strip()] if notes.strip() else []),
            "",
        ]
    )


def _data() -> list[str]:
    families = "; ".join(
        f"{f.name} {', '.join(map(str, f.trained))} (held out {', '.join(map(str, f.held_out))})" for f in FAMILIES
    )
    kits = ", ".join(str(kit) for kit in KITS if kit not in HELD_OUT_KITS)
    return [
        "## Data",
        "",
        "Rendered by fluidsynth from the sound font FluidR3 GM (MIT licence, Frank Wen), mixed on the fly: single notes, "
        "triads, rising and falling melodies, drum loops, two-note clips, pairs and triples of clips, mixes with one stem "
        "left out. 0.6 to 12 s, some to 36 s; 0 to 3 sources a prompt, with labels and without; random gain, a little noise and "
        "spectral tilt.",
        "",
        f"General MIDI programs, numbered from 0: {families}. Drum kits {kits} (held out {', '.join(map(str, HELD_OUT_KITS))}). "
        "Of the note cells (program and pitch) one in nine was never played in training.",
    ]


def _accuracy(answers: list[Answer]) -> list[str]:
    lines = [
        f"Greedy text through the public API (`load_model`, `Session.generate`), exact match, on questions fixed by seeds before "
        f"training (`tools/train_demo/heldout.py`: {N_QUESTIONS} a task and {N_WINDOWS} on clips of 30.5-36 s; counts below are "
        "those that were asked). Single notes on train programs are at cells that training left out.",
        "",
        "| question | train programs | held-out programs | asked of each | " + " | ".join(_spans()) + " | 30.5-36 s |",
        "|---" * (5 + len(STRATA)) + "|",
    ]
    for task in TASKS:
        (a, n), (b, m) = share(answers, task, False), share(answers, task, True)
        if not n or not m:
            continue
        target = TARGETS.get(task)
        cells = [_with(a, n, target and target[0]), _with(b, m, target and target[1]), f"{n}, {m}"]
        cells += [_with(*share(answers, task, None, stratum)) for stratum in STRATA]
        cells.append(_with(*share(answers, task, None, "windows")) if is_single(task) else "")
        lines.append(f"| {WHAT[task]} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "A figure in brackets is the target where it was missed. Chance is 1/12 for a pitch class, 1/8 for a family.",
    ]
    return lines


def _spans() -> list[str]:
    return [f"{low:g}-{high:g} s" for low, high in STRATA.values()]


def _with(right: int, n: int, target: float | None = None) -> str:
    if not n:
        return ""
    missed = target is not None and right / n < target - 1e-9
    return f"{right / n:.2f}" + (f" ({target:.2f})" if missed else "")


def _probes(probes: list[dict]) -> list[str]:
    if not probes:
        return ["Not measured."]
    places = probes[0]["places"]
    lines = [
        'Accuracy of a logistic regression, trained model / random-weights twin (`demo.load(name, weights="random")`), on '
        "programs that the probe never saw (five folds grouped by program; clips of 3 s). Audio places: the mean over the "
        "clip's tokens; layers of the language model: the last token of the prompt, behind the question that is probed.",
        "",
        "| place | " + " | ".join(f"{p['target']} (chance {p['chance']:.2f})" for p in probes) + " |",
        "|---" * (1 + len(probes)) + "|",
    ]
    for i, place in enumerate(places):
        lines.append(f"| {place} | " + " | ".join(f"{p['trained'][i]:.2f} / {p['twin'][i]:.2f}" for p in probes) + " |")
    return lines


def _limits() -> list[str]:
    return [
        "- It answers the questions above, in about their words, on audio like that above. Other questions get an answer of the "
        "same kind, which means nothing.",
        "- Real recordings, mixes with vocals, effects, tunings beside A = 440 Hz and notes outside C2-B5 are unknown to it.",
        "- Chords are major and minor triads on their root; tempi are 54-72, 92-112 and 144-176 beats a minute.",
        "- It has no knowledge of music beyond this and cannot hold a conversation.",
    ]


def short_table(results: dict[str, list[Answer]]) -> str:
    """Markdown: each task's share on train / held-out programs, a column a family."""
    lines = ["| question | " + " | ".join(TITLES[name] for name in results) + " |", "|---" * (1 + len(results)) + "|"]
    for task in TASKS:
        cells = []
        for answers in results.values():
            (a, n), (b, m) = share(answers, task, False), share(answers, task, True)
            cells.append(f"{a / n:.2f} / {b / m:.2f}" if n and m else "")
        lines.append(f"| {WHAT[task]} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def read_probes(path: Path) -> list[dict]:
    """The curves that `probes` wrote; none where it was not run."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
