"""The 40 clips of tests/data/answers: held-out questions on short clips as FLAC files, and what each snapshot answers.

Chosen so that both models answer right: the test watches for what changes, and the card tells how often they are wrong.
"""

from __future__ import annotations

import json
from pathlib import Path

import soundfile
import torch

from audiollm import Request, load_model

from .bank import Bank
from .heldout import Item, item
from .questions import is_right

# How many questions of each task, 40 in all, and the longest audio of one in seconds.
COUNTS = {
    "note": 6, "pitch_class": 3, "chord": 6, "quality": 2, "family": 6, "drums": 2, "tempo": 4, "onset": 5, "direction": 4,
    "higher": 2,
}  # fmt: skip
LONGEST_S = {"onset": 7.0, "tempo": 4.0, "higher": 3.0}
_SHORT_S = 2.6
_MOST_TRIED = 90


def write_answers(folders: dict[str, Path], bank: Bank, out: Path) -> None:
    """Write `out`/answers.json and the FLAC files it names; `folders` are the snapshots by family."""
    sessions = {name: load_model(folder, device="cpu", dtype=torch.float32) for name, folder in folders.items()}
    out.mkdir(parents=True, exist_ok=True)
    told = []
    for task, wanted in COUNTS.items():
        found = 0
        for number in range(_MOST_TRIED):
            one = item(bank, task, number)
            if found == wanted or sum(c.duration_s for c in one.scene.clips) > LONGEST_S.get(task, _SHORT_S):
                continue
            if task == "onset" and float(one.asked.answer.split()[0]) < 1.0 + 0.5 * found:
                continue
            names = _written(one, out)
            request = Request((one.scene.opening or "") + one.asked.words, [out / name for name in names])
            said = {name: s.generate([request], max_new_tokens=16)[0] for name, s in sessions.items()}
            if all(is_right(task, text, one.asked.answer) for text in said.values()):
                found += 1
                told.append(
                    {"task": task, "prompt": request.prompt, "clips": names, "right": one.asked.answer, "said": said}
                )
            else:
                for name in names:
                    (out / name).unlink()
        print(f"{task}: {found} of {wanted}", flush=True)
    (out / "answers.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"{len(told)} questions, {size:,} bytes in {out}")


def _written(one: Item, out: Path) -> list[str]:
    names = []
    for k, clip in enumerate(one.scene.clips):
        name = f"{one.task}_{one.number}{'abc'[k] if len(one.scene.clips) > 1 else ''}.flac"
        soundfile.write(out / name, clip.samples, 16_000, subtype="PCM_16", compression_level=1.0)
        names.append(name)
    return names
