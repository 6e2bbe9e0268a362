"""Which General MIDI programs belong to which instrument family, and which of them training never hears.

Programs are numbered from 0 as MIDI sends them; pitches are MIDI note numbers, 60 is C4. Families follow General MIDI's
groups. Left out: harp and timpani, which are no bowed strings; contrabass, tuba and baritone sax, for which the sound font
has no high notes; the lead that sounds a fifth with every note.
"""

from __future__ import annotations

from dataclasses import dataclass

NAMES = ("C", "Db", "D", "Eb", "E", "F", "Gb", "G", "Ab", "A", "Bb", "B")
LOWEST, HIGHEST = 36, 83  # C2 to B5: the pitches that the piano roll of the auxiliary target has


@dataclass(frozen=True)
class Family:
    """An instrument family: its word, its programs, those held out, and the pitches that are rendered."""

    name: str
    programs: tuple[int, ...]
    held_out: tuple[int, ...]
    lowest: int = 48
    highest: int = 83

    @property
    def trained(self) -> tuple[int, ...]:
        """The programs that training hears."""
        return tuple(program for program in self.programs if program not in self.held_out)


FAMILIES = (
    Family("piano", tuple(range(8)), (1,)),
    Family("guitar", tuple(range(24, 32)), (25,)),
    Family("bass", tuple(range(32, 40)), (34,), 36, 59),
    Family("strings", (40, 41, 42, 44, 45, 48, 49, 50, 51), (41, 48)),
    Family("brass", (56, 57, 59, 60, 61, 62, 63), (57,)),
    Family("wind", (64, 65, 66, *range(68, 80)), (65, 73)),
    Family("synth", (*range(80, 86), *range(87, 96)), (81, 89)),
    Family("organ", tuple(range(16, 24)), (18,)),
)

KITS = (0, 8, 16, 24, 25, 32, 40)  # standard, room, power, electronic, TR-808, jazz, brush
HELD_OUT_KITS = (16,)
HITS = {"kick": 36, "snare": 38, "hat": 42, "open": 46, "tom": 45, "ride": 51, "crash": 49}


def note_name(pitch: int) -> str:
    """60 -> "C4"; black keys have flat names."""
    return f"{NAMES[pitch % 12]}{pitch // 12 - 1}"


def is_held_out_cell(program: int, pitch: int) -> bool:
    """Whether training never plays this pitch on this program, though it knows both: one cell in nine."""
    return (program * 7 + pitch * 5) % 9 == 0
