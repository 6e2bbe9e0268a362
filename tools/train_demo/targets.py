"""What every audio token is told while training, and nothing of it is kept: pitches, family, drums, onsets, tempo, chord, clock.

A linear map from the projected embeddings [U, 160] to `N_OUT` numbers a token, and another one from the language model's
states at the audio tokens, which also tells when the second note began. With the first pitch class is well above chance
after three minutes, and without it is not; the second is for what takes a whole clip (direction, tempo, onset).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from .instruments import FAMILIES, HIGHEST, HITS, LOWEST
from .scenes import TEMPI, Clip

N_PITCHES = HIGHEST - LOWEST + 1
N_CLOCK, CLOCK_S = 72, 0.5
_BINARY = N_PITCHES + len(FAMILIES) + 4  # roll, families, kick, snare, cymbal, a note's onset
# Classes a token, each with its number of classes; -100 where there is nothing to say.
CLASSES = {"tempo": 3, "quality": 2, "root": 12, "direction": 2, "clock": N_CLOCK}
N_OUT = _BINARY + sum(CLASSES.values()) + N_PITCHES + 12 + len(FAMILIES)
_WEIGHTS = {"tempo": 1.0, "quality": 1.0, "root": 0.3, "direction": 1.0, "clock": 0.3}
N_READ = N_OUT + N_CLOCK  # the second map's: also the half second in which the second note began
_KICK, _SNARE = HITS["kick"], HITS["snare"]


@dataclass(frozen=True, eq=False)
class Targets:
    """Binary targets [U, _BINARY] float32 and classes [U, 5] int64 of some tokens; `second` [U] int64, see `N_READ`."""

    binary: np.ndarray
    classes: np.ndarray
    second: np.ndarray


def targets_of(clip: Clip, n_tokens: int, token_s: float) -> Targets:
    """The targets of one clip's tokens."""
    times = np.arange(n_tokens) * token_s
    binary = np.zeros((n_tokens, _BINARY), dtype=np.float32)
    families = {family.name: N_PITCHES + i for i, family in enumerate(FAMILIES)}
    drums = N_PITCHES + len(FAMILIES)
    for event in clip.events:
        first = int(event.start_s / token_s)
        if event.voice.is_drum:
            kind = 0 if event.voice.pitch == _KICK else 1 if event.voice.pitch == _SNARE else 2
            binary[first : first + max(1, round(0.08 / token_s)), drums + kind] = 1
            continue
        last = max(first + 1, int((event.start_s + min(event.length_s, 2.2)) / token_s))
        binary[first:last, event.voice.pitch - LOWEST] = 1
        binary[first:last, families[event.family]] = 1
        binary[first : first + 1, drums + 3] = 1
    facts = clip.facts
    whole = {
        "tempo": list(TEMPI).index(facts["tempo"]) if "tempo" in facts else -100,
        "quality": ("major", "minor").index(facts["quality"]) if "quality" in facts else -100,
        "root": _root(clip) if "quality" in facts or "note" in facts else -100,
        "direction": ("rising", "falling").index(facts["direction"]) if "direction" in facts else -100,
    }
    classes = np.full((n_tokens, len(CLASSES)), -100, dtype=np.int64)
    sounding = binary[:, :N_PITCHES].any(axis=1)
    for i, (name, value) in enumerate(whole.items()):
        where = sounding if name in ("quality", "root") else slice(None)
        classes[where, i] = value
    classes[:, 4] = np.minimum(times / CLOCK_S, N_CLOCK - 1)
    second = np.full(n_tokens, -100, dtype=np.int64)
    if "onset" in facts:
        at = float(facts["onset"])
        second[times > at + 0.1] = min(round(at / CLOCK_S), N_CLOCK - 1)
    return Targets(binary, classes, second)


def read_classes(clip: Clip, told: Targets, token_s: float) -> np.ndarray:
    """The classes for states that see only what came before: direction from the second note on, tempo from 1.5 s on."""
    heard = told.classes.copy()
    starts = sorted(event.start_s for event in clip.events if not event.voice.is_drum)
    if len(starts) > 1:
        heard[: int(starts[1] / token_s) + 1, 3] = -100
    heard[: int(1.5 / token_s), 0] = -100
    return heard


def _root(clip: Clip) -> int:
    return min(event.voice.pitch for event in clip.events if not event.voice.is_drum) % 12


def loss(out: torch.Tensor, binary: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """The auxiliary loss of `out` [U, N_OUT], one number.

    Sparse binary targets alone stay at their base rates for hundreds of steps; what carries is a share among the pitches,
    pitch classes and families that sound.
    """
    rare = torch.ones(_BINARY)
    rare[-4:] = 6.0
    each = functional.binary_cross_entropy_with_logits(
        out[:, :_BINARY], binary, pos_weight=rare, reduction="none"
    ).mean(0)
    total = 0.25 * each[:N_PITCHES].sum() + 0.4 * each[N_PITCHES:].sum()
    start = _BINARY
    for i, (name, n) in enumerate(CLASSES.items()):
        said, told = out[:, start : start + n], classes[:, i]
        start += n
        if bool((told >= 0).any()):
            total = total + _WEIGHTS[name] * functional.cross_entropy(said, told, ignore_index=-100)
    roll = binary[:, :N_PITCHES]
    chroma = torch.stack([roll[:, i::12].amax(1) for i in range(12)], dim=1)
    families = binary[:, N_PITCHES : N_PITCHES + len(FAMILIES)]
    sounding = roll.sum(1) > 0
    for shares, weight in ((roll, 1.0), (chroma, 1.0), (families, 1.5)):
        said = out[sounding, start : start + shares.shape[1]]
        start += shares.shape[1]
        if len(said):
            told = shares[sounding] / shares[sounding].sum(1, keepdim=True)
            total = total - weight * (told * said.log_softmax(1)).sum(1).mean()
    return total


def read_loss(out: torch.Tensor, binary: torch.Tensor, classes: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The second map's loss of `out` [U, N_READ]."""
    total = loss(out[:, :N_OUT], binary, classes)
    whole = _BINARY + sum(n for name, n in list(CLASSES.items())[:3])
    for first, column in ((_BINARY, 0), (whole, 3)):  # tempo and direction once more: they are learned last
        n = list(CLASSES.values())[column]
        if bool((classes[:, column] >= 0).any()):
            said = out[:, first : first + n]
            total = total + 3 * functional.cross_entropy(said, classes[:, column], ignore_index=-100)
    if bool((second >= 0).any()):
        total = total + functional.cross_entropy(out[:, N_OUT:], second, ignore_index=-100)
    return total
