"""Compose and render the embedded demo clips: `python tools/make_demo_clips.py [OUT_DIR]`.

The piece is written here as notes in beats, turned into MIDI bytes by hand and rendered with fluidsynth (Debian
packages `fluidsynth` and `fluid-soundfont-gm`), with reverb and chorus off so that rendering is linear.  The script
writes `mix.flac`, its stems `drums.flac`, `bass.flac` and `keys.flac`, `long_mix.flac` and `clips.json`, checks them
and prints what it measured.  There are no random numbers in it.  The tool needs numpy, scipy and
soundfile.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile as sf
from scipy.signal import resample_poly

BPM = 96
BEAT_S = 60 / BPM
PPQ = 480
RATE = 44_100
LONG_RATE = 24_000
GAIN = 0.45
STEP = 4  # sample values are multiples of this: 14 bits in 16, for small files
FADE_S = 0.75
PEAK_LIMIT_DB = -1.0
SOUNDFONT = Path("/usr/share/sounds/sf2/FluidR3_GM.sf2")
CLIPS = Path(__file__).resolve().parents[1] / "audiollm" / "demo" / "clips"
STEMS = ("drums", "bass", "keys")
CENTRED = ("drums", "bass")  # stems whose two channels are the same

Line = list[tuple[float, float, int]]  # one bar as (beat, length in beats, MIDI pitch)


class Voice(NamedTuple):
    """One MIDI channel: the stem it belongs to, its General MIDI program (from 0), pan and volume (0 to 127)."""

    stem: str
    channel: int
    program: int
    pan: int
    volume: int


VOICES = {
    "electric_piano": Voice("keys", 0, 4, 56, 92),
    "fingered_bass": Voice("bass", 1, 33, 64, 100),
    "strings": Voice("keys", 2, 48, 64, 84),
    "vibraphone": Voice("keys", 3, 11, 80, 100),
    "acoustic_bass": Voice("bass", 4, 32, 64, 118),
    "drum_kit": Voice("drums", 9, 0, 64, 127),
}


class Note(NamedTuple):
    """A note: the voice that plays it, its start and length in beats, MIDI pitch and velocity."""

    voice: str
    start: float
    length: float
    pitch: int
    velocity: int


class Span(NamedTuple):
    """A labelled stretch of the piece in beats."""

    start: float
    end: float
    label: str


class Piece(NamedTuple):
    """Notes with their chords and sections, the last struck beat, and the length of the clip in seconds."""

    notes: list[Note]
    chords: list[Span]
    sections: list[Span]
    last_beat: int
    length_s: float


# ------------------------------------------------------------------------------------------------------ the score

# Section A, written in C major; section A' plays it two semitones higher.
A_CHORDS = [("C", "maj7", (55, 59, 60, 64)), ("A", "m7", (55, 57, 60, 64)), ("D", "m7", (53, 57, 60, 62))]
G7 = (53, 55, 59, 62)
COMPING = ((0, 1.4, 78), (1.5, 0.9, 66), (2.5, 0.4, 60), (3, 0.9, 70))
A_MELODY = [
    [(0, 1, 76), (1.5, 0.5, 74), (2, 0.5, 72), (2.5, 1.5, 67)],
    [(0, 1, 72), (1.5, 0.5, 71), (2, 0.5, 69), (2.5, 1.5, 76)],
    [(0, 1, 77), (1.5, 0.5, 76), (2, 0.5, 74), (2.5, 1, 69), (3.5, 0.5, 72)],
    [(0, 1, 71), (1, 0.5, 74), (1.5, 0.75, 77), (2.5, 0.5, 76), (3, 1, 74)],
]
A_BASS = [
    [(0, 1.25, 36), (1.5, 0.5, 36), (2, 0.75, 43), (3, 0.5, 40), (3.5, 0.5, 35)],
    [(0, 1.25, 33), (1.5, 0.5, 33), (2, 0.75, 40), (3, 0.5, 36), (3.5, 0.5, 37)],
    [(0, 1.25, 38), (1.5, 0.5, 38), (2, 0.75, 45), (3, 0.5, 41), (3.5, 0.5, 32)],
    [(0, 1.25, 31), (1.5, 0.5, 31), (2, 0.75, 38), (3, 0.5, 33), (3.5, 0.5, 35)],
]

# Section B: strings hold the chord, the vibraphone breaks it, an acoustic bass plays halves.
B_BARS = [
    ("Fmaj7", (57, 60, 64, 69), (72, 76, 77, 81), (41, 36)),
    ("Em7", (55, 59, 62, 67), (71, 74, 76, 79), (40, 35)),
    ("Dm7", (53, 57, 60, 65), (69, 72, 74, 77), (38, 45)),
    ("A7", (52, 55, 61, 64), (69, 73, 76, 79), (33, 40)),
]
B_VIBES = (0, 1, 2, 3, 2, 1, 3, 2)

KICK, STICK, SNARE, CLOSED_HAT, OPEN_HAT, CRASH, MARACAS = 36, 37, 38, 42, 46, 49, 70
TOMS = (50, 47, 45, 43)
GROOVE = [(0, KICK, 104), (1, SNARE, 98), (1.5, KICK, 88), (2.5, KICK, 96), (2.75, SNARE, 38), (3, SNARE, 100)]
SOFT_GROOVE = [(0, KICK, 84), (1, STICK, 84), (2, KICK, 70), (2.5, KICK, 64), (3, STICK, 88)]


def notes_of(voice: str, bar: int, line: Line, velocity: int, shift: int = 0) -> list[Note]:
    """Notes of one bar from (beat, length, pitch) triples; notes on a beat are a little louder."""
    at = 4 * bar
    return [
        Note(voice, at + beat, length, pitch + shift, velocity + (6 if beat == int(beat) else 0))
        for beat, length, pitch in line
    ]


def comping(bar: int, pitches: tuple[int, ...], shift: int = 0) -> list[Note]:
    """The electric piano's chord rhythm over one bar."""
    at = 4 * bar
    return [
        Note("electric_piano", at + beat, length, pitch + shift, velocity)
        for beat, length, velocity in COMPING
        for pitch in pitches
    ]


def drum(at: float, pitch: int, velocity: int) -> Note:
    """One hit of the drum kit."""
    return Note("drum_kit", at, 0.2, pitch, velocity)


def fill(bar: int) -> list[Note]:
    """A fill over the last two beats of a bar: four sixteenths on the snare, then four down the toms."""
    at = 4 * bar + 2
    snare = [drum(at + i / 4, SNARE, 72 + 8 * i) for i in range(4)]
    return snare + [drum(at + 1 + i / 4, pitch, 92 + 5 * i) for i, pitch in enumerate(TOMS)]


def rock_bar(bar: int, with_fill: bool = False) -> list[Note]:
    """One bar of the main groove: eighths on the hi-hat, an open one before the next bar, or a fill."""
    stop = 2 if with_fill else 4
    hits = [drum(4 * bar + beat, pitch, velocity) for beat, pitch, velocity in GROOVE if beat < stop]
    hats = [drum(4 * bar + i / 2, CLOSED_HAT, 44 if i % 2 else 60) for i in range(2 * stop)]
    if with_fill:
        return hits + hats + fill(bar)
    return hits + hats[:-1] + [drum(4 * bar + 3.5, OPEN_HAT, 52)]


def soft_bar(bar: int, with_fill: bool = False) -> list[Note]:
    """One bar of section B's groove: maracas and side stick."""
    stop = 2 if with_fill else 4
    hits = [drum(4 * bar + beat, pitch, velocity) for beat, pitch, velocity in SOFT_GROOVE if beat < stop]
    shaken = [drum(4 * bar + i / 2, MARACAS, 50 if i % 2 else 66) for i in range(2 * stop)]
    return hits + shaken + (fill(bar) if with_fill else [])


def ending(bar: int, pitches: tuple[int, ...], melody: int, bass: int, beats: float) -> list[Note]:
    """The last chord, held, with kick and crash."""
    at = 4 * bar
    keys = [Note("electric_piano", at, beats, pitch, 80) for pitch in (*pitches, melody)]
    hits = [drum(at, KICK, 104), drum(at, CRASH, 64)]
    return [*keys, Note("fingered_bass", at, beats, bass, 92), *hits]


def section_a(first: int, bars: int, shift: int = 0) -> list[Note]:
    """The first `bars` bars of section A from bar `first` on, `shift` semitones up; a fourth bar has the fill."""
    chords = [pitches for _, _, pitches in A_CHORDS] + [G7]
    notes = []
    for i in range(bars):
        notes += comping(first + i, chords[i], shift)
        notes += notes_of("electric_piano", first + i, A_MELODY[i], 90, shift)
        notes += notes_of("fingered_bass", first + i, A_BASS[i], 92, shift)
        notes += rock_bar(first + i, with_fill=i == 3)
    return notes


def section_b(first: int) -> list[Note]:
    """The four bars of section B from bar `first` on."""
    notes = []
    for i, (_, pad, broken, roots) in enumerate(B_BARS):
        at = 4 * (first + i)
        notes += [Note("strings", at, 4, pitch, 78) for pitch in pad]
        notes += [Note("vibraphone", at + k / 2, 0.5, broken[n], 72 + 8 * (k % 2 == 0)) for k, n in enumerate(B_VIBES)]
        notes += [Note("acoustic_bass", at + 2 * k, 1.9, pitch, 96 - 8 * k) for k, pitch in enumerate(roots)]
        notes += soft_bar(first + i, with_fill=i == 3)
    return notes


def dominant_tag(first: int) -> list[Note]:
    """Two bars on A before the end: A7sus4 for six beats, then A7 for two, with the fill under it."""
    suspended, resolved = (55, 57, 62, 64), (55, 57, 61, 64)
    melody: list[Line] = [[(0, 1.5, 76), (1.5, 0.5, 74), (2, 2, 76)], [(0, 1, 74), (1, 1, 76), (2, 1, 73), (3, 1, 76)]]
    bass: list[Line] = [
        [(0, 1.25, 33), (1.5, 0.5, 33), (2, 0.75, 40), (3, 0.9, 33)],
        [(0, 1.9, 33), (2, 0.9, 33), (3, 0.9, 37)],
    ]
    notes = comping(first, suspended)
    for i in range(2):
        notes += notes_of("electric_piano", first + i, melody[i], 90)
        notes += notes_of("fingered_bass", first + i, bass[i], 92)
        notes += rock_bar(first + i, with_fill=i == 1)
    at = 4 * (first + 1)
    notes += [Note("electric_piano", at, 1.9, pitch, 78) for pitch in suspended]
    return notes + [Note("electric_piano", at + 2, 1.9, pitch, 78) for pitch in resolved]


def bars_as_spans(first: int, labels: list[str]) -> list[Span]:
    """One span a bar."""
    return [Span(4 * (first + i), 4 * (first + i + 1), label) for i, label in enumerate(labels)]


def short_piece() -> Piece:
    """Section A in C major and a last chord: 12 seconds."""
    length_s = 12.0
    end = length_s / BEAT_S
    chords = bars_as_spans(0, ["Cmaj7", "Am7", "Dm7", "G7"])
    notes = section_a(0, 4) + ending(4, A_CHORDS[0][2], 72, 36, end - 16)
    sections = [Span(0, 16, "A (C major)"), Span(16, end, "ending (C major)")]
    return Piece(notes, [*chords, Span(16, end, "Cmaj7")], sections, 16, length_s)


def long_piece() -> Piece:
    """Section A, section B, section A' in D major with its tag, and a last chord: 36 seconds."""
    length_s = 36.0
    end = length_s / BEAT_S
    lifted = section_a(8, 3, shift=2)
    echo = [n._replace(voice="vibraphone", pitch=n.pitch + 12, velocity=62) for n in lifted if is_melody(n)]
    notes = section_a(0, 4) + section_b(4) + lifted + echo + dominant_tag(11)
    notes += ending(13, (54, 57, 61, 62), 74, 38, end - 52)
    chords = bars_as_spans(0, ["Cmaj7", "Am7", "Dm7", "G7", *(bar[0] for bar in B_BARS), "Dmaj7", "Bm7", "Em7"])
    chords += [Span(44, 50, "A7sus4"), Span(50, 52, "A7"), Span(52, end, "Dmaj7")]
    sections = [Span(0, 16, "A (C major)"), Span(16, 32, "B (leaving C major for D)")]
    sections += [Span(32, 52, "A' (D major)"), Span(52, end, "ending (D major)")]
    return Piece(notes, chords, sections, 52, length_s)


def is_melody(note: Note) -> bool:
    """Whether a note of section A' belongs to the melody (its comping chords all lie below)."""
    return note.voice == "electric_piano" and note.pitch > 67


# ------------------------------------------------------------------------------------------- MIDI and rendering


def varlen(value: int) -> bytes:
    """A MIDI variable-length quantity."""
    out = [value & 0x7F]
    while value := value >> 7:
        out.append(0x80 | value & 0x7F)
    return bytes(reversed(out))


def setup(voice: Voice) -> list[tuple[int, int, bytes]]:
    """The program change, volume and pan of one channel, as (tick, order, message)."""
    channel = voice.channel
    messages = [bytes([0xC0 | channel, voice.program]), bytes([0xB0 | channel, 7, voice.volume])]
    messages.append(bytes([0xB0 | channel, 10, voice.pan]))
    return [(0, 0, message) for message in messages]


def midi_bytes(piece: Piece, stem: str | None = None) -> bytes:
    """A format-0 standard MIDI file of the piece, or of one stem; same notes, same bytes."""
    tempo = round(60_000_000 / BPM)
    events = [(0, 0, b"\xff\x51\x03" + tempo.to_bytes(3, "big"))]
    for name, voice in VOICES.items():
        if stem in (None, voice.stem):
            events += setup(voice)
            for note in (n for n in piece.notes if n.voice == name):
                on, off = round(note.start * PPQ), round((note.start + note.length) * PPQ)
                events.append((on, 2, bytes([0x90 | voice.channel, note.pitch, note.velocity])))
                events.append((off, 1, bytes([0x80 | voice.channel, note.pitch, 0])))
    events.append((round((piece.length_s + 1) / BEAT_S * PPQ), 3, b"\xff\x2f\x00"))
    body, now = b"", 0
    for tick, _, message in sorted(events, key=lambda event: event[:2]):
        body += varlen(tick - now) + message
        now = tick
    header = b"MThd" + (6).to_bytes(4, "big") + b"".join(n.to_bytes(2, "big") for n in (0, 1, PPQ))
    return header + b"MTrk" + len(body).to_bytes(4, "big") + body


def fluidsynth_render(midi: bytes, frames: int, soundfont: Path) -> np.ndarray:
    """Render MIDI bytes to (frames, 2) floats."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "piece.mid", Path(folder) / "piece.wav"
        source.write_bytes(midi)
        command = ["fluidsynth", "-q", "-n", "-i", "-R", "0", "-C", "0", "-g", str(GAIN), "-r", str(RATE)]
        command += ["-T", "wav", "-O", "float", "-F", str(target), str(soundfont), str(source)]
        subprocess.run(command, check=True, capture_output=True)
        audio, rate = sf.read(target, dtype="float64", always_2d=True)
    if rate != RATE or len(audio) < frames:
        raise SystemExit(f"fluidsynth gave {len(audio)} frames at {rate} Hz; expected {frames} or more at {RATE} Hz")
    return audio[:frames]


def render_stem(piece: Piece, stem: str, soundfont: Path) -> np.ndarray:
    """One stem as 16-bit stereo samples, rounded to multiples of STEP, the tail faded out over FADE_S seconds."""
    frames, fade = round(piece.length_s * RATE), round(FADE_S * RATE)
    audio = fluidsynth_render(midi_bytes(piece, stem), frames, soundfont)
    if stem in CENTRED:
        audio = np.repeat(audio.mean(axis=1, keepdims=True), 2, axis=1)
    audio[-fade:] *= 0.5 + 0.5 * np.cos(np.pi * np.arange(1, fade + 1) / fade)[:, None]
    return to_steps(audio)


def together(stems: dict[str, np.ndarray]) -> np.ndarray:
    """The sum of stems."""
    return np.sum(list(stems.values()), axis=0)


def to_steps(audio: np.ndarray) -> np.ndarray:
    """Floats to 16-bit sample values, rounded to multiples of STEP."""
    return (np.round(audio * 32768 / STEP) * STEP).astype(np.int32)


def to_long_format(samples: np.ndarray) -> np.ndarray:
    """16-bit stereo samples at RATE to 16-bit mono samples at LONG_RATE."""
    divisor = math.gcd(LONG_RATE, RATE)
    mono = samples.mean(axis=1) / 32768
    return to_steps(resample_poly(mono, LONG_RATE // divisor, RATE // divisor))


def write_flac(path: Path, samples: np.ndarray, rate: int) -> None:
    """Write 16-bit FLAC at the strongest compression; a peak at or above PEAK_LIMIT_DB is an error."""
    if np.abs(samples).max() >= 32768 * 10 ** (PEAK_LIMIT_DB / 20):
        raise SystemExit(f"{path.name} peaks at or above {PEAK_LIMIT_DB} dBFS")
    sf.write(path, samples.astype(np.int16), rate, subtype="PCM_16", format="FLAC", compression_level=1.0)


# ------------------------------------------------------------------------------------- annotations and checks


def seconds(beats: float) -> float:
    """Beats to seconds, rounded to the microsecond."""
    return round(beats * BEAT_S, 6)


def truth_of(piece: Piece, rate: int) -> dict:
    """Beats, chords, sections and notes of a piece as (start_s, end_s, label) intervals."""
    beats = [[seconds(b), seconds(b + 1), f"{b // 4 + 1}.{b % 4 + 1}"] for b in range(piece.last_beat + 1)]
    spans = {
        name: [[seconds(span.start), seconds(span.end), span.label] for span in getattr(piece, name)]
        for name in ("chords", "sections")
    }
    notes = {
        voice: [
            [seconds(n.start), seconds(n.start + n.length), n.pitch] for n in sorted(piece.notes) if n.voice == voice
        ]
        for voice in VOICES
    }
    head = {"length_s": piece.length_s, "sample_rate": rate, "tempo_bpm": BPM, "beats_per_bar": 4}
    return {**head, "beats": beats, **spans, "notes": {voice: rows for voice, rows in notes.items() if rows}}


def write_annotations(path: Path, clips: dict[str, tuple[Piece, int]]) -> None:
    """Write the annotations of all clips, one list of intervals a line."""
    text = json.dumps({name: truth_of(*clip) for name, clip in clips.items()}, separators=(",", ":"))
    for break_before in ('"mix":', '"long_mix":', '"beats":', '"chords":', '"sections":', '"notes":'):
        text = text.replace(break_before, "\n" + break_before)
    for voice in VOICES:
        text = text.replace(f'"{voice}":', f'\n  "{voice}":')
    path.write_text(text + "\n")


def describe(path: Path) -> str:
    """One line about a written clip, read back with soundfile."""
    audio, rate = sf.read(path, dtype="float64", always_2d=True)
    peak = 20 * np.log10(np.abs(audio).max())
    level = 10 * np.log10(np.mean(audio**2))
    size = path.stat().st_size
    shape = f"{len(audio)} frames, {len(audio) / rate:.3f} s, {audio.shape[1]} ch, {rate} Hz"
    return f"{path.name:14} {size:8} bytes  {shape}  peak {peak:.2f} dBFS  rms {level:.2f} dBFS"


def check_sum(out: Path) -> int:
    """The largest difference, in 16-bit steps, between the written mix and the sum of the written stems."""
    parts = {name: sf.read(out / f"{name}.flac", dtype="int16")[0].astype(np.int32) for name in ("mix", *STEMS)}
    return int(np.abs(parts.pop("mix") - together(parts)).max())


def main() -> None:
    """Render everything into the output folder and print what was measured."""
    parser = argparse.ArgumentParser(description="Compose and render the embedded demo clips.")
    parser.add_argument("out", nargs="?", type=Path, default=CLIPS)
    parser.add_argument("--soundfont", type=Path, default=SOUNDFONT)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    short, long = short_piece(), long_piece()
    stems, long_stems = ({name: render_stem(piece, name, args.soundfont) for name in STEMS} for piece in (short, long))
    mix, long_mix = together(stems), together(long_stems)
    for name, samples in {"mix": mix, **stems}.items():
        write_flac(args.out / f"{name}.flac", samples, RATE)
    write_flac(args.out / "long_mix.flac", to_long_format(long_mix), LONG_RATE)
    write_annotations(args.out / "clips.json", {"mix": (short, RATE), "long_mix": (long, LONG_RATE)})
    for name in ("mix", *STEMS, "long_mix"):
        print(describe(args.out / f"{name}.flac"))
    print(f"mix minus sum of stems: at most {check_sum(args.out)} steps of 16 bits")
    shared = round(16 * BEAT_S * RATE)
    same = np.abs(long_mix[:shared] - mix[:shared]).max()
    print(f"section A of mix and long_mix, before resampling: at most {same} steps of 16 bits apart")


if __name__ == "__main__":
    main()
