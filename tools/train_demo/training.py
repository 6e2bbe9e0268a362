"""Training one demo model: steps until its time on the processor is over, a progress line, checkpoints from which it goes on."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from audiollm.families import Family, for_model_type

from . import shapes, targets
from .bank import Bank
from .batches import groups
from .passes import Pass, packed
from .prompts import Prompter, Row
from .questions import Scene

END_WEIGHT = 0.2  # of the token that ends an answer
READ_LAYERS = (2, 3)  # layers of the language model at whose audio tokens the second auxiliary map reads


@dataclass(frozen=True)
class Plan:
    """What decides a training: the family, its seed, minutes of one core, and the optimizer's numbers.

    Time is the process's own on the processor, so that other work on the machine shortens no training.
    """

    name: str
    seed: int = 1
    minutes: float = 100.0
    rate: float = 2e-3
    warm_up: int = 100
    decay: float = 0.05
    checkpoint_minutes: float = 3.0


class Training:
    """A model in training, with the auxiliary map beside it."""

    def __init__(self, plan: Plan, bank: Bank, folder: Path) -> None:
        self.plan, self.bank, self.folder = plan, bank, folder
        self.family = new_family(plan.name, folder / "snapshot", plan.seed)
        self.model: Any = self.family.model
        torch.manual_seed(plan.seed)
        self.auxiliary = nn.Linear(shapes.LANGUAGE["hidden_size"], targets.N_OUT)
        self.reading = nn.ModuleList([nn.Linear(shapes.LANGUAGE["hidden_size"], targets.N_READ) for _ in READ_LAYERS])
        self.run = Pass(self.family)
        self.prompter = Prompter(self.family)
        self.optimizer = self._optimizer()
        self.step, self.spent_s = 0, 0.0
        self._load()

    def _optimizer(self) -> torch.optim.Optimizer:
        everything = [p for p in (*self.model.parameters(), *self.auxiliary.parameters()) if p.requires_grad]
        sets = [
            {"params": [p for p in everything if p.dim() > 1], "weight_decay": self.plan.decay},
            {"params": [p for p in everything if p.dim() < 2], "weight_decay": 0.0},
        ]
        sets.append({"params": list(self.reading.parameters()), "weight_decay": 0.0})
        return torch.optim.AdamW(sets, lr=self.plan.rate, betas=(0.9, 0.98), fused=True)

    @property
    def part(self) -> float:
        """How much of the time is over, 0-1."""
        return min(1.0, self.spent_s / (60 * self.plan.minutes))

    def rate(self) -> float:
        """The learning rate: warm-up by steps, then a cosine over the whole time."""
        warm = min(1.0, (self.step + 1) / self.plan.warm_up)
        return self.plan.rate * warm * (0.5 + 0.5 * math.cos(math.pi * self.part))

    def train(self) -> None:
        """Go on until the time is over; the last checkpoint is the result."""
        self.model.train()
        saved, told = self.spent_s, Progress()
        while self.part < 1:
            begin = time.process_time()
            told.add(self.one_step())
            self.spent_s += time.process_time() - begin
            self.step += 1
            if self.step % 50 == 0:
                told.say(self)
            if self.spent_s - saved > 60 * self.plan.checkpoint_minutes:
                saved = self.spent_s
                self.save()
        self.save()

    def one_step(self) -> dict[str, float]:
        """One update; returns its losses, and for each task "task" right answers of "n task"."""
        rate = self.rate()
        for group in self.optimizer.param_groups:
            group["lr"] = max(rate, 2e-5)
        step_groups = groups(self.bank, self.plan.seed, self.step, self.part)
        self.optimizer.zero_grad()
        seen = {"loss": 0.0, "aux": 0.0}
        for scenes in step_groups:
            text, aux, right = self.losses(scenes)
            ((text + aux) / len(step_groups)).backward()
            seen["loss"] += float(text.detach()) / len(step_groups)
            seen["aux"] += float(aux.detach()) / len(step_groups)
            for key, value in right.items():
                seen[key] = seen.get(key, 0.0) + value
        nn.utils.clip_grad_norm_([p for g in self.optimizer.param_groups for p in g["params"]], 1.0)
        self.optimizer.step()
        return seen

    def losses(self, scenes: list[Scene]) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
        """A group's answer loss and auxiliary loss, and how many of its answers were right, see `one_step`."""
        rows = [self.prompter.row(scene) for scene in scenes]
        batch = packed(rows, self.family.pad_id)
        waves = [[clip.samples for clip in scene.clips] for scene in scenes if scene.clips]
        projected, streams = self.run.audio(waves, [[self.run.mel(wave) for wave in row] for row in waves])
        layers = self.run.layers(batch, projected, streams)
        logits = self.run.logits(layers[-1], batch)
        weights = torch.where(batch.told == self.family.end_id, END_WEIGHT, 1.0)
        each = functional.cross_entropy(logits, batch.told, reduction="none")
        token_s = self.family.clock.token_s
        told = [
            targets.targets_of(clip, self.family.n_tokens(len(clip.samples)), token_s)
            for scene in scenes
            for clip in scene.clips
        ]
        binary = torch.cat([torch.from_numpy(t.binary) for t in told])
        classes = torch.cat([torch.from_numpy(t.classes) for t in told])
        clips = [clip for scene in scenes for clip in scene.clips]
        heard = torch.cat(
            [torch.from_numpy(targets.read_classes(c, t, token_s)) for c, t in zip(clips, told, strict=True)]
        )
        second = torch.cat([torch.from_numpy(t.second) for t in told])
        aux = (1 - 0.8 * self.part) * targets.loss(self.auxiliary(projected), binary, classes)
        for read, layer in zip(self.reading, READ_LAYERS, strict=True):
            at_audio = functional.rms_norm(layers[layer][batch.rows, batch.columns], layers[layer].shape[-1:])
            aux = aux + (0.15 if self.part < 0.85 else 0.03) * targets.read_loss(read(at_audio), binary, heard, second)
        return (each * weights).sum() / weights.sum(), aux, right_answers(scenes, rows, logits.argmax(-1) == batch.told)

    def save(self) -> None:
        """Write the checkpoint and the snapshot's weights as they are now."""
        state = {
            "plan": asdict(self.plan),
            "step": self.step,
            "spent_s": self.spent_s,
            "model": self.model.state_dict(),
            "auxiliary": self.auxiliary.state_dict(),
            "reading": self.reading.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        partial = self.folder / "checkpoint.part"
        torch.save(state, partial)
        partial.replace(self.folder / "checkpoint.pt")
        shapes.save_weights(self.plan.name, self.model, self.folder / "snapshot")

    def _load(self) -> None:
        path = self.folder / "checkpoint.pt"
        if not path.is_file():
            return
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.auxiliary.load_state_dict(state["auxiliary"])
        self.reading.load_state_dict(state["reading"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.spent_s = state["step"], state["spent_s"]


def new_family(name: str, folder: Path, seed: int) -> Family:
    """A snapshot folder without weights, and the family's adapter to a model with its first weights."""
    config = shapes.write_folder(name, folder)
    kind = for_model_type(config["model_type"])
    assert kind is not None
    model = kind.build(config, "sdpa")
    shapes.first_weights(name, model, seed)
    return kind(model, kind.load_processor(folder))


def right_answers(scenes: list[Scene], rows: list[Row], right: torch.Tensor) -> dict[str, float]:
    """For each task how many answers have every token right, given those before it, as "task" and "n task"."""
    counts: dict[str, float] = {}
    start = 0
    for scene, row in zip(scenes, rows, strict=True):
        for asked, block in zip(scene.asked, row.blocks, strict=False):
            counts[asked.task] = counts.get(asked.task, 0.0) + float(right[start : start + len(block.answer)].all())
            counts[f"n {asked.task}"] = counts.get(f"n {asked.task}", 0.0) + 1
            start += len(block.answer)
    return counts


class Progress:
    """Means since the last line."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []
        self.since = time.perf_counter()

    def add(self, seen: dict[str, float]) -> None:
        self.seen.append(seen)

    def say(self, training: Training) -> None:
        """One line, then begin again."""
        n = len(self.seen)
        text, aux = (sum(s[key] for s in self.seen) / n for key in ("loss", "aux"))
        rate = n / (time.perf_counter() - self.since)
        tasks = sorted({key for s in self.seen for key in s if f"n {key}" in s})
        right = {t: sum(s.get(t, 0) for s in self.seen) / sum(s.get(f"n {t}", 0) for s in self.seen) for t in tasks}
        print(
            f"{training.plan.name} step {training.step} {training.spent_s / 60:.1f} min {rate:.2f} steps/s loss {text:.3f} "
            f"aux {aux:.2f} " + " ".join(f"{task} {share:.2f}" for task, share in right.items()),
            flush=True,
        )
        self.seen, self.since = [], time.perf_counter()
