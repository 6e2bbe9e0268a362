"""The command line: `python -m tools.train_demo COMMAND --help`; README.md tells the order of commands."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from .bank import SOUND_FONT, open_bank
from .heldout import N_QUESTIONS, N_WINDOWS, TASKS
from .shapes import MARKERS
from .training import Plan, Training


def main() -> None:
    asked = _parser().parse_args()
    torch.set_num_threads(asked.threads)
    COMMANDS[asked.command](asked)


def train(asked: argparse.Namespace) -> None:
    bank = open_bank(asked.bank, asked.sound_font)
    Training(Plan(asked.name, asked.seed, asked.minutes), bank, asked.out).train()


def evaluate(asked: argparse.Namespace) -> None:
    from .evaluation import evaluate, summary

    bank = open_bank(asked.bank, asked.sound_font)
    tasks = tuple(asked.tasks.split(",")) if asked.tasks else TASKS
    out = asked.out / "answers.jsonl"
    print(summary(evaluate(asked.out / "snapshot", bank, out, tasks, asked.questions, asked.windows)))


def probe(asked: argparse.Namespace) -> None:
    from .probes import curves

    found = curves(asked.out / "snapshot", open_bank(asked.bank, asked.sound_font))
    (asked.out / "probes.json").write_text(json.dumps([asdict(curve) for curve in found], indent=1), encoding="utf-8")


def export(asked: argparse.Namespace) -> None:
    from .card import Run, card, read_probes
    from .evaluation import read_answers

    answers, probes = read_answers(asked.out / "answers.jsonl"), read_probes(asked.out / "probes.json")
    notes = asked.notes.read_text(encoding="utf-8") if asked.notes else ""
    asked.to.mkdir(parents=True, exist_ok=True)
    for path in sorted((asked.out / "snapshot").iterdir()):
        shutil.copyfile(path, asked.to / path.name)
    text = card(asked.name, Run.of(asked.out / "checkpoint.pt"), answers, probes, notes)
    (asked.to / "README.md").write_text(text, encoding="utf-8")


def answers(asked: argparse.Namespace) -> None:
    from .answers import write_answers

    folders = {name: asked.snapshots / name for name in MARKERS}
    write_answers(folders, open_bank(asked.bank, asked.sound_font), asked.to)


def table(asked: argparse.Namespace) -> None:
    from .card import short_table
    from .evaluation import read_answers

    print(short_table({name: read_answers(asked.runs / name / "answers.jsonl") for name in MARKERS}))


COMMANDS = {each.__name__: each for each in (train, evaluate, probe, export, answers, table)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.train_demo", description="Train the embedded demo models.")
    commands = parser.add_subparsers(dest="command", required=True)
    told = {
        "train": "train one family; goes on from its last checkpoint",
        "evaluate": "answer the held-out questions through the public API; goes on where it was stopped",
        "probe": "measure what probes read by layer, of the model and of its twin",
        "export": "write the snapshot with its card",
        "answers": "write the clips and answers of tests/data/answers",
        "table": "print the table for the project's README",
    }
    made = {name: commands.add_parser(name, help=text) for name, text in told.items()}
    for name, command in made.items():
        command.add_argument("--threads", type=int, default=1)
        if name in ("train", "evaluate", "probe", "export"):
            command.add_argument("name", choices=list(MARKERS))
            command.add_argument("--out", type=Path, required=True, help="the family's folder of this training")
        if name in ("train", "evaluate", "probe", "answers"):
            command.add_argument(
                "--bank", type=Path, required=True, help="folder of the rendered notes; made where missing"
            )
            command.add_argument("--sound-font", type=Path, default=SOUND_FONT)
        if name in ("export", "answers"):
            command.add_argument("--to", type=Path, required=True, help="the folder to write")
    made["train"].add_argument("--minutes", type=float, default=Plan.minutes)
    made["train"].add_argument("--seed", type=int, default=Plan.seed)
    made["evaluate"].add_argument("--tasks", help="names with commas between; all where absent")
    made["evaluate"].add_argument("--questions", type=int, default=N_QUESTIONS, help="of each task")
    made["evaluate"].add_argument(
        "--windows", type=int, default=N_WINDOWS, help="of each task on one source, 30.5-36 s long"
    )
    made["export"].add_argument("--notes", type=Path, help="a Markdown file: what was tried")
    made["answers"].add_argument("--snapshots", type=Path, required=True, help="folder of the exported snapshots")
    made["table"].add_argument("--runs", type=Path, required=True, help="folder of the families' folders")
    return parser


if __name__ == "__main__":
    main()
