"""How answers are generated: profiles, budgets, one seeded stream a call, text as it comes, and stopping.

Nothing is inherited from a snapshot's generation_config.json: every setting that matters is in the profile.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from transformers import GenerationConfig, StoppingCriteria

from .errors import ArgumentError, RequestError

Result = TypeVar("Result")
SEED = 3407
_STREAM = threading.RLock()  # a callback may sample from another Session
OnText = Callable[[int, str], None]
Stop = threading.Event | Callable[[], bool]


@dataclass(frozen=True)
class Profile:
    """A named way to generate.

    `max_new_tokens` where the caller names none; `sampling`, None for greedy or temperature, top_p and top_k. Sampling
    draws from one stream a call, seeded with 3407 or the call's own seed, whatever the caller's random state is.
    """

    name: str
    max_new_tokens: int = 16_384
    repetition_penalty: float = 1.0
    sampling: Mapping[str, float] | None = None

    def settings(self, max_new_tokens: int, end_id: int, pad_id: int) -> dict[str, Any]:
        """Every setting of one call by the library's names, and the seed where it samples."""
        settings: dict[str, Any] = {
            "do_sample": self.sampling is not None,
            "num_beams": 1,
            "num_return_sequences": 1,
            "repetition_penalty": self.repetition_penalty,
            "max_new_tokens": max_new_tokens,
            "eos_token_id": end_id,
            "pad_token_id": pad_id,
            "use_cache": True,
        }
        if self.sampling is not None:
            settings |= {**self.sampling, "seed": SEED}
        return settings


GREEDY = Profile("paper_reference")


@dataclass(frozen=True)
class Generation:
    """One answer.

    `text` without control tokens; `token_ids` as generated, the end token included; `finish_reason`, "stop" where the
    model ended, "length" where the budget did, "stopped" where the caller did; `prompt_width`, columns of the padded
    prompt, and `prompt_tokens`, those of them that are this request's own; `settings` of the call.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_width: int
    prompt_tokens: int
    settings: Mapping[str, Any]

    def __reduce__(self) -> tuple:
        told = (
            self.text,
            self.token_ids,
            self.finish_reason,
            self.prompt_width,
            self.prompt_tokens,
            dict(self.settings),
        )
        return _generation, told

    def __repr__(self) -> str:
        return f"Generation({self.text!r}, {len(self.token_ids)} tokens, {self.finish_reason})"


def _generation(text: str, ids: tuple[int, ...], reason: str, width: int, tokens: int, settings: dict) -> Generation:
    """Make a stored answer again."""
    return Generation(text, ids, reason, width, tokens, MappingProxyType(settings))


def sampled(temperature: float, top_p: float, top_k: int) -> Profile:
    """The profile "generic_sampled" of a family, from its three numbers."""
    numbers = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    return Profile("generic_sampled", sampling=MappingProxyType(numbers))


def profile_of(name: object, profiles: Mapping[str, Profile]) -> Profile:
    """A profile by its name. Raises: ArgumentError naming those there are."""
    if not isinstance(name, str) or name not in profiles:
        raise ArgumentError(
            f"profile {name!r} is not one of {', '.join(map(repr, profiles))}", code="bad_argument", source="profile"
        )
    return profiles[name]


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


def library_config(settings: Mapping[str, Any]) -> GenerationConfig:
    """The library's object for settings; the seed is not the library's."""
    return GenerationConfig(**{name: value for name, value in settings.items() if name != "seed"})


def seeded(seed: int | None, device: torch.device, run: Callable[[], Result]) -> Result:
    """`run()` on a random stream of its own, on the CPU and `device`; then the caller's random state is back.

    torch has one random state for all threads, so that only one such call runs at a time. Without a seed `run()` as it is.
    An interrupt while the state is put back does not keep it from being put back.
    """
    if seed is None:
        return run()
    held: list[bool] = []

    def give_back() -> None:
        _STREAM.release() if held and held.pop() else None  # in one line, so that it happens once or not at all

    # Not `with`: an interrupt at its end, before the lock is given back, would keep it from all other threads for ever.
    try:
        try:
            held.append(_STREAM.acquire())
            return _seeded(seed, device, run)
        finally:
            give_back()
    finally:
        give_back()


def _seeded(seed: int, device: torch.device, run: Callable[[], Result]) -> Result:
    """The part of `seeded` that one thread at a time may do."""
    on_cuda = device.type == "cuda"
    before = torch.get_rng_state()
    before_cuda = torch.cuda.get_rng_state(device) if on_cuda else None

    def restore() -> None:
        torch.set_rng_state(before)
        if before_cuda is not None:
            torch.cuda.set_rng_state(before_cuda, device)

    try:
        try:
            torch.default_generator.manual_seed(seed)
            if on_cuda:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
            return run()
        finally:
            restore()
    finally:
        restore()


class Watcher(StoppingCriteria):
    """Looks at every step of a generation: hands new text on, and stops all rows where the caller wants it.

    `width` columns are prompt; `decode` turns ids into text; a row is over after `end_id`. Text goes out in whole
    characters: bytes that do not make one yet wait for the next token.
    """

    def __init__(
        self, width: int, end_id: int, decode: Callable[[list[int]], str], on_text: OnText | None, stop: Stop | None
    ) -> None:
        self.width = width
        self.end_id = end_id
        self.decode = decode
        self.on_text = on_text
        self.stop = stop.is_set if isinstance(stop, threading.Event) else stop
        self.stopped = False
        self.seen = 0
        self.over: set[int] = set()
        self.waiting: dict[int, list[int]] = {}

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Called by the library after each token, with everything so far [B, L + new]."""
        if self.on_text is not None:
            for row, ids in enumerate(input_ids[:, self.width + self.seen :].tolist()):
                self._take(row, ids)
            self.seen = input_ids.shape[1] - self.width
        if self.stop is not None and self.stop():
            self.stopped = True
        return torch.full((len(input_ids),), self.stopped, dtype=torch.bool, device=input_ids.device)

    def finish(self) -> None:
        """Hand on what still waits."""
        for row, ids in self.waiting.items():
            if ids and self.on_text is not None:
                self._send(row, self.decode(ids))
        self.waiting.clear()

    def _take(self, row: int, ids: list[int]) -> None:
        if row in self.over:
            return
        waiting = self.waiting.setdefault(row, [])
        waiting += ids
        if self.end_id in ids:
            self.over.add(row)
            del waiting[waiting.index(self.end_id) :]
        text = self.decode(waiting)
        if not text.endswith("\ufffd"):
            waiting.clear()
            self._send(row, text)

    def _send(self, row: int, text: str) -> None:
        if text and self.on_text is not None:
            self.on_text(row, text)


def cut_at_end(ids: list[int], end_id: int) -> tuple[list[int], bool]:
    """A row's new ids up to and with the end token, and whether there was one; what follows is padding."""
    if end_id not in ids:
        return ids, False
    return ids[: ids.index(end_id) + 1], True


def check_callbacks(on_text: object, stop: object) -> None:
    """Raises: ArgumentError where `on_text` cannot be called, or `stop` is neither an Event nor callable."""
    if on_text is not None and not callable(on_text):
        raise ArgumentError(
            "on_text must be callable as on_text(request_index, text)", code="bad_argument", source="on_text"
        )
    if stop is not None and not isinstance(stop, threading.Event) and not callable(stop):
        raise ArgumentError(
            "stop must be a threading.Event or a function that returns a bool", code="bad_argument", source="stop"
        )


def check_seed(seed: object, profile: Profile) -> None:
    """Raises: ArgumentError for a seed that torch does not take, or that would change nothing."""
    if seed is None:
        return
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ArgumentError(
            f"seed is {seed!r}; pass a whole number in 0..2**63-1, or None for {SEED}",
            code="bad_argument",
            source="seed",
        )
    if profile.sampling is None:
        raise ArgumentError(
            f"profile {profile.name!r} draws nothing, so a seed would change nothing; leave it out, or sample with "
            "profile='generic_sampled'",
            code="bad_argument",
            source="seed",
        )


def without_false_reminder(run: Callable[[], Result]) -> Result:
    """`run()` without the library's word that a prompt is past "the model's predefined maximum length (1200.0)".

    It reads Music Flamingo's top-level `max_position_embeddings`, which is the period of its rotary time in seconds and
    no length in tokens; `budget` has already held the call to the real context.
    """
    logger = logging.getLogger("transformers.generation.stopping_criteria")
    mine = _NoReminder()
    try:
        try:
            logger.addFilter(mine)
            return run()
        finally:
            logger.removeFilter(mine)
    finally:
        logger.removeFilter(mine)


class _NoReminder(logging.Filter):
    """One call's filter, so that calls in two threads do not remove each other's."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "friendly reminder" not in record.getMessage()
