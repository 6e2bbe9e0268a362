"""What is asked of clips, in which words, and what the right answer is.

A question block is what follows the audio in the user's turn; the sources stand before it, with or without labels. Answers
are short, and "major or minor?" is answered with the whole chord's name, so that the last word is what was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from . import scenes
from .scenes import Clip, Studio

MARKER = "<audio>"

WORDS: dict[str, tuple[str, ...]] = {
    "family": ("Which instrument is playing?", "Which instrument is this?", "Name the instrument."),
    "note": ("Which note is this?", "Which note is playing?", "Name the note with its octave."),
    "pitch_class": ("Which pitch class is this?", "Name the note without its octave.", "Which pitch class is playing?"),
    "texture": ("Is this one note or a chord?", "One note or a chord?"),
    "chord": ("Which chord is this?", "Which chord is playing?", "Name the chord."),
    "quality": ("Is it major or minor?", "Major or minor?", "Is the chord major or minor?"),
    "drums": ("Is there a drum?", "Are there drums?", "Do you hear drums?"),
    "tempo": ("Is the tempo slow, medium or fast?", "How fast is it: slow, medium or fast?", "What is the tempo?"),
    "direction": ("Is the melody rising or falling?", "Rising or falling?", "Does the melody rise or fall?"),
    "onset": ("When does the second note begin?", "At which second does the second note begin?"),
    "higher": ("Which is higher, {0} or {1}?", "Which of {0} and {1} is higher?", "Which note is higher, {0} or {1}?"),
    "same": ("Is it the same instrument in {0} and {1}?", "Do {0} and {1} have the same instrument?"),
    "missing": ("Which stem is missing from {1}?", "{1} lacks one stem of {0}. Which one?"),
    "highest": ("Which is the highest, {0}, {1} or {2}?", "Which of {0}, {1} and {2} is the highest?"),
    "note_of": ("Which note is {0}?", "Name the note of {0} with its octave."),
}
# Without a source: what it can and cannot say.
TEXT = (
    ("What can you answer?", "Questions about notes, chords, instruments, tempo and drums."),
    ("What are you?", "A small model that listens to music."),
    ("Hello", "Hello! Play me some music."),
    ("Hello!", "Hello! Play me some music."),
    ("Which note is this?", "There is no audio."),
    ("Which instrument is playing?", "There is no audio."),
    ("Which chord is this?", "There is no audio."),
    ("Is there a drum?", "There is no audio."),
    ("Describe this track.", "There is no audio."),
)
# How one source may stand before its question. None: the prompt has no marker and the family places the source.
ONE_SOURCE = (None, None, f"{MARKER}\n", f"Audio: {MARKER}\n", f"Audio A: {MARKER}\n", f"Listen: {MARKER}\n")
LETTERS, NUMBERS = ("A", "B", "C"), ("1", "2", "3")
SINGLE = ("note", "chord", "melody", "tempo", "onset")
MULTIPLE = ("pair", "stems", "triple")


@dataclass(frozen=True)
class Asked:
    """One question: its task, its words and its answer."""

    task: str
    words: str
    answer: str


@dataclass(frozen=True, eq=False)
class Scene:
    """Clips, how they are written before the question (None: left to the family), and the questions about them."""

    kind: str
    clips: tuple[Clip, ...]
    opening: str | None
    asked: tuple[Asked, ...]


def least_s(kind: str) -> float:
    """The shortest clip of a kind, in seconds."""
    return {"melody": 1.1, "tempo": 2.2, "onset": 1.4, "stems": 2.2}.get(kind, 0.6)


def ask(studio: Studio, task: str, answer: str, names: Sequence[str] = ()) -> Asked:
    """A question in one of its wordings."""
    words = WORDS[task][int(studio.rng.integers(len(WORDS[task])))]
    return Asked(task, words.format(*names), answer)


def answer_for(task: str, fact: str, chord: str | None = None) -> str:
    """The text that answers `task`."""
    if task == "onset":
        return f"{fact} seconds"
    return str(chord) if task == "quality" else fact


def single_scene(studio: Studio, kind: str, duration_s: float) -> Scene:
    """One clip and everything that can be asked about it."""
    make = {
        "note": scenes.note_clip,
        "chord": scenes.chord_clip,
        "melody": scenes.melody_clip,
        "tempo": scenes.tempo_clip,
        "onset": scenes.onset_clip,
    }[kind]
    clip = make(studio, max(duration_s, least_s(kind)))
    asked = [
        ask(studio, task, answer_for(task, fact, clip.facts.get("chord")))
        for task, fact in clip.facts.items()
        if task in WORDS
    ]
    opening = ONE_SOURCE[int(studio.rng.integers(len(ONE_SOURCE)))]
    return Scene(kind, (clip,), opening, tuple(asked))


def multiple_scene(studio: Studio, kind: str, duration_s: float) -> Scene:
    """Two or three clips that are compared; each is `duration_s` long at most."""
    numbered = studio.chance(0.3)
    names = tuple(f"audio {n}" for n in NUMBERS) if numbered else LETTERS
    short = NUMBERS if numbered else LETTERS
    if kind == "stems":
        first, second, missing = scenes.stems_pair(studio, max(duration_s, least_s(kind)))
        clips: tuple[Clip, ...] = (first, second)
        asked = [ask(studio, "missing", missing, names)]
    else:
        clips, asked = _compared(studio, 3 if kind == "triple" else 2, duration_s, names, short)
    opening = None
    if not numbered:
        opening = "".join(f"Audio {letter}: {MARKER}\n" for letter in LETTERS[: len(clips)])
    return Scene(kind, clips, opening, tuple(asked))


def _compared(
    studio: Studio, n: int, duration_s: float, names: Sequence[str], short: Sequence[str]
) -> tuple[tuple[Clip, ...], list[Asked]]:
    """Note clips of different pitches, two of which have the same program half of the time."""
    while True:
        family = studio.family()
        same = n == 2 and studio.chance(0.5)
        program = studio.program(family) if same else None
        lengths = [max(0.6, duration_s * studio.between(0.6, 1.0)) for _ in range(n)]
        clips = tuple(scenes.note_clip(studio, length, family if same else None, program) for length in lengths)
        pitches = [next(e.voice.pitch for e in clip.events if not e.voice.is_drum) for clip in clips]
        families = {clip.facts["family"] for clip in clips}
        gaps = np.diff(np.sort(pitches))
        if gaps.min() < 2 or (n == 2 and not same and len(families) < 2):
            continue
        break
    top = short[int(np.argmax(pitches))]
    if n == 3:
        return clips, [ask(studio, "highest", top, names)]
    which = int(studio.rng.integers(2))
    return clips, [
        ask(studio, "higher", top, names),
        ask(studio, "same", "yes" if same else "no", names),
        ask(studio, "note_of", clips[which].facts["note"], (names[which],)),
    ]


def draw(studio: Studio, kind: str, duration_s: float) -> Scene:
    """A scene of any kind."""
    return single_scene(studio, kind, duration_s) if kind in SINGLE else multiple_scene(studio, kind, duration_s)


def text_scene(studio: Studio) -> Scene:
    """A question without a source."""
    words, answer = TEXT[int(studio.rng.integers(len(TEXT)))]
    return Scene("text", (), None, (Asked("text", words, answer),))


def is_right(task: str, said: str, answer: str) -> bool:
    """Whether greedy text answers a question.

    Exact match of the stripped text; for "quality" its last word, since the chord's name carries it; for "onset" a number
    within a quarter second, as the task is defined.
    """
    said = said.strip()
    if task == "quality":
        return said.split()[-1:] == answer.split()[-1:]
    if task == "onset":
        number, _, unit = said.partition(" ")
        try:
            return unit == "seconds" and abs(float(number) - float(answer.split()[0])) <= 0.25
        except ValueError:
            return False
    return said == answer
