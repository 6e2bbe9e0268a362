"""Logit lens: what each layer would answer if it were the last, at every audio token.

The final norm and the output head are applied to what block i receives (nostalgebraist, "interpreting GPT: the logit
lens", 2020). Conventions: layer i < n is resid[i], layer n is resid[n], before the final norm, so that the last row is
what the model itself predicts; probabilities are over the whole vocabulary, in float32; entropy is in nats; rank 0 is the most
probable token; seconds are of the source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch
from tqdm.auto import tqdm

from ..errors import ArgumentError
from ..observe import LIMIT_BYTES
from ..rows import Rows

if TYPE_CHECKING:
    from ..batch import PreparedBatch
    from ..session import Session


# Arrays of vocabulary size that exist at a time: logits, log-probabilities, probabilities and their entropies, in float32.
_ARRAYS = 4


@dataclass(frozen=True, eq=False)
class LogitLens:
    """What N layers say at R rows.

    `layers` N numbers; `rows`, what the R rows are, with seconds; `top_ids` and `top_probs` [N, R, k], most probable
    first; `entropy` [N, R] nats; for W chosen words `word_ids`, `word_probs` and `word_ranks` [N, R, W]; `texts`, the
    text of every id that occurs.
    """

    layers: tuple[int, ...]
    rows: Rows
    top_ids: np.ndarray
    top_probs: np.ndarray
    entropy: np.ndarray
    words: tuple[str, ...]
    word_ids: tuple[int, ...]
    word_probs: np.ndarray
    word_ranks: np.ndarray
    texts: Mapping[int, str]

    def source(self, number: int) -> LogitLens:
        """The rows of one source, numbered as in `batch.slots`."""
        mine = self.rows.source == number
        return LogitLens(
            self.layers,
            self.rows[mine],
            self.top_ids[:, mine],
            self.top_probs[:, mine],
            self.entropy[:, mine],
            self.words,
            self.word_ids,
            self.word_probs[:, mine],
            self.word_ranks[:, mine],
            self.texts,
        )

    def describe(self) -> str:
        """Each layer's mean entropy and its most common top token, and where each word is most probable."""
        lines = [f"Logit lens over {len(self.layers)} layer(s) and {len(self.rows)} row(s)."]
        for k, layer in enumerate(self.layers):
            ids, counts = np.unique(self.top_ids[k, :, 0], return_counts=True)
            common = int(ids[counts.argmax()])
            lines.append(
                f"Layer {layer}: mean entropy {self.entropy[k].mean():.3g} nats; most common top token "
                f"{self.texts[common]!r} ({counts.max()} of {len(self.rows)} rows)."
            )
        for w, word in enumerate(self.words):
            k, r = divmod(int(self.word_probs[..., w].argmax()), len(self.rows))
            second = self.rows.start_s[r]
            where = f"column {self.rows.position[r]}" if np.isnan(second) else f"{second:.2f} s"
            lines.append(
                f"{word!r} is most probable at layer {self.layers[k]}, {where}: {self.word_probs[k, r, w]:.3g}, rank "
                f"{self.word_ranks[k, r, w]}."
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        words = f", words {list(self.words)}" if self.words else ""
        return f"LogitLens(layers {self.layers[0]}..{self.layers[-1]}, {len(self.rows)} rows{words})"


def logit_lens(
    session: Session,
    batch: PreparedBatch,
    words: Sequence[str | int] = (),
    layers: Sequence[int] | None = None,
    top_k: int = 5,
    tokens: str | Sequence[int] | None = "audio",
    seconds: tuple[float, float] | None = None,
    source: int | Sequence[int] | None = None,
    chunk_bytes: int = 256 << 20,
    limit_bytes: int = LIMIT_BYTES,
) -> LogitLens:
    """Top tokens, entropy, and rank and probability of chosen words, by layer and row.

    `words` are token ids or texts, of which the first token counts ("piano" and " piano" differ); `layers` are 0..n,
    negative ones from the end, all by default; `tokens`, `seconds` and `source` choose rows as in `Session.observe`.
    Costs one prefill, then N x R rows through the head; at most about `chunk_bytes` of logits exist at a time, and N x R x D
    states are kept on the CPU, at most `limit_bytes`.

    Raises: ArgumentError for layers or rows that do not exist, an empty word, `too_large` before the model runs;
    SessionBusyError.

    >>> from audiollm import Request, demo
    >>> session = demo.load("music_flamingo")
    >>> batch = session.prepare([Request("Which instrument?", [demo.clips()["bass"]])])
    >>> lens = logit_lens(session, batch, words=["bass"], seconds=(0, 2))
    >>> lens.word_probs.shape == (session.n_layers + 1, 50, 1)
    True
    """
    numbers = _layer_numbers(session, layers)
    ids, names = _word_ids(session, words)
    points = [f"resid[{layer}]" for layer in numbers]
    size = session.model.config.get_text_config().vocab_size
    if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= size:
        raise ArgumentError(f"top_k is {top_k!r}; pass 1..{size}", code="bad_argument", source="top_k")
    block = max(1, int(chunk_bytes) // (_ARRAYS * 4 * size))
    seen = session.capture(batch, points, tokens, seconds, source, limit_bytes=limit_bytes)
    found: list[list[np.ndarray]] = []
    for point in tqdm(points, desc="logit lens", unit="layer", disable=None):
        parts = [_read(session, states, ids, top_k) for states in seen[point].values.split(block)]
        found.append([np.concatenate(group) for group in zip(*parts, strict=True)])
    top_ids, top_probs, entropy, word_probs, word_ranks = (np.stack(group) for group in zip(*found, strict=True))
    occurring = sorted({*np.unique(top_ids).tolist(), *ids})
    decode = session.processor.tokenizer.decode
    rows = seen[points[0]].rows
    assert rows is not None
    return LogitLens(
        numbers,
        rows,
        top_ids,
        top_probs,
        entropy,
        names,
        ids,
        word_probs,
        word_ranks,
        MappingProxyType({token: decode([token]) for token in occurring}),
    )


@torch.no_grad()
def _read(session: Session, states: torch.Tensor, ids: Sequence[int], top_k: int) -> tuple[np.ndarray, ...]:
    """States [m, D] -> top ids and probabilities [m, k], entropy [m], word probabilities and ranks [m, W]."""
    adapter = session._adapter
    states = states.to(next(adapter.final_norm().parameters()))
    logprobs = adapter.head()(adapter.final_norm()(states[None]))[0].float().log_softmax(-1)
    top = logprobs.topk(top_k, dim=-1)
    entropy = torch.special.entr(logprobs.exp()).sum(-1)
    chosen = logprobs[:, list(ids)]
    ranks = torch.stack([(logprobs > column[:, None]).sum(-1) for column in chosen.unbind(1)], 1) if ids else chosen
    return tuple(
        part.cpu().numpy() for part in (top.indices, top.values.exp(), entropy, chosen.exp(), ranks.to(torch.int64))
    )


def _layer_numbers(session: Session, layers: Sequence[int] | None) -> tuple[int, ...]:
    shape = session._adapter.model_shape()
    if layers is None:
        return tuple(range(shape.n_blocks + 1))
    numbers = tuple(shape.layer(layer) for layer in session._checked_layers(layers))
    if not numbers:
        raise ArgumentError("layers is empty; pass at least one, or None for all", code="bad_argument", source="layers")
    return numbers


def _word_ids(session: Session, words: Sequence[str | int]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """First token of each word, and its name: the word, or the text of an id."""
    if isinstance(words, (str, int)):
        raise ArgumentError(f"words is {words!r}; pass a list, such as ['piano']", code="bad_argument", source="words")
    tokenizer, size = session.processor.tokenizer, session.model.config.get_text_config().vocab_size
    ids, names = [], []
    for word in words:
        if isinstance(word, str):
            mine = tokenizer(word, add_special_tokens=False)["input_ids"]
            token, name = (mine[0] if mine else -1), word
        else:
            token = int(word)
            name = tokenizer.decode([token]) if 0 <= token < size else ""
        if not 0 <= token < size:
            raise ArgumentError(
                f"{word!r} is no word: pass text of at least one token, or an id within 0..{size - 1}",
                code="bad_argument",
                source="words",
            )
        ids.append(token)
        names.append(name)
    return tuple(ids), tuple(names)
