"""The notes and drum hits that clips are mixed from: MIDI written here, rendered by fluidsynth, kept as one array.

A cell is one note of `CELL_S` seconds at 16 kHz, mono int16; a program has two loudnesses. The array is made once and
mapped into memory, so that several trainings share it.
"""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile

from .instruments import FAMILIES, HITS, KITS

SAMPLE_RATE = 16_000
CELL_S, HELD_S = 2.4, 2.0  # a cell's length, and how long its key is down
CELL = round(CELL_S * SAMPLE_RATE)
VELOCITIES = (70, 110)
SOUND_FONT = Path("/usr/share/sounds/sf2/FluidR3_GM.sf2")
_TICKS = 480  # a quarter note, which lasts 0.5 s
_SLOT_S = 2.5  # from one note's start to the next one's: a cell, then silence is forced


@dataclass(frozen=True)
class Voice:
    """One rendered sound: program (or kit), pitch (or drum key) and MIDI velocity."""

    program: int
    pitch: int
    velocity: int
    is_drum: bool = False


@dataclass(frozen=True)
class Bank:
    """All cells [N, CELL] int16, their peaks [N] at full scale 1.0, and where each voice is among them."""

    cells: np.ndarray
    peaks: np.ndarray
    index: dict[Voice, int]

    def sound(self, voice: Voice, n: int) -> np.ndarray:
        """The first `n` samples of a voice's cell, float32 at full scale 1.0."""
        return self.cells[self.index[voice], :n].astype(np.float32) / 32_768

    def peak(self, voice: Voice) -> float:
        """The loudest sample of a voice's cell."""
        return float(self.peaks[self.index[voice]])


def every_voice() -> list[Voice]:
    """All that is rendered, in the order of the cells."""
    voices = [
        Voice(program, pitch, velocity)
        for family in FAMILIES
        for program in family.programs
        for velocity in VELOCITIES
        for pitch in range(family.lowest, family.highest + 1)
    ]
    drums = [Voice(kit, key, velocity, True) for kit in KITS for velocity in VELOCITIES for key in HITS.values()]
    return voices + drums


def open_bank(folder: Path, sound_font: Path = SOUND_FONT) -> Bank:
    """The bank in `folder`, rendered first where it is not there yet. Raises: RuntimeError without fluidsynth."""
    path, voices = folder / "cells.npy", every_voice()
    told = json.dumps([[v.program, v.pitch, v.velocity, v.is_drum] for v in voices])
    if not path.is_file() or (folder / "voices.json").read_text() != told:
        folder.mkdir(parents=True, exist_ok=True)
        cells = _rendered(voices, sound_font)
        np.save(path, cells)
        np.save(folder / "peaks.npy", np.abs(cells).max(axis=1) / np.float32(32_768))
        (folder / "voices.json").write_text(told)
    peaks = np.load(folder / "peaks.npy")
    return Bank(np.load(path, mmap_mode="r"), peaks, {voice: i for i, voice in enumerate(voices)})


def _rendered(voices: list[Voice], sound_font: Path) -> np.ndarray:
    """Cells [N, CELL] of all voices, one MIDI file a program."""
    if shutil.which("fluidsynth") is None or not sound_font.is_file():
        raise RuntimeError(f"fluidsynth or {sound_font} is missing; install fluidsynth and fluid-soundfont-gm")
    groups: dict[tuple[int, bool], list[int]] = {}
    for i, voice in enumerate(voices):
        groups.setdefault((voice.program, voice.is_drum), []).append(i)
    cells = np.zeros((len(voices), CELL), dtype=np.int16)

    def render(group: list[int]) -> None:
        cells[group] = _played([voices[i] for i in group], sound_font)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(render, groups.values()))
    return cells


def _played(voices: list[Voice], sound_font: Path) -> np.ndarray:
    with tempfile.TemporaryDirectory() as folder:
        midi, wave = Path(folder) / "notes.mid", Path(folder) / "notes.wav"
        midi.write_bytes(midi_file(voices))
        command = [
            "fluidsynth",
            "-q",
            "-n",
            "-i",
            "-R",
            "0",
            "-C",
            "0",
            "-g",
            "0.6",
            "-r",
            str(SAMPLE_RATE),
            "-F",
            wave,
        ]
        subprocess.run([*map(str, command), str(sound_font), str(midi)], check=True, capture_output=True)
        stereo, rate = soundfile.read(wave, dtype="float32", always_2d=True)
    assert rate == SAMPLE_RATE
    mono = stereo.mean(axis=1)
    slot = round(_SLOT_S * SAMPLE_RATE)
    mono = np.pad(mono, (0, max(0, slot * len(voices) - len(mono))))
    cells = np.stack([mono[k * slot : k * slot + CELL] for k in range(len(voices))])
    cells[:, -800:] *= np.linspace(1, 0, 800, dtype=np.float32)
    return np.round(np.clip(cells, -1, 1) * 32_767).astype(np.int16)


def midi_file(voices: list[Voice]) -> bytes:
    """A Standard MIDI File of one track: the voices, all of one program, one after the other every `_SLOT_S` seconds."""
    channel = 9 if voices[0].is_drum else 0
    seconds = 2 * _TICKS  # ticks a second at 120 beats a minute
    events: list[tuple[int, bytes]] = [(0, bytes([0xC0 | channel, voices[0].program]))]
    for k, voice in enumerate(voices):
        start = round(k * _SLOT_S * seconds)
        events.append((start, bytes([0x90 | channel, voice.pitch, voice.velocity])))
        events.append((start + round(HELD_S * seconds), bytes([0x80 | channel, voice.pitch, 0])))
        events.append((start + round((_SLOT_S - 0.02) * seconds), bytes([0xB0 | channel, 120, 0])))  # all sound off
    track = b"\x00\xff\x51\x03" + (500_000).to_bytes(3, "big")
    now = 0
    for at, message in events:
        track += _variable(at - now) + message
        now = at
    track += _variable(round(0.1 * seconds)) + b"\xff\x2f\x00"
    return b"MThd" + struct.pack(">IHHH", 6, 0, 1, _TICKS) + b"MTrk" + struct.pack(">I", len(track)) + track


def _variable(value: int) -> bytes:
    """MIDI's variable-length number."""
    parts = [value & 0x7F]
    while value := value >> 7:
        parts.append(0x80 | value & 0x7F)
    return bytes(reversed(parts))
