"""Seconds <-> samples <-> mel frames <-> windows <-> audio tokens <-> prompt positions.

Conventions. A source starts at 0.0 s, whatever stands before it in the prompt. Intervals are half-open, [start, end),
but for the very end of a source, which belongs to the token that reaches it. Token k covers model samples
[k * samples_per_token, (k + 1) * samples_per_token), mel frame f covers [f * samples_per_frame, ...); both ends are
clipped to what was used. All clocks are whole samples at the model's rate, so seconds are one division and every
round trip is exact. A source can end with a few samples that no token covers: there `time_to_token` is None.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .errors import ArgumentError


@dataclass(frozen=True)
class Clock:
    """The fixed arithmetic of a family, in samples at the model's rate.

    `sample_rate` Hz; `samples_per_frame` of one mel frame; `samples_per_token`; `samples_per_window` of one encoder
    window or chunk, a whole number of tokens; `counts_started_frames`, whether a last frame that is only begun counts;
    `token_sees` says what an audio token can see, in words.
    """

    sample_rate: int
    samples_per_frame: int
    samples_per_token: int
    samples_per_window: int
    counts_started_frames: bool
    token_sees: str

    @property
    def token_s(self) -> float:
        """Seconds of one audio token."""
        return self.samples_per_token / self.sample_rate

    @property
    def window_s(self) -> float:
        """Seconds of one full encoder window."""
        return self.samples_per_window / self.sample_rate

    @property
    def tokens_per_window(self) -> int:
        """Audio tokens of one full encoder window."""
        return self.samples_per_window // self.samples_per_token


@dataclass(frozen=True)
class Window:
    """One encoder window (Music Flamingo) or chunk (MOSS).

    `index` within the source; `start_s`, `end_s` of the audio it holds; `first_token`, `last_token` (inclusive) or None
    where it is too short for a token; `sees`, what its tokens can see, in words.
    """

    index: int
    start_s: float
    end_s: float
    first_token: int | None
    last_token: int | None
    sees: str

    @property
    def n_tokens(self) -> int:
        """Audio tokens in this window."""
        if self.first_token is None or self.last_token is None:
            return 0
        return self.last_token - self.first_token + 1


class Place(NamedTuple):
    """Where a prompt position lies in the audio: source number, token of it, and the token's seconds."""

    audio_index: int
    token: int
    start_s: float
    end_s: float


class Moment(NamedTuple):
    """One second of a source in every unit: its mel frame, encoder window, audio token, and column of the padded prompt.

    A unit that does not cover the second (the last few milliseconds of a source) is None.
    """

    second: float
    frame: int | None
    window: int | None
    token: int | None
    position: int | None


@dataclass(frozen=True, eq=False)
class SourceTimeline:
    """The clocks of one source of one request.

    `n_samples` used, at the model's rate; `n_tokens` = U_i; `file_rate` in Hz, the source's own rate; `positions`
    [U_i] int64, the tokens' columns in the padded prompt.
    """

    sample_index: int
    audio_index: int
    name: str
    clock: Clock
    n_samples: int
    n_tokens: int
    file_rate: int
    positions: np.ndarray

    @property
    def used_s(self) -> float:
        """Seconds of the source that the model hears."""
        return self.n_samples / self.clock.sample_rate

    @property
    def n_frames(self) -> int:
        """Mel frames of the used audio."""
        rest = self.clock.samples_per_frame - 1 if self.clock.counts_started_frames else 0
        return (self.n_samples + rest) // self.clock.samples_per_frame

    def token_intervals(self) -> np.ndarray:
        """[U_i, 2] float64: start and end of every token in seconds."""
        edges = np.arange(self.n_tokens + 1, dtype=np.int64) * self.clock.samples_per_token
        seconds = np.minimum(edges, self.n_samples) / self.clock.sample_rate
        return np.stack([seconds[:-1], seconds[1:]], axis=1)

    def token_to_time(self, token: int) -> tuple[float, float]:
        """(start_s, end_s) of a token. Raises ArgumentError outside [0, U_i)."""
        first, last = self.token_to_samples(token)
        return first / self.clock.sample_rate, last / self.clock.sample_rate

    def time_to_token(self, second: float) -> int | None:
        """The token that covers a second of the source, or None where none does (the last few milliseconds).

        Raises ArgumentError (a ValueError) outside [0, used_s].
        """
        if not 0 <= second <= self.used_s:  # also refuses NaN
            raise ArgumentError(
                f"{second!r} s is outside [0, {self.used_s:.6f}] of {self.name}; times are seconds within the source "
                "(did you pass milliseconds or samples?)",
                code="bad_argument",
                source="second",
            )
        return self.sample_to_token(min(self._second_to_sample(second), self.n_samples))

    def token_to_samples(self, token: int) -> tuple[int, int]:
        """[first, end) samples of a token at the model's rate. Raises ArgumentError outside [0, U_i)."""
        k = self._checked(token, self.n_tokens, "token")
        per = self.clock.samples_per_token
        return k * per, min((k + 1) * per, self.n_samples)

    def sample_to_token(self, sample: int) -> int | None:
        """The token over a sample at the model's rate, or None; `n_samples` itself is the end of the last token.

        Raises ArgumentError outside [0, n_samples].
        """
        at = self._checked(sample, self.n_samples + 1, "sample")
        token = at // self.clock.samples_per_token
        if token < self.n_tokens:
            return token
        reaches_end = self.n_tokens * self.clock.samples_per_token >= self.n_samples
        return self.n_tokens - 1 if at == self.n_samples and reaches_end else None

    def token_to_frames(self, token: int) -> tuple[int, int]:
        """[first, end) mel frames of a token. Raises ArgumentError outside [0, U_i)."""
        first, last = self.token_to_samples(token)
        per = self.clock.samples_per_frame
        return first // per, min(-(-last // per), self.n_frames)

    def frame_to_token(self, frame: int) -> int | None:
        """The token over a mel frame, or None. Raises ArgumentError outside [0, n_frames)."""
        return self.sample_to_token(self._checked(frame, self.n_frames, "frame") * self.clock.samples_per_frame)

    def token_to_file_samples(self, token: int) -> tuple[int, int]:
        """[first, end) samples of a token at the file's own rate: those whose instant lies within the token."""
        first, last = self.token_to_samples(token)
        return self._at_file_rate(first), self._at_file_rate(last)

    def file_sample_to_token(self, sample: int) -> int | None:
        """The token over a sample at the file's own rate, or None. Raises ArgumentError past the last one that is used."""
        at = self._checked(sample, self._at_file_rate(self.n_samples) + 1, "sample")
        return self.sample_to_token(min(at * self.clock.sample_rate // self.file_rate, self.n_samples))

    def token_to_position(self, token: int) -> int:
        """The token's column in the padded prompt. Raises ArgumentError outside [0, U_i)."""
        return int(self.positions[self._checked(token, self.n_tokens, "token")])

    def position_to_token(self, position: int) -> int | None:
        """The token at a column of the padded prompt, or None where the column is not of this source."""
        k = int(np.searchsorted(self.positions, position))
        return k if k < self.n_tokens and self.positions[k] == position else None

    def at(self, second: float) -> Moment:
        """A second of the source in every unit. Raises ArgumentError (a ValueError) outside [0, used_s]."""
        token = self.time_to_token(second)
        sample = min(self._second_to_sample(second), self.n_samples - 1)
        frame, window = sample // self.clock.samples_per_frame, sample // self.clock.samples_per_window
        return Moment(
            second,
            frame if frame < self.n_frames else None,
            window if window < len(self._windows) else None,
            token,
            None if token is None else self.token_to_position(token),
        )

    def tokens_within(self, start_s: float, end_s: float) -> tuple[int, int] | None:
        """The first and the last token whose centre lies in [start_s, end_s), or None where none does."""
        centres = self.token_intervals().mean(axis=1)
        first, end = np.searchsorted(centres, (start_s, end_s))
        return (int(first), int(end) - 1) if end > first else None

    def windows(self) -> tuple[Window, ...]:
        """The encoder's windows over the source, in order."""
        return self._windows

    @cached_property
    def _windows(self) -> tuple[Window, ...]:
        clock = self.clock
        count = -(-self.n_frames * clock.samples_per_frame // clock.samples_per_window)
        return tuple(self._window(index, clock) for index in range(count))

    def _window(self, index: int, clock: Clock) -> Window:
        start = index * clock.samples_per_window
        end = min(start + clock.samples_per_window, self.n_samples)
        first = index * clock.tokens_per_window
        last = min(first + clock.tokens_per_window, self.n_tokens) - 1
        some = last >= first
        return Window(
            index,
            start / clock.sample_rate,
            end / clock.sample_rate,
            first if some else None,
            last if some else None,
            clock.token_sees,
        )

    def _second_to_sample(self, second: float) -> int:
        """The sample whose interval holds a second; exact for every n / rate that a float can say."""
        sample = int(second * self.clock.sample_rate)
        while (sample + 1) / self.clock.sample_rate <= second:
            sample += 1
        while sample / self.clock.sample_rate > second:
            sample -= 1
        return sample

    def _at_file_rate(self, sample: int) -> int:
        return -(-sample * self.file_rate // self.clock.sample_rate)

    def _checked(self, value: int, end: int, what: str) -> int:
        try:
            index = value.__index__()
        except AttributeError:
            raise ArgumentError(
                f"{what} is a {type(value).__name__}, not a whole number", code="bad_argument", source=what
            ) from None
        if not 0 <= index < end:
            raise ArgumentError(
                f"{what} {index} is outside [0, {end}) of {self.name}", code="bad_argument", source=what
            )
        return index

    def __repr__(self) -> str:
        return (
            f"SourceTimeline(request {self.sample_index}, audio {self.audio_index}, {self.name!r}: {self.used_s:.3f} s, "
            f"{len(self.windows())} windows, {self.n_tokens} tokens of {self.clock.token_s:g} s)"
        )


@dataclass(frozen=True)
class Timeline:
    """The timelines of a batch: `timeline[i]` belongs to `slots[i]`; iterable, with a length."""

    sources: tuple[SourceTimeline, ...]

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> SourceTimeline:
        return self.sources[index]

    def __iter__(self) -> Iterator[SourceTimeline]:
        return iter(self.sources)

    def position_to_source(self, sample_index: int, position: int) -> Place | None:
        """The source and token at a column of request `sample_index`'s padded row; None for text and padding."""
        for source in self.sources:
            if source.sample_index == sample_index:
                token = source.position_to_token(position)
                if token is not None:
                    return Place(source.audio_index, token, *source.token_to_time(token))
        return None
