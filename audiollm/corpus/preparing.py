"""Rows -> a batch on the CPU that a session can run; needs the snapshot's settings, not its weights.

The adapter is made for a model on torch's meta device, which takes a snapshot's configuration and tokenizer but not a
byte of its weights. So any process can prepare what the one with the weights runs, and all prepare the same.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import BatchFeature

from ..audio import read_header, resample_ratio, resampled_length
from ..batch import PreparedBatch
from ..errors import AudioLLMError
from ..families import Family
from ..loading import checked_processor, empty_model, family_of
from ..request import Request
from ..session import Session
from ..snapshot import Snapshot
from .clip import Failure, Heard, frames_of, hear
from .manifest import Row

# What a prompt adds to its audio in tokens, roughly: the turn marks, and characters of text a token.
_TURNS, _CHARACTERS = 32, 3


@dataclass(frozen=True)
class Cost:
    """What a row takes, about: `tokens` of its prompt, audio included; `encoder` tokens in whole windows; `seconds`."""

    tokens: int
    encoder: int
    seconds: float = 0.0


@dataclass(frozen=True)
class Ready:
    """A batch for the model: `heard`, its rows in order; `batch` without them, or None; `failures`, rows that are none."""

    heard: tuple[Heard, ...]
    batch: PreparedBatch | None
    failures: tuple[Failure, ...]


class Preparer:
    """Measures and prepares rows for one snapshot. `adapter` has no weights; `prompt` is for rows without one."""

    def __init__(self, adapter: Family, prompt: str) -> None:
        self.adapter = adapter
        self.prompt = prompt

    @classmethod
    def of(cls, folder: str | Path, prompt: str) -> Preparer:
        """For a snapshot folder. Raises: SnapshotError as `load_model`, but for the weights."""
        snapshot = Snapshot.open(folder)
        family = family_of(snapshot)
        return cls(family(empty_model(family, snapshot), checked_processor(family, snapshot)), prompt)

    def cost(self, row: Row) -> Cost:
        """Look at a row's headers and say what it takes; next to nothing for one that cannot be used."""
        clock, prompt = self.adapter.clock, self.prompt if not row.prompt else row.prompt
        tokens, encoder, seconds = _TURNS + len(prompt) // _CHARACTERS, 0, 0.0
        try:
            for k in range(len(row.audios)):
                header = read_header(row.path(k))
                first, end = frames_of(row, header)
                n = resampled_length(end - first, *resample_ratio(header, clock.sample_rate))
                if self.adapter.max_s is not None:
                    n = min(n, round(self.adapter.max_s * clock.sample_rate))
                tokens += self.adapter.n_tokens(n)
                encoder += -(-n // clock.samples_per_window) * clock.tokens_per_window
                seconds += n / clock.sample_rate
        except AudioLLMError:
            return Cost(1, 1)  # what is wrong is said when the row is prepared
        return Cost(tokens, encoder, seconds)

    def prepare(self, rows: Sequence[Row]) -> Ready:
        """Decode, cut and resample rows, compute their mel, tokenize and pad them; what cannot be used is set aside.

        The batch is the one of `Session.prepare`, without the samples, on the CPU and in float32.
        """
        asked: list[tuple[Heard, Request]] = []
        failures: list[Failure] = []
        for row in rows:
            try:
                asked.append(hear(row, self.prompt, self.adapter.clock.sample_rate, self.adapter.max_s))
            except AudioLLMError as error:
                failures.append(Failure.of(row, error))
        batch = None
        while asked and batch is None:
            try:
                batch = self._batch([request for _, request in asked])
            except AudioLLMError:
                asked, refused = self._sorted(asked)
                failures += refused
        return Ready(tuple(heard for heard, _ in asked), batch, tuple(failures))

    def _batch(self, requests: Sequence[Request]) -> PreparedBatch:
        batch = self.adapter.prepare(requests, torch.device("cpu"))
        slots = tuple(dataclasses.replace(slot, waveform=torch.empty(0)) for slot in batch.slots)
        return dataclasses.replace(batch, slots=slots, requests=(), prompts=(), decode_token=str)

    def _sorted(self, asked: Sequence[tuple[Heard, Request]]) -> tuple[list[tuple[Heard, Request]], list[Failure]]:
        """Rows that can be prepared by themselves, and those that cannot."""
        good, refused = [], []
        for heard, request in asked:
            try:
                self._batch([request])
            except AudioLLMError as error:
                refused.append(Failure(heard.row, error.code, _named(str(error), heard.names)))
            else:
                good.append((heard, request))
        return good, refused


def packed(ready: Ready) -> bytes:
    """A batch as bytes, to send to another process."""
    return pickle.dumps(ready, protocol=5)


def unpacked(data: bytes) -> Ready:
    """What `packed` made; only ever from a process that this one started."""
    return pickle.loads(data)


def for_session(batch: PreparedBatch, session: Session) -> PreparedBatch:
    """The same batch on a session's device, in its dtype."""
    adapter = session._adapter
    inputs = {name: adapter._to(tensor, session.device) for name, tensor in batch.inputs.items()}
    return dataclasses.replace(batch, inputs=BatchFeature(inputs), model_shape=adapter.model_shape())


def _named(message: str, names: Sequence[str]) -> str:
    """What was said of `waveform 1` is true of the first file."""
    for k, name in enumerate(names):
        message = message.replace(f"waveform {k + 1} ", f"{name} ")
    return message
