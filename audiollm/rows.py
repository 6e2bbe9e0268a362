"""Which positions of a call are meant, and what each of them is: columns of the padded prompt, tokens, seconds, steps.

Conventions. A row is one position of one request, never padding. Prompt rows come request by request, columns
ascending; audio rows come source by source, in the order of `batch.slots`. `step` 0 is the prompt, step k the k-th
generated token when it is fed back, at the column after the prompt's. Seconds are of the source; an audio token is
within [a, b) where its centre is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from .errors import ArgumentError

if TYPE_CHECKING:
    from .batch import PreparedBatch

WORDS = ("audio", "text", "last", "steps")


@dataclass(frozen=True, eq=False)
class Rows:
    """What R rows are; every field is a NumPy array [R].

    `sample_index`, the request; `position`, the column of the padded prompt, counted on through generated tokens;
    `source`, the number in `batch.slots`, or -1 for text; `token`, the audio token within that source, or -1;
    `start_s`, `end_s`, its seconds, or NaN; `step`, 0 for the prompt.
    """

    sample_index: np.ndarray
    position: np.ndarray
    source: np.ndarray
    token: np.ndarray
    start_s: np.ndarray
    end_s: np.ndarray
    step: np.ndarray

    def __len__(self) -> int:
        return len(self.position)

    def __getitem__(self, index: np.ndarray | slice) -> Rows:
        return Rows(*(getattr(self, field.name)[index] for field in fields(self)))

    @property
    def intervals(self) -> np.ndarray:
        """[R, 2] float64: start and end of each row in seconds, NaN for text."""
        return np.stack([self.start_s, self.end_s], axis=1)

    @classmethod
    def text(cls, sample_index: np.ndarray, position: np.ndarray, step: int = 0) -> Rows:
        """Rows that are no audio, from their requests [R] and columns [R]."""
        none, nan = np.full(len(position), -1), np.full(len(position), np.nan)
        return cls(sample_index, position, none, none.copy(), nan, nan.copy(), np.full(len(position), step))

    @classmethod
    def join(cls, parts: Sequence[Rows]) -> Rows:
        """Rows one after the other."""
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def __repr__(self) -> str:
        audio, steps = int((self.source >= 0).sum()), int((self.step > 0).sum())
        return f"Rows({len(self)}: {audio} audio, {len(self) - audio - steps} text, {steps} generated)"


def prompt_rows(batch: PreparedBatch) -> Rows:
    """Every position of a batch that is not padding, request by request."""
    parts = [
        Rows.text(np.full(len(prompt), b), np.arange(batch.width - len(prompt), batch.width))
        for b, prompt in enumerate(batch.prompts)
    ]
    rows = Rows.join(parts)
    first = np.cumsum([0, *(len(prompt) for prompt in batch.prompts)])
    for number, timeline in enumerate(batch.timeline):
        b = timeline.sample_index
        where = first[b] + timeline.positions - (batch.width - len(batch.prompts[b]))
        rows.source[where] = number
        rows.token[where] = np.arange(timeline.n_tokens)
        rows.start_s[where], rows.end_s[where] = timeline.token_intervals().T
    return rows


def audio_rows(batch: PreparedBatch) -> Rows:
    """Every audio token of a batch, source by source."""
    rows = prompt_rows(batch)
    rows = rows[rows.source >= 0]
    return rows[np.lexsort((rows.token, rows.source))]


@dataclass(frozen=True)
class Selection:
    """Which rows are meant: `tokens`, `seconds` and `source` all hold at once.

    `tokens`: None for all, "audio", "text", "last" (the last prompt position of each request, whose logits choose the
    first new token), "steps" (generated tokens only), or columns of the padded prompt, negative ones from its end;
    `seconds`: (start_s, end_s) within each source; `source`: a number in `batch.slots`, or several.
    """

    tokens: str | tuple[int, ...] | None = None
    seconds: tuple[float, float] | None = None
    source: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        tokens: str | Sequence[int] | None = None,
        seconds: tuple[float, float] | None = None,
        source: int | Sequence[int] | None = None,
    ) -> Selection:
        """A checked selection. Raises: ArgumentError naming the argument."""
        if isinstance(tokens, str):
            if tokens not in WORDS:
                raise _bad(f"tokens is {tokens!r}; pass one of {', '.join(map(repr, WORDS))}, or columns", "tokens")
        elif tokens is not None:
            tokens = _whole(tokens, "tokens")
        if seconds is not None:
            seconds = _seconds(seconds)
        if source is not None:
            source = _whole([source] if is_whole(source) else source, "source")
        return cls(tokens, seconds, source)

    @property
    def is_everything(self) -> bool:
        """Whether nothing is left out."""
        return self == Selection()

    @property
    def takes_steps(self) -> bool:
        """Whether generated tokens are among what is meant."""
        return self.tokens in (None, "text", "last", "steps") and self.seconds is None and self.source is None

    def mask(self, rows: Rows, batch: PreparedBatch) -> np.ndarray:
        """[R] bool: which rows of a batch's prompt are meant.

        Raises: ArgumentError for a source or a column that the batch does not have, or seconds past every source.
        """
        chosen = np.ones(len(rows), bool)
        if self.source is not None:
            for number in self.source:
                if not 0 <= number < len(batch.slots):
                    raise _bad(f"source {number} is not one of the batch's {len(batch.slots)} source(s)", "source")
            chosen &= np.isin(rows.source, self.source)
        if self.seconds is not None:
            start_s, end_s = self.seconds
            centre = (rows.start_s + rows.end_s) / 2
            chosen &= (centre >= start_s) & (centre < end_s)  # NaN, for text, is neither
            if not chosen.any():
                numbers = range(len(batch.timeline)) if self.source is None else self.source
                longest = max((batch.timeline[number].used_s for number in numbers), default=0.0)
                raise _bad(
                    f"no audio token lies in seconds {self.seconds}; the longest source that is meant has {longest:.3f} s "
                    "(did you pass milliseconds?)",
                    "seconds",
                )
        if self.tokens == "audio":
            chosen &= rows.source >= 0
        elif self.tokens == "text":
            chosen &= rows.source < 0
        elif self.tokens == "last":
            chosen &= rows.position == batch.width - 1
        elif self.tokens == "steps":
            chosen &= False
        elif self.tokens is not None:
            columns = [self._column(int(column), batch.width) for column in self.tokens]
            chosen &= np.isin(rows.position, columns)
        return chosen

    def _column(self, column: int, width: int) -> int:
        if not -width <= column < width:
            raise _bad(f"column {column} is outside the padded prompt of {width} tokens", "tokens")
        return column % width


def is_whole(value: object) -> bool:
    """Whether a value is a whole number of Python or NumPy, and no bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _whole(values: object, what: str) -> tuple[int, ...]:
    listed = list(values) if hasattr(values, "__iter__") and not isinstance(values, str) else None
    if listed is None or not listed or not all(is_whole(value) for value in listed):
        raise _bad(f"{what} is {values!r}; pass whole numbers, at least one", what)
    return tuple(int(value) for value in listed)


def _seconds(seconds: object) -> tuple[float, float]:
    if isinstance(seconds, str):
        raise _bad(f"seconds is {seconds!r}; pass (start_s, end_s)", "seconds")
    try:
        start_s, end_s = (float(second) for second in seconds)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise _bad(f"seconds is {seconds!r}; pass (start_s, end_s)", "seconds") from None
    if not 0 <= start_s < end_s:
        raise _bad(f"seconds is {seconds!r}; they must be 0 <= start_s < end_s within a source", "seconds")
    return start_s, end_s


def _bad(what: str, source: str) -> ArgumentError:
    return ArgumentError(what, code="bad_argument", source=source)
