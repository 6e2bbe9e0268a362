"""A byte-level BPE in Qwen's manner for the demo models: 512 ids, every answer word one of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from ..make_tiny_snapshots import SPECIAL, learned_tokenizer, write_tokenizer
from .instruments import FAMILIES, NAMES
from .questions import ONE_SOURCE, TEXT, WORDS

__all__ = ["N_IDS", "demo_tokenizer", "write_tokenizer"]

N_IDS = 512
ANSWERS = (
    *NAMES, *(family.name for family in FAMILIES), "yes", "no", "note", "chord", "slow", "medium", "fast", "rising", "falling",
    "drums", "bass", "chords", "melody", " major", " minor", " seconds", "A", "B", "C",
)  # fmt: skip


def demo_tokenizer(markers: tuple[str, ...]) -> Tokenizer:
    """256 bytes, the merges learned from `corpus`, then the special tokens and the family's `markers` as the last ids."""
    special = SPECIAL + markers
    tokenizer = learned_tokenizer(special, corpus(), N_IDS - len(special))
    assert tokenizer.get_vocab_size() <= N_IDS
    for word in ANSWERS:
        assert len(tokenizer.encode(word).ids) == 1, f"{word!r} is not one token"
    return tokenizer


def corpus() -> Iterator[str]:
    """Answer words most often, then what is asked, then what people write around it."""
    for word in ANSWERS:
        yield from [word] * 60
    for wordings in WORDS.values():
        for words in wordings:
            yield from [words.format("A", "B", "C")] * 8
            yield words.format("audio 1", "audio 2", "audio 3")
    for question, answer in TEXT:
        yield from [question, answer] * 4
    yield from [opening.replace("<audio>", "") for opening in ONE_SOURCE if opening] * 4
    yield from [
        "You are a helpful assistant.",
        "system\n",
        "user\n",
        "assistant\n",
        "Audio 1: ",
        "Audio B: ",
        "Audio C: ",
    ] * 8


def ids_of(folder: Path) -> Tokenizer:
    """The tokenizer that `write_tokenizer` left in a folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
