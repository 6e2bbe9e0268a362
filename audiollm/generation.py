"""How answers are generated: profiles, the budget of new tokens, and the library's settings made explicit.

Nothing is inherited from a snapshot's generation_config.json: every setting that matters is in the profile.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from transformers import GenerationConfig

from .errors import ArgumentError, RequestError


@dataclass(frozen=True)
class Profile:
    """A named way to generate: `max_new_tokens` where the caller names none, and the repetition penalty. Greedy."""

    name: str
    max_new_tokens: int
    repetition_penalty: float

    def config(self, max_new_tokens: int, end_id: int, pad_id: int) -> GenerationConfig:
        """The library's settings for one call."""
        return GenerationConfig(
            do_sample=False,
            num_beams=1,
            num_return_sequences=1,
            repetition_penalty=self.repetition_penalty,
            max_new_tokens=max_new_tokens,
            eos_token_id=end_id,
            pad_token_id=pad_id,
            use_cache=True,
        )


PROFILES = {"paper_reference": Profile("paper_reference", max_new_tokens=16_384, repetition_penalty=1.0)}


def profile_of(name: str) -> Profile:
    """A profile by its name. Raises: ArgumentError naming those there are."""
    if name not in PROFILES:
        raise ArgumentError(
            f"profile {name!r} is not one of {', '.join(map(repr, PROFILES))}", code="bad_argument", source="profile"
        )
    return PROFILES[name]


def budget(profile: Profile, max_new_tokens: int | None, width: int, context: int) -> int:
    """New tokens that a call may make: what is asked, or what the context leaves beside the widest padded prompt.

    Warns once where that is less than asked. Raises: ArgumentError for a number that is not positive, RequestError
    `too_long` where nothing is left.
    """
    asked = profile.max_new_tokens if max_new_tokens is None else max_new_tokens
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
        raise ArgumentError(
            f"max_new_tokens is {asked!r}; pass a whole number from 1, or None for the profile's {profile.max_new_tokens:,}",
            code="bad_argument",
            source="max_new_tokens",
        )
    left = context - width
    if left < 1:
        raise RequestError(
            f"the widest prompt of the batch takes {width:,} tokens, all that the context of {context:,} holds, so "
            "nothing is left for an answer; send that request alone with shorter sources",
            code="too_long",
            source="requests",
        )
    if left < asked:
        warnings.warn(
            f"only {left:,} of {asked:,} new tokens fit: the prompt takes {width:,} of the context's {context:,}",
            stacklevel=4,
        )
    return min(asked, left)


@contextmanager
def without_false_reminder() -> Iterator[None]:
    """Keep the library from saying that a prompt is past "the model's predefined maximum length (1200.0)".

    It reads Music Flamingo's top-level `max_position_embeddings`, which is the period of its rotary time in seconds and
    no length in tokens; `budget` has already held the call to the real context.
    """
    logger = logging.getLogger("transformers.generation.stopping_criteria")
    logger.addFilter(_is_no_reminder)
    try:
        yield
    finally:
        logger.removeFilter(_is_no_reminder)


def _is_no_reminder(record: logging.LogRecord) -> bool:
    return "friendly reminder" not in record.getMessage()
