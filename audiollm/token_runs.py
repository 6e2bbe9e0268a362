"""The padded prompt of one request as runs: stretches of neighbouring positions with one role, of one source.

A prompt of an hour of music has tens of thousands of audio tokens; its runs are a few hundred at most, and most of what
there is to read. Positions are columns of the padded prompt, as in `PreparedBatch.tokens`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .batch import TokenRow
from .errors import ArgumentError

if TYPE_CHECKING:
    from .batch import PreparedBatch


@dataclass(frozen=True)
class TokenRun:
    """Positions `first`..`last`, inclusive, of one role.

    `source`, the number of the audio within the request for audio and markers, else None; `slot`, the same source's number
    in `batch.slots`. For audio also `first_token` and `last_token` of the source, and `start_s`, `end_s`, seconds of it.
    """

    sample_index: int
    first: int
    last: int
    role: str
    source: int | None
    slot: int | None
    first_token: int | None = None
    last_token: int | None = None
    start_s: float | None = None
    end_s: float | None = None

    def __len__(self) -> int:
        return self.last - self.first + 1


def token_runs(batch: PreparedBatch, sample_index: int = 0) -> tuple[TokenRun, ...]:
    """All positions of one request's padded prompt as runs, in order; no token is decoded.

    Raises: ArgumentError for a request that the batch does not have.

    >>> from audiollm import Request, demo
    >>> session = demo.load("music_flamingo")
    >>> batch = session.prepare([Request("Which instrument?", [demo.clips()["bass"]])])
    >>> [(run.role, len(run), run.end_s) for run in token_runs(batch)][1:4]
    [('user', 4, None), ('marker', 1, None), ('audio', 300, 12.0)]
    """
    check_request(batch, sample_index)
    prompt = batch.prompts[sample_index]
    left = batch.width - len(prompt)
    slots = {slot.audio_index: k for k, slot in enumerate(batch.slots) if slot.sample_index == sample_index}
    runs = [_run(batch, sample_index, 0, left - 1, "padding", -1, None)] if left else []
    kinds = list(zip(prompt.roles, prompt.sources, strict=True))
    begin = 0
    for k in range(1, len(kinds) + 1):
        if k == len(kinds) or kinds[k] != kinds[begin]:
            role, source = kinds[begin]
            runs.append(_run(batch, sample_index, left + begin, left + k - 1, role, source, slots.get(source)))
            begin = k
    return tuple(runs)


def token_row(batch: PreparedBatch, sample_index: int, position: int) -> TokenRow:
    """One row of `batch.tokens`, without making the others. Raises: ArgumentError for a place outside the batch."""
    check_request(batch, sample_index)
    if not 0 <= position < batch.width:
        raise ArgumentError(
            f"position {position!r} is not in the prompt of {batch.width}", code="bad_argument", source="position"
        )
    prompt = batch.prompts[sample_index]
    k = position - (batch.width - len(prompt))
    if k < 0:
        pad = int(batch.model_shape.pad_id)
        return TokenRow(sample_index, position, pad, batch.decode_token(pad), "padding", None, None)
    source = None if prompt.sources[k] < 0 else prompt.sources[k]
    text = batch.decode_token(prompt.ids[k])
    return TokenRow(sample_index, position, prompt.ids[k], text, prompt.roles[k], source, prompt.marker_s[k])


def check_request(batch: PreparedBatch, sample_index: object) -> None:
    """Raises: ArgumentError where `sample_index` is no request of the batch."""
    n = len(batch)
    if isinstance(sample_index, bool) or not isinstance(sample_index, int) or not 0 <= sample_index < n:
        raise ArgumentError(
            f"request {sample_index!r} is not one of the batch's {n}; pass 0..{n - 1}",
            code="bad_argument",
            source="sample_index",
        )


def _run(
    batch: PreparedBatch, sample_index: int, first: int, last: int, role: str, source: int, slot: int | None
) -> TokenRun:
    number = None if source < 0 else source
    if role != "audio" or slot is None:
        return TokenRun(sample_index, first, last, role, number, slot)
    timeline = batch.timeline[slot]
    tokens = timeline.position_to_token(first), timeline.position_to_token(last)
    assert tokens[0] is not None and tokens[1] is not None  # audio positions are the timeline's own
    start_s, end_s = timeline.token_to_time(tokens[0])[0], timeline.token_to_time(tokens[1])[1]
    return TokenRun(sample_index, first, last, role, number, slot, *tokens, start_s, end_s)
