"""What a block changes: the states of every layer, what comes next, and the answer, without it and with it.

Conventions. "Before" is without the block, "after" within it; blocks of the caller that are open hold for both. Layers
as in `Session.extract_contextual_embeddings`; rows are positions of the prompt; norms are Euclidean and cosines between
the state before and the state after at one place, both in float32, the cosine NaN where either state is 0. Probabilities are
of the first new token over the whole vocabulary; the divergence is that of Kullback and Leibler, of after from before, in nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..errors import ArgumentError
from ..generation import Generation
from ..observe import LIMIT_BYTES, Activation
from ..request import Request
from ..rows import Rows, is_whole
from .sweep import prepared

if TYPE_CHECKING:
    from ..batch import PreparedBatch
    from ..session import Session

Block = AbstractContextManager


@dataclass(frozen=True)
class NextToken:
    """One candidate for the first new token: `id`, `text`, and its probability `before` and `after`."""

    id: int
    text: str
    before: float
    after: float

    @property
    def label(self) -> str:
        """The text in quotes, with the id where it is part of a character only, which others look like as well."""
        return f"{self.text!r} {self.id}" if "\ufffd" in self.text else repr(self.text)

    def __repr__(self) -> str:
        return f"{self.label} {self.before:.3f} -> {self.after:.3f}"


@dataclass(frozen=True, eq=False)
class EditEffect:
    """What a block changed for a batch of B requests: N layers at R positions of the prompt.

    `layers`, N numbers; `rows`, what the R positions are, with seconds; `norms_before`, `norms_after`, `cosine` [N, R]
    float32; `next_tokens`, for each request those that are most probable before or after; `divergence` [B] nats;
    `answers_before` and `answers_after`, one a request, empty where none were asked for; `names` of the sources.
    """

    layers: tuple[int, ...]
    rows: Rows
    norms_before: np.ndarray
    norms_after: np.ndarray
    cosine: np.ndarray
    next_tokens: tuple[tuple[NextToken, ...], ...]
    divergence: np.ndarray
    answers_before: tuple[Generation, ...]
    answers_after: tuple[Generation, ...]
    names: tuple[str, ...]

    def source(self, number: int) -> EditEffect:
        """The positions of one source's audio, numbered as in `batch.slots`. Raises: ArgumentError where there is none."""
        if not 0 <= number < len(self.names):
            raise _bad(f"source {number!r} is not one of the {len(self.names)} source(s)", "source")
        return self._where(self.rows.source == number)

    def last(self, sample_index: int = 0) -> EditEffect:
        """The last position of one request's prompt, whose logits choose the first new token; R is 1. Raises: ArgumentError."""
        mine = np.flatnonzero(self.rows.sample_index == sample_index)
        if not len(mine):
            raise _bad(f"request {sample_index!r} is not one of the {len(self.next_tokens)} request(s)", "sample_index")
        return self._where(np.arange(len(self.rows)) == mine[-1])

    def _where(self, mask: np.ndarray) -> EditEffect:
        return replace(
            self,
            rows=self.rows[mask],
            norms_before=self.norms_before[:, mask],
            norms_after=self.norms_after[:, mask],
            cosine=self.cosine[:, mask],
        )

    def describe(self) -> str:
        """What a plot and the tables of it show, in words."""
        lines = [f"Effect of the block on {len(self.next_tokens)} request(s), layers {self._layer_words()}"]
        for number, name in enumerate(self.names):
            lines.append(f"  source {number} {name}: {_states(self.source(number))}")
        for b, tokens in enumerate(self.next_tokens):
            lines.append(f"  request {b}, last position: {_states(self.last(b))}")
            before, after = max(tokens, key=lambda t: t.before), max(tokens, key=lambda t: t.after)
            lines.append(
                f"  request {b}, next token: {before.label} {before.before:.3f} before, {after.label} {after.after:.3f} "
                f"after, divergence {self.divergence[b]:.4f} nats"
            )
            if self.answers_before:
                was, now = self.answers_before[b], self.answers_after[b]
                same = was.token_ids == now.token_ids
                told = f"{was.text!r} either way" if same else f"{was.text!r} before, {now.text!r} after"
                lines.append(f"  request {b}, answer: {told}")
        return "\n".join(lines)

    def _layer_words(self) -> str:
        first, last = self.layers[0], self.layers[-1]
        whole = self.layers == tuple(range(first, last + 1))
        return f"{first}..{last}" if whole and len(self.layers) > 1 else ", ".join(map(str, self.layers))

    def __repr__(self) -> str:
        divergence = ", ".join(f"{nats:.4g}" for nats in self.divergence)
        return f"EditEffect({len(self.layers)} layers at {self.rows!r}, divergence {divergence} nats)"


def edit_effect(
    session: Session,
    batch: Request | PreparedBatch,
    blocks: Block | Sequence[Block],
    layers: Sequence[int] | None = None,
    max_new_tokens: int = 0,
    profile: str = "paper_reference",
    top_k: int = 10,
    limit_bytes: int = LIMIT_BYTES,
) -> EditEffect:
    """Run a batch without and with a block, or several nested ones, and compare what the model computes.

    `blocks` come from `Session.edit`, `SteeringVector.apply` or others, not yet open; several are entered in order, each
    once. With `max_new_tokens` answers are generated from the batch's requests as well, 0 leaves them out.

    Cost: two prefills, or two generations; the states of all asked layers (default: every one) at all positions are kept
    on the CPU twice, each time at most `limit_bytes`.
    Raises: ArgumentError for layers out of range, a `top_k` outside the vocabulary, `too_large` before the model runs, or
    where answers are asked of a batch that is not what its requests prepare to; as the blocks do; SessionBusyError.

    >>> from audiollm import Request, demo, edits
    >>> session = demo.load("moss_music")
    >>> batch = session.prepare([Request("Which instrument?", [demo.clips()["bass"]])])
    >>> effect = edit_effect(session, batch, session.edit({"resid[3]": edits.scale(2.0)}, seconds=(1, 2)))
    >>> effect.source(0).cosine.shape
    (7, 150)
    >>> bool(effect.source(0).norms_after[3].max() > effect.source(0).norms_before[3].max())
    True
    """
    batch = prepared(session, batch, "batch")
    numbers = _layers(session, layers)
    size = session.model.config.get_text_config().vocab_size
    if not is_whole(top_k) or not 1 <= top_k <= size:
        raise _bad(f"top_k is {top_k!r}; pass 1..{size}", "top_k")
    if not is_whole(max_new_tokens) or max_new_tokens < 0:
        raise _bad(f"max_new_tokens is {max_new_tokens!r}; pass a whole number, 0 for no answer", "max_new_tokens")
    run = _Run(session, batch, numbers, int(max_new_tokens), profile, limit_bytes)
    before, answers_before = run()
    listed = list(blocks) if isinstance(blocks, Sequence) else [blocks]
    after, answers_after = _within(listed, run)
    states = [_compared(before[name].values, after[name].values) for name in run.points]
    norms_before, norms_after, cosine = (np.stack(part) for part in zip(*states, strict=True))
    was, now = (_logprobs(seen["logits"], len(batch)) for seen in (before, after))
    divergence = torch.where(was.exp() > 0, was.exp() * (was - now), 0.0).sum(-1).numpy()
    return EditEffect(
        layers=numbers,
        rows=before[run.points[0]].known_rows(),
        norms_before=norms_before,
        norms_after=norms_after,
        cosine=cosine,
        next_tokens=tuple(_top(session, *pair, top_k) for pair in zip(was, now, strict=True)),
        divergence=divergence,
        answers_before=answers_before,
        answers_after=answers_after,
        names=tuple(slot.name for slot in batch.slots),
    )


@dataclass(frozen=True, eq=False)
class _Run:
    """One run of a batch, as often as it is called."""

    session: Session
    batch: PreparedBatch
    layers: tuple[int, ...]
    max_new_tokens: int
    profile: str
    limit_bytes: int

    @property
    def points(self) -> list[str]:
        return [f"resid[{k}]" if k < self.session.n_layers else "final" for k in self.layers]

    def __call__(self) -> tuple[dict[str, Activation], tuple[Generation, ...]]:
        """What each point computed for the prompt, "logits" of each request's last position, and the answers."""
        session, batch = self.session, self.batch
        answers: list[Generation] = []
        columns = range(batch.width)  # the prompt's, so that generated tokens are left out
        with session.observe([*self.points, "logits"], columns, limit_bytes=self.limit_bytes) as seen:
            if self.max_new_tokens:
                answers = session.generations(batch.requests, self.profile, self.max_new_tokens)
            else:
                session.forward(batch)
        if len(seen[self.points[0]].known_rows()) != sum(len(prompt) for prompt in batch.prompts):
            raise _bad(
                "the batch's prompts are not what its requests prepare to (an answer was written behind them?); pass "
                "max_new_tokens=0",
                "max_new_tokens",
            )
        return dict(seen), tuple(answers)


def _within(blocks: Sequence[Block], run: _Run) -> tuple[dict[str, Activation], tuple[Generation, ...]]:
    """`run()` inside all blocks. Nested `with` statements, which an interrupt leaves as cleanly as each block can."""
    if not blocks:
        return run()
    with blocks[0]:
        return _within(blocks[1:], run)


def _compared(before: torch.Tensor, after: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """States [R, D] twice -> both norms and the cosine, each [R]."""
    was, now = before.float(), after.float()
    long, longer = was.norm(dim=-1), now.norm(dim=-1)
    cosine = (was * now).sum(-1) / (long * longer)  # 0 / 0 is NaN, which says that there is none
    return long.numpy(), longer.numpy(), cosine.clamp(-1, 1).numpy()


def _logprobs(logits: Activation, n_requests: int) -> torch.Tensor:
    """[B, V] float32: log-probabilities of the first new token of each request."""
    samples = logits.known_rows().sample_index
    last = [int(np.flatnonzero(samples == b)[-1]) for b in range(n_requests)]
    return logits.values[last].float().log_softmax(-1)


def _top(session: Session, was: torch.Tensor, now: torch.Tensor, top_k: int) -> tuple[NextToken, ...]:
    """The `top_k` most probable tokens of either of two log-probabilities [V], the most probable in any first."""
    most = torch.maximum(was, now)
    ids = sorted({*was.topk(top_k).indices.tolist(), *now.topk(top_k).indices.tolist()}, key=lambda k: (-most[k], k))
    decode = session.processor.tokenizer.decode
    return tuple(NextToken(k, decode([k]), float(was[k].exp()), float(now[k].exp())) for k in ids)


def _layers(session: Session, layers: Sequence[int] | None) -> tuple[int, ...]:
    shape = session._adapter.model_shape()
    asked = range(shape.n_blocks + 1) if layers is None else session._checked_layers(layers)
    numbers = tuple(dict.fromkeys(shape.layer(layer) for layer in asked))
    if not numbers:
        raise _bad("layers is empty; pass at least one, or None for all", "layers")
    return numbers


def _states(part: EditEffect) -> str:
    """How much the states of some positions changed, and where most."""
    cosine = part.cosine
    undefined = int(np.isnan(cosine).sum())
    zeros = f"; the state is 0 at {undefined} of {cosine.size} places" if undefined else ""
    if undefined == cosine.size:
        return f"no cosine is defined{zeros}"
    layer, row = np.unravel_index(np.nanargmin(cosine), cosine.shape)
    lowest = float(cosine[layer, row])
    if lowest > 1 - 1e-5 and np.allclose(part.norms_before, part.norms_after, rtol=1e-5) and not undefined:
        return "no state changed"
    start_s, end_s = part.rows.start_s[row], part.rows.end_s[row]
    where = "" if np.isnan(start_s) else f" at {start_s:.2f}-{end_s:.2f} s"
    return (
        f"mean cosine {float(np.nanmean(cosine)):.3f}, lowest {lowest:.3f} in layer {part.layers[layer]}{where}, mean norm "
        f"{part.norms_before.mean():.3g} before and {part.norms_after.mean():.3g} after{zeros}"
    )


def _bad(what: str, source: str) -> ArgumentError:
    return ArgumentError(what, code="bad_argument", source=source)
