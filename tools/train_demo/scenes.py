"""Clips and what is true of them: notes, triads, melodies, drum loops, two-note clips and mixes with their stems.

Every clip is drawn from a `random.Random`-like numpy Generator and a `Palette`, so a seed gives the same clip. Times are in
seconds from the clip's start; samples are mono float32 at 16 kHz.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from .bank import CELL, SAMPLE_RATE, VELOCITIES, Bank, Voice
from .instruments import FAMILIES, HELD_OUT_KITS, HITS, KITS, Family, is_held_out_cell, note_name

TEMPI = {"slow": (54.0, 72.0), "medium": (92.0, 112.0), "fast": (144.0, 176.0)}
ONSET_GRID_S = 0.5


@dataclass(frozen=True)
class Event:
    """One note or hit: when, how long, which voice, how loud (1 is normal), and its family ("drums" for hits)."""

    start_s: float
    length_s: float
    voice: Voice
    family: str
    gain: float = 1.0


@dataclass(frozen=True)
class Palette:
    """Which programs, kits and note cells a set of clips may use.

    `held_out` takes the programs and kits that training never hears, else those it hears; `cells` is "train" for the note
    cells of training, "new" for single notes at cells that training left out, "any".
    """

    held_out: bool = False
    cells: str = "train"

    def programs(self, family: Family) -> tuple[int, ...]:
        return family.held_out if self.held_out else family.trained

    def kit(self, rng: np.random.Generator) -> int:
        kits = HELD_OUT_KITS if self.held_out else tuple(k for k in KITS if k not in HELD_OUT_KITS)
        return int(rng.choice(kits))

    def allows(self, program: int, pitch: int, single: bool) -> bool:
        if self.held_out or self.cells == "any" or (self.cells == "new" and not single):
            return True
        return is_held_out_cell(program, pitch) == (self.cells == "new")


@dataclass(frozen=True, eq=False)
class Clip:
    """Samples [N], the events that made them, and what can be asked: `facts` by name."""

    samples: np.ndarray
    events: tuple[Event, ...]
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        return len(self.samples) / SAMPLE_RATE


@dataclass
class Studio:
    """Draws clips: a bank, a palette and a random stream."""

    bank: Bank
    palette: Palette
    rng: np.random.Generator

    # What chance decides.

    def between(self, low: float, high: float) -> float:
        return float(self.rng.uniform(low, high))

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def family(self, pitched_chords: bool = False) -> Family:
        """Any family; for chords not the bass, whose triads are mud."""
        choices = [f for f in FAMILIES if not (pitched_chords and f.name == "bass")]
        return choices[int(self.rng.integers(len(choices)))]

    def program(self, family: Family) -> int:
        return int(self.rng.choice(self.palette.programs(family)))

    def pitches(self, family: Family, program: int, shape: tuple[int, ...], single: bool) -> tuple[int, ...] | None:
        """A transposition of `shape` (semitones from its first note) that the palette allows; None where none was found."""
        low, high = family.lowest - min(shape), family.highest - max(shape)
        for _ in range(60):
            root = int(self.rng.integers(low, high + 1))
            notes = tuple(root + step for step in shape)
            if all(self.palette.allows(program, pitch, single) for pitch in notes):
                return notes
        return None

    # Events.

    def note(
        self, start_s: float, length_s: float, family: Family, program: int, pitch: int, gain: float = 1.0
    ) -> Event:
        voice = Voice(program, pitch, int(self.rng.choice(VELOCITIES)))
        return Event(start_s, length_s, voice, family.name, gain)

    def starts(self, duration_s: float) -> list[tuple[float, float]]:
        """Starts and lengths of a note or chord that is struck once, or again and again."""
        if duration_s > 2.6 and self.chance(0.6):
            every = self.between(0.6, 2.4)
            first = self.between(0, 0.4)
            times = np.arange(first, duration_s - 0.35, every)
            return [(float(t), min(every, duration_s - t)) for t in times]
        first = 0.0 if self.chance(0.5) else self.between(0, max(0.0, duration_s - 0.55))
        return [(first, min(self.between(0.5, 2.4), duration_s - first))]

    def loop(self, duration_s: float, bpm: float | None = None, gain: float = 1.0) -> list[Event]:
        """A drum loop from near the start to the end."""
        bpm = self.between(*list(TEMPI.values())[int(self.rng.integers(3))]) if bpm is None else bpm
        kit, beat = self.palette.kit(self.rng), 60 / bpm
        cymbal = str(self.rng.choice(["hat", "hat", "ride"]))
        halves = self.chance(0.35)
        events = []
        for k in range(int(duration_s / beat * 2) + 1):
            start = self._first + k * beat / 2
            if start > duration_s - 0.05:
                break
            hits = [] if k % 2 and not halves else [cymbal]
            if k % 2 == 0:
                hits.append("kick" if k % 4 == 0 else "snare")
            for name in hits:
                quiet = 0.5 if name == cymbal else 1.0
                voice = Voice(kit, HITS[name], int(self.rng.choice(VELOCITIES)), True)
                events.append(Event(start, min(0.6, duration_s - start), voice, "drums", gain * quiet))
        return events

    @property
    def _first(self) -> float:
        return self.between(0, 0.15)

    def finished(
        self, events: list[Event], duration_s: float, facts: dict[str, str], colour: Colour | None = None
    ) -> Clip:
        """Mix, colour and wrap."""
        colour = self.colour() if colour is None else colour
        n = round(duration_s * SAMPLE_RATE)
        drums = "yes" if any(e.voice.is_drum for e in events) else "no"
        return Clip(colour.applied(mixed(self.bank, events, n)), tuple(events), {**facts, "drums": drums})

    def colour(self) -> Colour:
        return Colour(
            gain=10 ** self.between(-0.6, 0.15),
            tilt=self.between(-0.25, 0.25),
            noise=10 ** self.between(-4.5, -2.6),
            seed=int(self.rng.integers(2**31)),
        )


@dataclass(frozen=True)
class Colour:
    """What a clip passes at the end: a small spectral tilt, a gain and white noise."""

    gain: float
    tilt: float
    noise: float
    seed: int

    def applied(self, samples: np.ndarray) -> np.ndarray:
        tilted = samples.copy()
        tilted[1:] += np.float32(self.tilt) * samples[:-1]
        noise = np.random.default_rng(self.seed).standard_normal(len(samples), dtype=np.float32)
        return np.clip(np.float32(self.gain) * tilted + np.float32(self.noise) * noise, -1, 1)


def mixed(bank: Bank, events: list[Event], n_samples: int) -> np.ndarray:
    """The sum of all events, [n_samples] float32; notes are brought to one peak, hits keep their kit's balance."""
    out = np.zeros(n_samples, dtype=np.float32)
    for event in events:
        start = round(event.start_s * SAMPLE_RATE)
        n = min(CELL, round(event.length_s * SAMPLE_RATE), n_samples - start)
        if n < 32:
            continue
        level = 0.8 if event.voice.is_drum else 0.16 / max(bank.peak(event.voice), 0.01)
        sound = bank.sound(event.voice, n) * np.float32(level * event.gain)
        fade = min(n, 480)
        sound[-fade:] *= np.linspace(1, 0, fade, dtype=np.float32)
        out[start : start + n] += sound
    return out


# The kinds of clips. Each takes a studio and a duration and gives a clip with its facts.


def note_clip(studio: Studio, duration_s: float, family: Family | None = None, program: int | None = None) -> Clip:
    """One note, struck once or again and again, sometimes over drums."""
    family = studio.family() if family is None else family
    while True:
        program_ = studio.program(family) if program is None else program
        found = studio.pitches(family, program_, (0,), single=True)
        if found:
            break
        family = studio.family() if program is None else family
    events = [studio.note(t, length, family, program_, found[0]) for t, length in studio.starts(duration_s)]
    if studio.chance(0.25):
        events += studio.loop(duration_s, gain=studio.between(0.3, 0.7))
    name = note_name(found[0])
    facts = {"family": family.name, "note": name, "pitch_class": name[:-1], "texture": "note"}
    return studio.finished(events, duration_s, facts)


def chord_events(studio: Studio, duration_s: float, gain: float = 1.0) -> tuple[list[Event], dict[str, str]]:
    """A major or minor triad on its root, sometimes with the root's octave, struck once or again and again."""
    while True:
        family = studio.family(pitched_chords=True)
        program = studio.program(family)
        quality = "major" if studio.chance(0.5) else "minor"
        shape = (0, 4 if quality == "major" else 3, 7) + ((12,) if studio.chance(0.3) else ())
        notes = studio.pitches(family, program, shape, single=False)
        if notes:
            break
    events = []
    for t, length in studio.starts(duration_s):
        voice_gain = gain * 0.7
        events += [studio.note(t, length, family, program, pitch, voice_gain) for pitch in notes]
    root = note_name(notes[0])[:-1]
    return events, {"family": family.name, "chord": f"{root} {quality}", "quality": quality, "texture": "chord"}


def chord_clip(studio: Studio, duration_s: float) -> Clip:
    """A triad, sometimes over drums."""
    events, facts = chord_events(studio, duration_s)
    if studio.chance(0.25):
        events += studio.loop(duration_s, gain=studio.between(0.3, 0.7))
    return studio.finished(events, duration_s, facts)


def melody_events(studio: Studio, duration_s: float, gain: float = 1.0) -> tuple[list[Event], dict[str, str]]:
    """Three to seven notes, each higher than the one before, or each lower."""
    while True:
        family = studio.family()
        program = studio.program(family)
        every = studio.between(0.25, 0.45) if duration_s < 2 else studio.between(0.3, 0.9)
        most = int(min(7, (duration_s - 0.1) / every))
        n = int(studio.rng.integers(3, max(most, 3) + 1))
        steps = studio.rng.integers(1, 5, n - 1)
        if steps.sum() < 5 or steps.sum() > 20:
            continue
        direction = "rising" if studio.chance(0.5) else "falling"
        sign = 1 if direction == "rising" else -1
        shape = (0, *(int(step) * sign for step in np.cumsum(steps)))
        notes = studio.pitches(family, program, shape, single=False)
        if notes:
            break
    slack = max(0.0, duration_s - n * every - 0.1)
    first = studio.between(0, slack) if studio.chance(0.5) else studio.between(0, min(slack, 0.2))
    events = []
    for k, pitch in enumerate(notes):
        start = first + k * every
        events.append(studio.note(start, min(every * 1.05, duration_s - start), family, program, pitch, gain))
    return events, {"family": family.name, "direction": direction}


def melody_clip(studio: Studio, duration_s: float) -> Clip:
    """A rising or falling melody, sometimes over drums; at least 1 s."""
    events, facts = melody_events(studio, duration_s)
    if studio.chance(0.2):
        events += studio.loop(duration_s, gain=studio.between(0.3, 0.6))
    return studio.finished(events, duration_s, facts)


def tempo_clip(studio: Studio, duration_s: float) -> Clip:
    """A drum loop, or one instrument on every beat, at a slow, medium or fast tempo; at least 2.2 s."""
    tempo = list(TEMPI)[int(studio.rng.integers(3))]
    bpm = studio.between(*TEMPI[tempo])
    if studio.chance(0.65):
        return studio.finished(studio.loop(duration_s, bpm), duration_s, {"tempo": tempo})
    family = studio.family()
    program = studio.program(family)
    first, beat = studio.between(0, 0.15), 60 / bpm
    events = []
    for start in np.arange(first, duration_s - 0.1, beat):
        pitch = None
        while pitch is None:
            pitch = studio.pitches(family, program, (0,), single=False)
        events.append(studio.note(float(start), min(beat, duration_s - start), family, program, pitch[0]))
    return studio.finished(events, duration_s, {"tempo": tempo, "family": family.name})


def onset_clip(studio: Studio, duration_s: float) -> Clip:
    """Two notes; the second begins on a grid of half seconds, up to 60 ms beside it; at least 1.4 s."""
    family = studio.family()
    program = studio.program(family)
    last = int((duration_s - 0.5) / ONSET_GRID_S)
    at = int(studio.rng.integers(1, max(last, 1) + 1)) * ONSET_GRID_S
    first, second = studio.between(0, 0.1), at + studio.between(-0.06, 0.06)
    notes = None
    while notes is None:
        notes = studio.pitches(family, program, (0, int(studio.rng.integers(-7, 8))), single=False)
    events = [
        studio.note(first, min(studio.between(0.4, 2.4), second - first), family, program, notes[0]),
        studio.note(second, min(studio.between(0.5, 2.4), duration_s - second), family, program, notes[1]),
    ]
    return studio.finished(events, duration_s, {"onset": f"{at:.1f}", "family": family.name})


STEMS = ("drums", "bass", "chords", "melody")


def stems_pair(studio: Studio, duration_s: float) -> tuple[Clip, Clip, str]:
    """A mix of three or four stems, the same mix without one of them, and which one; at least 2.2 s."""
    present = [stem for stem in STEMS if studio.chance(0.7)]
    while len(present) < 2:
        present = [stem for stem in STEMS if studio.chance(0.7)]
    missing = str(studio.rng.choice(present))
    made: dict[str, Callable[[], list[Event]]] = {
        "drums": lambda: studio.loop(duration_s, gain=0.8),
        "bass": lambda: _bass_line(studio, duration_s),
        "chords": lambda: chord_events(studio, duration_s, gain=0.6)[0],
        "melody": lambda: melody_events(studio, duration_s, gain=0.8)[0],
    }
    stems = {stem: made[stem]() for stem in present}
    colour = studio.colour()
    everything = [event for events in stems.values() for event in events]
    rest = [event for stem, events in stems.items() if stem != missing for event in events]
    other = replace(colour, seed=colour.seed + 1)
    return studio.finished(everything, duration_s, {}, colour), studio.finished(rest, duration_s, {}, other), missing


def _bass_line(studio: Studio, duration_s: float) -> list[Event]:
    family = next(f for f in FAMILIES if f.name == "bass")
    program, every = studio.program(family), studio.between(0.4, 0.9)
    events = []
    for start in np.arange(studio.between(0, 0.2), duration_s - 0.2, every):
        notes = None
        while notes is None:
            notes = studio.pitches(family, program, (0,), single=False)
        events.append(studio.note(float(start), min(every, duration_s - start), family, program, notes[0], 0.9))
    return events
