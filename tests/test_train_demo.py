"""The demo training tool: what it draws, what it asks, and that its shortcuts compute what the engine computes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from audiollm import Session

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.train_demo import batches, heldout, instruments, questions, shapes, targets
from tools.train_demo.bank import SOUND_FONT, Voice, midi_file, open_bank
from tools.train_demo.passes import Pass, packed
from tools.train_demo.prompts import Prompter, request
from tools.train_demo.scenes import Clip, Palette, Studio, onset_clip
from tools.train_demo.training import new_family

NAMES = tuple(shapes.MARKERS)


@dataclass(frozen=True)
class Sines:
    """A bank that needs no sound font: a sine at a voice's pitch, fading."""

    def sound(self, voice: Voice, n: int) -> np.ndarray:
        hertz = 440 * 2 ** ((voice.pitch - 69) / 12)
        times = np.arange(n) / 16_000
        return (0.2 * np.sin(2 * np.pi * hertz * times) * np.exp(-times)).astype(np.float32)

    def peak(self, voice: Voice) -> float:
        return 0.2


def studio(seed: int = 0, palette: Palette | None = None) -> Studio:
    bank: Any = Sines()
    return Studio(bank, palette or Palette(), np.random.default_rng(seed))


def pitched(clip: Clip) -> list[Voice]:
    return [event.voice for event in clip.events if not event.voice.is_drum]


def test_note_names_are_flat_and_have_the_midi_octave() -> None:
    assert [instruments.note_name(pitch) for pitch in (48, 60, 61, 83)] == ["C3", "C4", "Db4", "B5"]


def test_programs_belong_to_one_family_and_some_are_held_out() -> None:
    programs = [program for family in instruments.FAMILIES for program in family.programs]
    assert len(programs) == len(set(programs))
    for family in instruments.FAMILIES:
        assert family.held_out and set(family.held_out) < set(family.programs)
    assert set(instruments.HELD_OUT_KITS) < set(instruments.KITS)


@pytest.mark.parametrize("kind", questions.SINGLE + questions.MULTIPLE)
def test_training_hears_no_held_out_program_kit_or_cell(kind: str) -> None:
    for seed in range(12):
        scene = questions.draw(studio(seed), kind, 2.5)
        for clip in scene.clips:
            for event in clip.events:
                if event.voice.is_drum:
                    assert event.voice.program not in instruments.HELD_OUT_KITS
                else:
                    assert all(event.voice.program not in family.held_out for family in instruments.FAMILIES)
                    assert not instruments.is_held_out_cell(event.voice.program, event.voice.pitch)


def test_held_out_questions_are_the_same_at_every_call_and_play_what_they_say() -> None:
    bank: Any = Sines()
    for task in heldout.TASKS:
        for number in (0, 1, 7):
            one, two = (heldout.item(bank, task, number) for _ in range(2))
            assert one.asked == two.asked and one.held_out_programs == (number % 2 == 1)
            assert all(
                np.array_equal(a.samples, b.samples) for a, b in zip(one.scene.clips, two.scene.clips, strict=True)
            )
            played = {voice.program for clip in one.scene.clips for voice in pitched(clip)}
            held_out = {program for family in instruments.FAMILIES for program in family.held_out}
            assert played <= held_out if one.held_out_programs else not played & held_out
    windows = heldout.item(bank, "note", 3, windows=True)
    assert 30.5 <= windows.scene.clips[0].duration_s <= 36


def test_single_held_out_notes_of_train_programs_are_at_cells_that_training_left_out() -> None:
    bank: Any = Sines()
    for number in range(0, 20, 2):
        for voice in pitched(heldout.item(bank, "note", number).scene.clips[0]):
            assert instruments.is_held_out_cell(voice.program, voice.pitch)


def test_facts_are_true() -> None:
    for seed in range(20):
        chord = questions.draw(studio(seed), "chord", 2.0).clips[0]
        pitches = sorted({voice.pitch for voice in pitched(chord)})
        assert pitches[1] - pitches[0] == (4 if chord.facts["quality"] == "major" else 3)
        assert chord.facts["chord"].split()[0] == instruments.NAMES[pitches[0] % 12]
        melody = questions.draw(studio(seed), "melody", 3.0).clips[0]
        steps = np.diff([voice.pitch for voice in pitched(melody)])
        assert (steps > 0).all() if melody.facts["direction"] == "rising" else (steps < 0).all()
        clip = onset_clip(studio(seed), 5.0)
        assert abs(clip.events[1].start_s - float(clip.facts["onset"])) <= 0.07
        pair = questions.draw(studio(seed), "pair", 1.5)
        higher = next(asked.answer for asked in pair.asked if asked.task == "higher")
        top = int(np.argmax([pitched(clip)[0].pitch for clip in pair.clips]))
        assert higher == ("AB" if pair.opening else "12")[top]


def test_the_missing_stem_is_in_the_first_source_only() -> None:
    for seed in range(20):
        scene = questions.draw(studio(seed), "stems", 3.0)
        whole, rest = ([event.family for event in clip.events] for clip in scene.clips)
        assert len(rest) < len(whole)
        if scene.asked[0].answer in ("drums", "bass"):
            assert scene.asked[0].answer in whole
        if scene.asked[0].answer == "drums":
            assert "drums" not in rest


@pytest.mark.parametrize(
    ("task", "said", "answer", "right"),
    [
        ("note", " Db4\n", "Db4", True),
        ("note", "db4", "Db4", False),
        ("note", "Db4.", "Db4", False),
        ("quality", "C minor", "Db minor", True),
        ("quality", "Db major", "Db minor", False),
        ("onset", "1.5 seconds", "1.5 seconds", True),
        ("onset", "1.7 seconds", "1.5 seconds", True),
        ("onset", "2.0 seconds", "1.5 seconds", False),
        ("onset", "soon", "1.5 seconds", False),
        ("quality", "", "Db minor", False),
    ],
)
def test_what_counts_as_right(task: str, said: str, answer: str, right: bool) -> None:
    assert questions.is_right(task, said, answer) is right


def test_targets_are_where_the_notes_are() -> None:
    clip = onset_clip(studio(3), 4.0)
    told = targets.targets_of(clip, 100, 0.04)
    first, second = clip.events
    at = int(second.start_s / 0.04) + 1
    assert told.binary[at, second.voice.pitch - instruments.LOWEST] == 1
    assert told.binary[int(first.start_s / 0.04), first.voice.pitch - instruments.LOWEST] == 1
    assert told.classes[60, 4] == int(60 * 0.04 / 0.5)
    assert (told.classes[:, 0] == -100).all()


def test_a_step_draws_the_same_scenes_again_and_no_clip_is_too_long() -> None:
    bank: Any = Sines()
    for part in (0.01, 0.5):
        one, two = (batches.groups(bank, 1, 8, part) for _ in range(2))
        assert [[s.asked for s in group] for group in one] == [[s.asked for s in group] for group in two]
    assert all(clip.duration_s <= 4 for group in batches.groups(bank, 1, 3, 0.01) for s in group for clip in s.clips)


@pytest.mark.parametrize("name", NAMES)
def test_the_training_pass_gives_the_engines_ids_and_logits(name: str, tmp_path: Path) -> None:
    family = new_family(name, tmp_path, 1)
    family.model.eval()
    session = Session(family.model, family.processor, family)
    lengths = {"note": 0.71, "chord": 3.3, "onset": 31.123, "pair": 5.03, "triple": 1.2}
    scenes = [questions.draw(studio(4), kind, length) for kind, length in lengths.items()]
    scenes.append(questions.text_scene(studio(5)))
    prompter, run = Prompter(family), Pass(family)
    rows = [prompter.row(scene, 3) for scene in scenes]
    batch = packed(rows, family.pad_id)
    waves = [[clip.samples for clip in scene.clips] for scene in scenes if scene.clips]
    with torch.no_grad():
        projected, streams = run.audio(waves, [[run.mel(wave) for wave in row] for row in waves])
        logits = run.logits(run.states(batch, projected, streams), batch)
    at = 0
    for scene, row in zip(scenes, rows, strict=True):
        for k, block in enumerate(row.blocks):
            prepared = session.prepare([request(scene, k)])
            assert prepared.inputs["input_ids"][0].tolist() == list(row.prefix + block.asked)
            if k in (0, 2):
                assert torch.allclose(session.forward(prepared).logits[0, -1], logits[at], atol=1e-4)
            at += len(block.answer)


@pytest.mark.parametrize("name", NAMES)
def test_answer_words_are_single_tokens_and_snapshots_are_small(name: str, tmp_path: Path) -> None:
    family = new_family(name, tmp_path, 1)
    for word in ("Db", "piano", "rising", " minor", " seconds"):
        assert len(family.tokenizer(word, add_special_tokens=False)["input_ids"]) == 1
    shapes.save_weights(name, family.model, tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 8_000_000


def test_a_midi_file_is_one_track_of_known_length() -> None:
    data = midi_file([Voice(0, 60, 70), Voice(0, 200 % 128, 110)])
    assert data[:4] == b"MThd" and data[14:18] == b"MTrk"
    assert int.from_bytes(data[18:22], "big") == len(data) - 22
    assert bytes([0x90, 60, 70]) in data and data.endswith(b"\xff\x2f\x00")


@pytest.mark.skipif(not SOUND_FONT.is_file(), reason="fluidsynth's sound font is not installed")
def test_fluidsynth_renders_the_pitch_that_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    voices = [Voice(73, 69, 110), Voice(73, 81, 110)]
    monkeypatch.setattr("tools.train_demo.bank.every_voice", lambda: voices)
    bank = open_bank(tmp_path)
    for voice in voices:
        spectrum = np.abs(np.fft.rfft(bank.sound(voice, 16_000) * np.hanning(16_000)))
        hertz = 440 * 2 ** ((voice.pitch - 69) / 12)
        assert abs(int(spectrum.argmax()) - hertz) < 0.03 * hertz
