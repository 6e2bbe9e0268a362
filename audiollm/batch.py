"""What `Session.prepare` hands out: a padded batch, where its audio lies, and the rows of its prompt.

Letters: B requests, A sources in all, L width of the left-padded prompt, U_i audio tokens of one source, D width of
the language model.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from transformers import BatchFeature

from .errors import ArgumentError
from .request import Request
from .timeline import Timeline, Window

ROLES = ("padding", "system", "user", "audio", "marker", "assistant")


@dataclass(frozen=True, eq=False)
class AudioSlot:
    """One source of one request: where it lies in the prompt, and what the model heard.

    `token_positions` [U_i] int64 on the CPU, columns of the padded prompt; `name`; `path` or None; `waveform` [N]
    float32 on the CPU, mono at the model's rate; `duration_s` of the whole source, `used_s` of what was kept;
    `windows`, the encoder's windows over it.
    """

    sample_index: int
    audio_index: int
    token_positions: torch.Tensor
    name: str
    path: Path | None
    waveform: torch.Tensor
    sample_rate: int
    duration_s: float
    used_s: float
    windows: tuple[Window, ...]

    def __repr__(self) -> str:
        cut = "" if self.used_s >= self.duration_s - 1e-3 else f" of {self.duration_s:.3f} s"
        return (
            f"AudioSlot(request {self.sample_index}, audio {self.audio_index}, {self.name!r}: {self.used_s:.3f} s{cut}, "
            f"{len(self.windows)} windows, {len(self.token_positions)} tokens)"
        )


@dataclass(frozen=True)
class TokenRow:
    """One token of the padded prompt.

    `sample_index` and `position`, its row and column; `id`; `text`, that token alone decoded; `role`, one of padding,
    system, user, audio, marker, assistant; `source`, the number of the audio for audio and marker rows, else None;
    `marker_s`, the seconds that a time marker's digits say, else None. Markers are what a family puts around and
    between audio tokens: the begin and end tokens of a span, and MOSS's time digits.
    """

    sample_index: int
    position: int
    id: int
    text: str
    role: str
    source: int | None
    marker_s: float | None


@dataclass(frozen=True, eq=False)
class AudioEmbedding:
    """What the audio tower made of one source.

    `raw` [U_i, audio width], `projected` [U_i, D], `deepstack_raw` and `deepstack_projected` tuples of the same shapes
    (empty for Music Flamingo), on the model's device and in its dtype; `intervals` [U_i, 2] float64, start and end of
    each token in seconds of the source.
    """

    sample_index: int
    audio_index: int
    raw: torch.Tensor
    projected: torch.Tensor
    deepstack_raw: tuple[torch.Tensor, ...]
    deepstack_projected: tuple[torch.Tensor, ...]
    intervals: np.ndarray

    def __repr__(self) -> str:
        deep = f", {len(self.deepstack_raw)} deepstack" if self.deepstack_raw else ""
        end = self.intervals[-1, 1]
        return (
            f"AudioEmbedding(request {self.sample_index}, audio {self.audio_index}: raw {list(self.raw.shape)}, "
            f"projected {list(self.projected.shape)}{deep}, 0-{end:.3f} s)"
        )


@dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """One request's prompt as ids, with what each of them is; all four lists have the same length.

    `roles` holds names of `ROLES`; `sources` the audio number of audio and marker tokens, else -1; `marker_s` seconds of
    a time marker, else None.
    """

    ids: list[int]
    roles: list[str]
    sources: list[int]
    marker_s: list[float | None]

    def __len__(self) -> int:
        return len(self.ids)

    def extend(self, ids: Sequence[int], role: str, source: int = -1, marker_s: float | None = None) -> None:
        """Append ids of one role."""
        self.ids.extend(ids)
        self.roles.extend([role] * len(ids))
        self.sources.extend([source] * len(ids))
        self.marker_s.extend([marker_s] * len(ids))

    def audio_positions(self, source: int) -> np.ndarray:
        """Columns of one source's audio tokens in the unpadded prompt, [U_i] int64."""
        audio = np.asarray(self.roles) == "audio"
        return np.flatnonzero(audio & (np.asarray(self.sources) == source))


@dataclass(frozen=True, eq=False)
class PreparedBatch:
    """Requests made ready for a model.

    `inputs`: a BatchFeature on the model's device, to be passed as `session.model(**batch.inputs)`; `slots`, one
    AudioSlot a source, in request then source order; `timeline`, where `timeline[i]` belongs to `slots[i]`;
    `requests` as given; `tokens`, the padded prompt as rows.
    """

    inputs: BatchFeature
    slots: tuple[AudioSlot, ...]
    timeline: Timeline
    requests: tuple[Request, ...]
    prompts: tuple[EncodedPrompt, ...] = field(repr=False)
    model_shape: ModelShape = field(repr=False)
    decode_token: Callable[[int], str] = field(repr=False)

    @property
    def width(self) -> int:
        """L, the width of the padded prompt in tokens."""
        return int(self.inputs["input_ids"].shape[1])

    @cached_property
    def tokens(self) -> tuple[TokenRow, ...]:
        """Every token of every padded row, in order: B * L rows."""
        pad = int(self.model_shape.pad_id)
        rows = []
        for b, prompt in enumerate(self.prompts):
            left = self.width - len(prompt)
            rows += [TokenRow(b, p, pad, self.decode_token(pad), "padding", None, None) for p in range(left)]
            for k, (token, role, source, marker_s) in enumerate(
                zip(prompt.ids, prompt.roles, prompt.sources, prompt.marker_s, strict=True)
            ):
                number = None if source < 0 else source
                rows.append(TokenRow(b, left + k, token, self.decode_token(token), role, number, marker_s))
        return tuple(rows)

    def nbytes(self, layers: Sequence[int] = (-1,)) -> int:
        """Bytes that `extract_contextual_embeddings(batch, layers)` keeps: audio rows of the asked layers only.

        Raises: ArgumentError for layers out of range.
        """
        shape = self.model_shape
        if isinstance(layers, int) or not hasattr(layers, "__iter__"):
            raise ArgumentError(
                f"layers is {layers!r}; pass a sequence, such as (0, -1)", code="bad_argument", source="layers"
            )
        kept = {layer: shape.layer(layer) for layer in layers}
        rows = sum(len(slot.token_positions) for slot in self.slots)
        return len(kept) * rows * shape.width * shape.dtype.itemsize

    def __len__(self) -> int:
        return len(self.requests)

    def __repr__(self) -> str:
        lines = [
            f"PreparedBatch({len(self.requests)} request(s), {len(self.slots)} source(s), prompt width {self.width})"
        ]
        for b, prompt in enumerate(self.prompts):
            lines.append(f"  request {b}: {len(prompt)} tokens, {self.width - len(prompt)} padding")
            lines += [f"    {self._slot_line(i)}" for i, slot in enumerate(self.slots) if slot.sample_index == b]
        return "\n".join(lines)

    def _slot_line(self, i: int) -> str:
        cells = self._slot_cells(i)
        return "audio {1} {2}: {3} s, windows {4}, tokens {5} at positions {6}".format(*cells)

    def _slot_cells(self, i: int) -> tuple[str, ...]:
        slot = self.slots[i]
        cut = "" if slot.used_s >= slot.duration_s - 1e-3 else f" of {slot.duration_s:.3f}"
        positions = f"{int(slot.token_positions[0])}-{int(slot.token_positions[-1])}"
        return (
            str(slot.sample_index),
            str(slot.audio_index),
            slot.name,
            f"{slot.used_s:.3f}{cut}",
            str(len(slot.windows)),
            f"{len(slot.token_positions)} x {self.timeline[i].clock.token_s:g} s",
            positions,
        )

    def _repr_html_(self) -> str:
        head = ("request", "audio", "name", "seconds", "windows", "tokens", "positions")
        body = "".join(_html_row(self._slot_cells(i), "td") for i in range(len(self.slots)))
        prompts = "".join(
            _html_row((str(b), str(len(p)), str(self.width - len(p)), _excerpt(self.requests[b].prompt)), "td")
            for b, p in enumerate(self.prompts)
        )
        return (
            f"<p>{len(self.requests)} request(s), {len(self.slots)} source(s), prompt width {self.width} tokens</p>"
            f"<table><thead>{_html_row(('request', 'tokens', 'padding', 'prompt'), 'th')}</thead><tbody>{prompts}</tbody></table>"
            f"<table><thead>{_html_row(head, 'th')}</thead><tbody>{body}</tbody></table>"
        )


@dataclass(frozen=True)
class TokenCount:
    """What a request takes of the context, in tokens: `prompt` in all, `sources` each, `context` that there is."""

    prompt: int
    sources: tuple[int, ...]
    context: int

    @property
    def left(self) -> int:
        """Tokens left for the answer; negative where the prompt alone is too long."""
        return self.context - self.prompt


@dataclass(frozen=True)
class ModelShape:
    """What a batch must know of its model: family, blocks, language width D, dtype, and the padding id."""

    family: str
    n_blocks: int
    width: int
    dtype: torch.dtype
    pad_id: int

    def layer(self, layer: int) -> int:
        """A layer number as asked (negative counts from the end) -> 0..n_blocks.

        Layer 0 is the decoder's input, layer k what block k-1 hands on, layer n_blocks is after the final norm.
        Raises ArgumentError naming the range.
        """
        n = self.n_blocks
        if isinstance(layer, bool) or not isinstance(layer, (int, np.integer)) or not -n - 1 <= layer <= n:
            raise ArgumentError(
                f"layer {layer!r} is not one of 0..{n} (0 is the decoder's input, {n} is after the final norm) or "
                f"-{n + 1}..-1 from the end",
                code="bad_argument",
                source="layers",
            )
        return int(layer) % (n + 1)


def _excerpt(text: str, length: int = 60) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _html_row(cells: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
