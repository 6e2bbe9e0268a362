"""How probable an answer is: prompts with a given answer written behind them, and its log-probability.

Conventions. An answer is text, or token ids, put behind the opened assistant turn as generation would; log-probabilities
are natural logarithms in float32, of each token given all before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from transformers import BatchFeature

from ..batch import EncodedPrompt
from ..errors import ArgumentError, RequestError
from ..rows import is_whole
from ..timeline import Timeline

if TYPE_CHECKING:
    from ..batch import PreparedBatch
    from ..session import Session

Answer = str | Sequence[int]


@dataclass(frozen=True, eq=False)
class AnswerScores:
    """Log-probabilities of one answer a request: `total` [B], `tokens`, a tensor [n_b] each, `token_ids` and `texts`.

    They are float32 on the model's device, with a graph where the call kept one.
    """

    total: torch.Tensor
    tokens: tuple[torch.Tensor, ...]
    token_ids: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]

    def __repr__(self) -> str:
        lines = [
            f"  request {b}: {text!r} {float(total):.3f} over {len(ids)} token(s)"
            for b, (text, total, ids) in enumerate(
                zip(self.texts, self.total.detach().cpu(), self.token_ids, strict=True)
            )
        ]
        return "\n".join(["AnswerScores (log-probability)", *lines])


def answer_ids(
    session: Session, batch: PreparedBatch, answers: Answer | Sequence[Answer]
) -> tuple[tuple[int, ...], ...]:
    """Token ids of the answers, one a request; one text for all requests is repeated.

    Raises: ArgumentError where their number does not fit, or one is empty or holds ids outside the vocabulary.
    """
    listed: list[Answer] = [answers] * len(batch) if isinstance(answers, str) else list(answers)  # type: ignore[arg-type]
    if listed and all(is_whole(a) for a in listed):
        listed = [listed] * len(batch)  # type: ignore[list-item]
    if len(listed) != len(batch):
        raise _bad(f"there are {len(listed)} answer(s) for {len(batch)} request(s); pass one, or one each")
    size = session.model.config.get_text_config().vocab_size
    found = []
    for b, answer in enumerate(listed):
        if isinstance(answer, str):
            ids = session.processor.tokenizer(answer, add_special_tokens=False)["input_ids"]
        else:
            ids = [int(token) if is_whole(token) else -1 for token in answer] if hasattr(answer, "__iter__") else []
        if not ids or not all(0 <= token < size for token in ids):
            raise _bad(f"the answer of request {b} is {answer!r}; it must be text, or ids within 0..{size - 1}")
        found.append(tuple(ids))
    return tuple(found)


def answered(session: Session, batch: PreparedBatch, answers: Answer | Sequence[Answer]) -> PreparedBatch:
    """The batch with an answer behind each prompt; positions and timeline moved along, padding again on the left.

    Raises: ArgumentError as `answer_ids`, RequestError `too_long` where prompt and answer pass the context.

    >>> from audiollm import Request, demo
    >>> session = demo.load("moss_music")
    >>> batch = session.prepare([Request("Which instrument?", [demo.clips()["bass"]])])
    >>> longer = answered(session, batch, "bass")
    >>> longer.tokens[-1].role, longer.width > batch.width
    ('assistant', True)
    """
    ids = answer_ids(session, batch, answers)
    prompts = []
    for b, (prompt, mine) in enumerate(zip(batch.prompts, ids, strict=True)):
        longer = EncodedPrompt(list(prompt.ids), list(prompt.roles), list(prompt.sources), list(prompt.marker_s))
        longer.extend(mine, "assistant")
        if len(longer) > session.context:
            raise RequestError(
                f"request {b} takes {len(longer):,} tokens with its answer and the context holds {session.context:,}",
                code="too_long",
                source=f"requests[{b}]",
            )
        prompts.append(longer)
    width = max(len(prompt) for prompt in prompts)
    shifts = [(width - len(new)) - (batch.width - len(old)) for new, old in zip(prompts, batch.prompts, strict=True)]
    inputs = {name: _moved(name, tensor, batch, prompts, width, ids) for name, tensor in batch.inputs.items()}
    timeline = [replace(t, positions=t.positions + shifts[t.sample_index]) for t in batch.timeline]
    slots = [replace(s, token_positions=s.token_positions + shifts[s.sample_index]) for s in batch.slots]
    return replace(
        batch,
        inputs=BatchFeature(inputs),
        slots=tuple(slots),
        timeline=Timeline(tuple(timeline)),
        prompts=tuple(prompts),
    )


def _moved(
    name: str, tensor: torch.Tensor, batch: PreparedBatch, prompts: Sequence[EncodedPrompt], width: int, ids: Sequence
) -> torch.Tensor:
    """An input [B, L] over the longer prompts; any other as it is."""
    if name not in ("input_ids", "attention_mask", "audio_input_mask"):
        return tensor
    filler = {"input_ids": batch.model_shape.pad_id}.get(name, 0)
    moved = torch.full((len(batch), width), filler, dtype=tensor.dtype, device=tensor.device)
    for b, prompt in enumerate(prompts):
        n, end = len(prompt), width - len(ids[b])
        moved[b, width - n : end] = tensor[b, batch.width - (n - len(ids[b])) :]
        if name == "input_ids":
            moved[b, end:] = torch.tensor(ids[b], dtype=tensor.dtype, device=tensor.device)
        elif name == "attention_mask":
            moved[b, end:] = 1
    return moved


def answer_scores(
    session: Session, batch: PreparedBatch, answers: Answer | Sequence[Answer], grad: bool = False
) -> AnswerScores:
    """Log-probability of a given answer to each request, by one prefill over prompt and answer.

    The head runs on the answer's positions only. With `grad=True` the graph is kept from `batch.inputs` on.
    Raises: as `answered`; SessionBusyError.

    >>> from audiollm import Request, demo
    >>> session = demo.load("music_flamingo")
    >>> batch = session.prepare([Request("Which instrument?", [demo.clips()["bass"]])])
    >>> answer_scores(session, batch, "piano").total.shape
    torch.Size([1])
    """
    ids = answer_ids(session, batch, answers)
    longer = answered(session, batch, ids)
    most = max(len(mine) for mine in ids)
    logits = session.forward(longer, grad=grad, logits_to_keep=most + 1).logits
    with torch.set_grad_enabled(grad):
        tokens = []
        for row, mine in zip(logits, ids, strict=True):
            logprobs = row[-len(mine) - 1 : -1].float().log_softmax(-1)
            wanted = torch.tensor(mine, device=row.device)
            tokens.append(logprobs.gather(1, wanted[:, None])[:, 0])
        total = torch.stack([mine.sum() for mine in tokens])
    texts = tuple(session.processor.tokenizer.decode(list(mine)) for mine in ids)
    return AnswerScores(total, tuple(tokens), ids, texts)


def _bad(what: str) -> ArgumentError:
    return ArgumentError(what, code="bad_argument", source="answers")
