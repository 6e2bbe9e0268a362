"""Ctrl-C at any line: whatever the engine was doing, the model is afterwards as a fresh one.

An interrupt is raised at one line of the engine after the other, by a trace function. Every line is tried where
AUDIOLLM_EVERY_LINE is set; otherwise about two hundred of them a call, spread evenly, which ones changing from call to call.

One line cannot be defended by any context manager that is written in Python: the first of `__exit__`, before its `try`.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from looking import FAMILIES, hooks, noise

from audiollm import Request, edits
from audiollm.analysis import attention_over_time
from audiollm.calls import Context
from audiollm.generation import _STREAM

FILES = tuple(
    os.sep + name
    for name in (
        "session.py",
        "hooks.py",
        "generation.py",
        "calls.py",
        "observe.py",
        "edits.py",
        "attention.py",
        "deepstack.py",
        "base.py",
    )
)
EXIT = Context.__exit__.__code__.co_firstlineno + 1
LOGGER = logging.getLogger("transformers.generation.stopping_criteria")


def free(lock) -> bool:
    """Whether another thread could take a lock that this one may hold."""
    got: list[bool] = []

    def attempt() -> None:
        got.append(lock.acquire(blocking=False))
        if got[0]:
            lock.release()

    other = threading.Thread(target=attempt)
    other.start()
    other.join()
    return got[0]


def traced(call: Callable[[], object], stop_at: int | None) -> int:
    """Lines of the engine that `call` ran; KeyboardInterrupt at line number `stop_at`."""
    count = 0

    def local(frame, event, arg):
        nonlocal count
        if event == "line" and not (frame.f_code.co_name == "__exit__" and frame.f_lineno <= EXIT):
            count += 1
            if count == stop_at:
                raise KeyboardInterrupt
        return local

    def trace(frame, event, arg):
        name = frame.f_code.co_filename
        return local if "audiollm" in name + "vendor" and name.endswith(FILES) and "tests" not in name else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def calls(session, requests, batch) -> dict[str, Callable[[], object]]:
    def observing():
        with (
            session.edit({"resid[1]": edits.scale(2)}, tokens="last"),
            session.observe(["resid[2]", "mlp_out[0]"]) as seen,
        ):
            session.forward(batch)
        return seen["resid[2]"].values

    return {
        "extract": lambda: session.extract_contextual_embeddings(batch, (0, 2, -1)),
        "forward": lambda: session.forward(batch, output_hidden_states=True),
        "greedy": lambda: session.generate(requests, max_new_tokens=2),
        "sampled": lambda: session.generate(requests, "generic_sampled", 2),
        "observe": observing,
        "attention": lambda: attention_over_time(session, batch)[0].text.tolist(),
        "audio": lambda: session.extract_audio_embeddings(batch),
    }


@pytest.mark.parametrize("name", ("extract", "forward", "greedy", "sampled", "observe", "attention", "audio"))
@pytest.mark.parametrize("family", FAMILIES)
def test_an_interrupt_at_any_line_leaves_a_fresh_model(request, family, name):
    session = request.getfixturevalue(family)
    # Music Flamingo hears 30 s windows whatever is asked; text alone keeps a sweep short, and one call has audio.
    has_audio = family == "session_moss" or name in ("extract", "audio")
    requests = [Request("x", [noise(3_000)] if has_audio else [])]
    batch = session.prepare(requests)
    call = calls(session, requests, batch)[name]
    plain = call()
    before, state, filters = hooks(session), torch.get_rng_state(), list(LOGGER.filters)
    lines = traced(call, None)
    budget = 25 if family == "session_mf" and has_audio else 200
    step = 1 if os.environ.get("AUDIOLLM_EVERY_LINE") else max(1, lines // budget)
    tried = 0
    for stop_at in range(1 + len(name) % step, lines + 1, step):
        with pytest.raises(KeyboardInterrupt):
            traced(call, stop_at)
        tried += 1
        assert hooks(session) == before, f"a hook stayed after line {stop_at}"
        assert torch.equal(torch.get_rng_state(), state), f"random state after line {stop_at}"
        assert not session._running and not session._contexts, f"busy after line {stop_at}"
        assert free(_STREAM), f"no other thread can sample after line {stop_at}"
        assert torch.is_grad_enabled() and LOGGER.filters == filters, f"grad mode or log filter after line {stop_at}"
        assert torch.get_default_dtype() == torch.float32
    assert tried >= min(lines, 20)
    assert _same(call(), plain)


def _same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(_same(one[key], other[key]) for key in other)
    if isinstance(one, (list, tuple)):
        return all(_same(a, b) for a, b in zip(one, other, strict=True))
    if hasattr(one, "raw"):
        return torch.equal(one.raw, other.raw) and torch.equal(one.projected, other.projected)
    return one == other
