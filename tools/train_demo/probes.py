"""What can be read from which layer, of the trained model and of its random-weights twin.

Clips of 3 s, on all programs, from seeds that neither training nor the held-out questions use. Audio places are averaged over
the clip's tokens; language layers are taken at the last token of the prompt, where the answer follows. A probe is a logistic
regression, scored on programs (or kits) that it never saw: five folds grouped by program.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from audiollm import load_model
from audiollm.demo.twin import forget
from audiollm.families import Family

from .bank import Bank
from .passes import Pass, packed
from .prompts import Prompter
from .questions import Scene, ask, single_scene
from .scenes import Palette, Studio

SEED = 9_2026
LENGTH_S, N_CLIPS, BATCH = 3.0, 320, 20
# Each target: the kind of clip, the fact that is read, and the question behind which the language model is read.
PROBED = {
    "family": ("note", "family"),
    "chord quality": ("chord", "quality"),
    "tempo": ("tempo", "tempo"),
    "onset": ("onset", "onset"),
    "direction": ("melody", "direction"),
    "pitch class": ("note", "pitch_class"),
}


@dataclass(frozen=True)
class Curve:
    """Accuracy of one target by place: `trained` and `twin`, in the order of `places`, and the share of the largest class."""

    target: str
    places: tuple[str, ...]
    trained: tuple[float, ...]
    twin: tuple[float, ...]
    chance: float


def curves(folder: Path, bank: Bank, n_clips: int = N_CLIPS) -> list[Curve]:
    """The curves of every target, for a snapshot."""
    made = []
    for number, (target, (kind, fact)) in enumerate(PROBED.items()):
        scenes = _scenes(bank, number, kind, fact, n_clips)
        truth = np.array([scene.clips[0].facts[fact] for scene in scenes])
        groups = np.array([_program(scene) for scene in scenes])
        scored: list[dict[str, float]] = []
        for random in (False, True):
            family: Family = load_model(folder, device="cpu", dtype=torch.float32)._adapter
            if random:
                forget(family.model)
            scored.append({place: _score(x, truth, groups) for place, x in _states(family, scenes).items()})
        chance = max(np.unique(truth, return_counts=True)[1]) / len(truth)
        places = tuple(scored[0])
        made.append(Curve(target, places, tuple(scored[0].values()), tuple(scored[1].values()), float(chance)))
        print(f"{target}: " + " ".join(f"{p} {scored[0][p]:.2f}/{scored[1][p]:.2f}" for p in places), flush=True)
    return made


def _scenes(bank: Bank, number: int, kind: str, fact: str, n: int) -> list[Scene]:
    scenes: list[Scene] = []
    rng = np.random.default_rng([SEED, number])
    while len(scenes) < n:
        studio = Studio(bank, Palette(held_out=len(scenes) % 6 == 5, cells="any"), rng)
        scene = single_scene(studio, kind, LENGTH_S)
        if fact in scene.clips[0].facts:
            scenes.append(Scene(kind, scene.clips, None, (ask(studio, fact, "no"),)))
    return scenes


def _program(scene: Scene) -> int:
    voice = min((event.voice for event in scene.clips[0].events), key=lambda v: v.is_drum)
    return voice.program + 1000 * voice.is_drum


def _states(family: Family, scenes: list[Scene]) -> dict[str, np.ndarray]:
    """[n_clips, width] for every place, in the order of computing."""
    run, prompter = Pass(family), Prompter(family)
    kept: dict[str, list[np.ndarray]] = {}
    with torch.no_grad():
        for start in range(0, len(scenes), BATCH):
            some = scenes[start : start + BATCH]
            batch = packed([prompter.row(scene) for scene in some], family.pad_id)
            waves = [[clip.samples for clip in scene.clips] for scene in some]
            with _encoder_blocks(family) as blocks:
                projected, streams = run.audio(waves, [[run.mel(wave) for wave in row] for row in waves])
            for name, values in blocks.items():
                n = values.shape[1] // 2 * 2 if family.name == "music_flamingo" else values.shape[1]
                kept.setdefault(name, []).append(values[:, :n].mean(1).numpy())
            kept.setdefault("projected", []).append(
                projected.reshape(len(some), -1, projected.shape[1]).mean(1).numpy()
            )
            rows, columns = _answer_places(batch.at)
            for layer, states in enumerate(_layers(family, run, batch, projected, streams)):
                kept.setdefault(f"layer {layer}", []).append(states[rows, columns].numpy())
    return {name: np.concatenate(values) for name, values in kept.items()}


def _answer_places(at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row of a batch with one question, the last token of the prompt."""
    rows = torch.unique(at[0])
    return rows, torch.stack([at[1][at[0] == row].min() for row in rows])


@contextmanager
def _encoder_blocks(family: Family) -> Iterator[dict[str, torch.Tensor]]:
    model: Any = family.model
    layers = model.model.audio_tower.layers if family.name == "music_flamingo" else model.audio_encoder.layers
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            seen[name] = output

        return hook

    handles = [layer.register_forward_hook(keep(f"encoder block {i}")) for i, layer in enumerate(layers)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _layers(
    family: Family, run: Pass, batch: Any, projected: torch.Tensor, streams: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The residual stream before each block and after the last one, [B, L, width] each; injections included."""
    seen: list[torch.Tensor] = []
    places = [*family.blocks(), family.final_norm()]
    handles = [
        place.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        )
        for place in places
    ]
    try:
        run.states(batch, projected, streams)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _score(states: np.ndarray, truth: np.ndarray, groups: np.ndarray) -> float:
    probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=400))
    folds = GroupKFold(5)
    return float(cross_val_score(probe, states, truth, groups=groups, cv=folds).mean())
