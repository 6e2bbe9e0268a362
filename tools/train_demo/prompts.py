"""The ids of a training row: one prefix with the sources, and behind it several questions with their answers.

The prefix is all that stands before the end of the last source; a block is what follows it, from the newline after the source
to the assistant's opened turn, then the answer and the token that ends it. Both are what `Family.encode_prompt` gives for
the same request, cut in two; tests/test_train_demo.py compares them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from audiollm.vendor.moss_music.prompt import audio_span

from audiollm import Request, Waveform
from audiollm.families import Family

from .questions import MARKER, Scene

HEAD = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
TAIL = "<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Block:
    """One question: its ids and its answer's, the ending token included."""

    asked: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """One scene as ids: the prefix, where in it the audio tokens are, and the blocks."""

    prefix: tuple[int, ...]
    audio_positions: tuple[int, ...]
    blocks: tuple[Block, ...]


class Prompter:
    """Writes rows with a family's tokenizer and ids."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.tokens = functools.lru_cache(4096)(self._tokens)

    def row(self, scene: Scene, most: int = 4) -> Row:
        """The ids of a scene with at most `most` of its questions."""
        opening = self.opening(scene)
        texts = (HEAD + opening).split(MARKER)
        prefix: list[int] = []
        audio: list[int] = []
        for clip, text in zip(scene.clips, texts[:-1], strict=True):
            prefix += self.tokens(text)
            span, offsets = self._span(self.family.n_tokens(len(clip.samples)))
            audio += [len(prefix) + offset for offset in offsets]
            prefix += span
        blocks = [
            Block(self.tokens(texts[-1] + asked.words + TAIL), (*self.tokens(asked.answer), self.family.end_id))
            for asked in scene.asked[:most]
        ]
        return Row(tuple(prefix), tuple(audio), tuple(blocks))

    def opening(self, scene: Scene) -> str:
        """What stands before the question in the user's turn, markers included."""
        if scene.opening is not None or not scene.clips:
            return scene.opening or ""
        silence = Waveform(np.zeros(1, dtype=np.float32), self.family.clock.sample_rate)
        return self.family.place_markers(Request("", [silence] * len(scene.clips)))

    def _tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self.family.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else ()

    def _span(self, n_tokens: int) -> tuple[Sequence[int], Sequence[int]]:
        """A source's ids and where among them its audio tokens are."""
        processor = self.family.processor
        if self.family.name == "moss_music":
            span = audio_span(n_tokens, processor.ids)
            return span.ids, span.audio_offsets
        ids = [processor.audio_bos_token_id, *[processor.audio_token_id] * n_tokens, processor.audio_eos_token_id]
        return ids, range(1, n_tokens + 1)


def request(scene: Scene, question: int = 0) -> Request:
    """The same question through the public API."""
    waves = [Waveform(clip.samples, 16_000) for clip in scene.clips]
    return Request((scene.opening or "") + scene.asked[question].words, waves)
