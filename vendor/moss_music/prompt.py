"""How a source stands in a prompt: its audio tokens between a start and an end id, with the time written in between.

One audio token is 80 ms. After every 25th token come the digits of the seconds gone by: "2", "4", ..., "10" as two
tokens; also right before the end id when the count is a multiple of 25. Spans are built as ids and never tokenized.
"""

from __future__ import annotations

from dataclasses import dataclass

from .encoder import n_tokens

__all__ = ["AudioSpan", "AudioTokenIds", "PlacedSpan", "PromptIds", "audio_span", "n_tokens"]

TOKENS_PER_MARKER = 25
SECONDS_PER_MARKER = 2


@dataclass(frozen=True)
class AudioTokenIds:
    """The ids a span is made of; the defaults are the published tokenizer's."""

    audio: int = 151654
    start: int = 151669
    end: int = 151670
    digits: tuple[int, ...] = (15, 16, 17, 18, 19, 20, 21, 22, 23, 24)


@dataclass(frozen=True)
class AudioSpan:
    """A span's ids, start and end included, and where in them the audio tokens and the marker digits are.

    `marker_seconds[j]` is the time that the digit at `marker_offsets[j]` belongs to; both digits of 10 s say 10.
    """

    ids: tuple[int, ...]
    audio_offsets: tuple[int, ...]
    marker_offsets: tuple[int, ...]
    marker_seconds: tuple[int, ...]


@dataclass(frozen=True)
class PlacedSpan:
    """A span in an unpadded prompt: positions of its start id, audio tokens, marker digits and end id."""

    start: int
    end: int
    audio_positions: tuple[int, ...]
    marker_positions: tuple[int, ...]
    marker_seconds: tuple[int, ...]


@dataclass(frozen=True)
class PromptIds:
    """A whole unpadded prompt: its ids and its spans in order."""

    ids: tuple[int, ...]
    spans: tuple[PlacedSpan, ...]

    @property
    def audio_positions(self) -> tuple[int, ...]:
        """Positions of all audio tokens, sources in order."""
        return tuple(position for span in self.spans for position in span.audio_positions)


def audio_span(n_tokens: int, ids: AudioTokenIds) -> AudioSpan:
    """The span of a source of `n_tokens` audio tokens. Raises `ValueError` under 1."""
    if n_tokens < 1:
        raise ValueError(f"n_tokens is {n_tokens}; a source has at least one audio token")
    span = [ids.start]
    audio, markers, seconds = [], [], []
    for count in range(1, n_tokens + 1):
        audio.append(len(span))
        span.append(ids.audio)
        if count % TOKENS_PER_MARKER == 0:
            second = count // TOKENS_PER_MARKER * SECONDS_PER_MARKER
            for digit in str(second):
                markers.append(len(span))
                seconds.append(second)
                span.append(ids.digits[int(digit)])
    span.append(ids.end)
    return AudioSpan(tuple(span), tuple(audio), tuple(markers), tuple(seconds))
