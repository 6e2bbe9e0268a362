"""The command line: `python -m tools.train_demo train music_flamingo --bank FOLDER --out FOLDER`, and what follows it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from .bank import SOUND_FONT, open_bank
from .shapes import MARKERS
from .training import Plan, Training


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.train_demo", description="Train the embedded demo models.")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train one family; goes on from its last checkpoint")
    train.add_argument("name", choices=list(MARKERS))
    train.add_argument("--out", type=Path, required=True, help="folder for the checkpoint and the snapshot")
    train.add_argument("--minutes", type=float, default=Plan.minutes)
    train.add_argument("--seed", type=int, default=Plan.seed)
    train.add_argument("--threads", type=int, default=1)
    for command in (train,):
        command.add_argument(
            "--bank", type=Path, required=True, help="folder of the rendered notes; made where missing"
        )
        command.add_argument("--sound-font", type=Path, default=SOUND_FONT)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    bank = open_bank(asked.bank, asked.sound_font)
    Training(Plan(asked.name, asked.seed, asked.minutes), bank, asked.out).train()


if __name__ == "__main__":
    main()
