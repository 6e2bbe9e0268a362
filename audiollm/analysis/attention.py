"""Attention over time: how much a word looks at each second of each source, by layer and head.

For chosen query rows only, so that no [L, L] matrix ever exists: the queries and keys that attention itself receives
(after their projections and norms, whatever is hooked there) are taken from hooks, turned by the call's own rotary
embeddings, and their softmax is computed in float32 (scaled dot-product attention, Vaswani et al., 2017; rotary
positions, Su et al., 2021). It works whichever attention the model was loaded with, and does not change what it computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..calls import Context
from ..errors import ArgumentError
from ..hooks import Halt
from ..observe import LIMIT_BYTES, too_large
from ..rows import Selection, is_whole
from .answers import Answer, answer_ids, answered

if TYPE_CHECKING:
    from ..batch import PreparedBatch
    from ..session import Session


@dataclass(frozen=True, eq=False)
class AttentionOverTime:
    """Where Q query rows of one request look, at N layers with H heads.

    `weights` [N, H, Q, U] on the request's audio tokens, source after source; `text` [N, H, Q], the share of all other
    tokens, so that the two sum to 1; `sources` [U], the number in `batch.slots` of each token; `intervals` [U, 2]
    seconds; `layers` block numbers; `queries` Q columns of the padded prompt, and `labels`, the token that each of them predicts
    (an answer's token), or its own text.
    """

    sample_index: int
    layers: tuple[int, ...]
    queries: tuple[int, ...]
    labels: tuple[str, ...]
    weights: np.ndarray
    text: np.ndarray
    sources: np.ndarray
    intervals: np.ndarray
    names: tuple[str, ...]

    def by_source(self) -> np.ndarray:
        """[N, H, Q, sources] share of each source of the request, in order."""
        shares = [self.weights[..., self.sources == number].sum(-1) for number in np.unique(self.sources)]
        return np.stack(shares, axis=-1) if shares else np.zeros((*self.text.shape, 0), np.float32)

    def by_seconds(self, step_s: float, source: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Share by stretches of `step_s` seconds of one source: edges [T + 1] in seconds, and sums [N, H, Q, T].

        A token counts where its centre lies. `source` is a number in `batch.slots`, the request's first by default.
        Raises: ArgumentError for a step that is not positive or a source that is not the request's.
        """
        numbers = np.unique(self.sources)
        chosen = (numbers[0] if len(numbers) else -1) if source is None else source
        if chosen not in numbers:
            raise ArgumentError(
                f"source {source!r} is not of request {self.sample_index}, which has {numbers.tolist()}",
                code="bad_argument",
                source="source",
            )
        if not 0 < step_s < float("inf"):
            raise ArgumentError(f"step_s is {step_s!r}; pass seconds above 0", code="bad_argument", source="step_s")
        mine = self.sources == chosen
        intervals = self.intervals[mine]
        count = max(1, int(np.ceil(intervals[-1, 1] / step_s - 1e-9)))
        bins = np.minimum((intervals.mean(1) // step_s).astype(int), count - 1)
        sums = np.zeros((*self.weights.shape[:3], count), np.float32)
        np.add.at(np.moveaxis(sums, -1, 0), bins, np.moveaxis(self.weights[..., mine], -1, 0))
        return np.minimum(np.arange(count + 1) * step_s, intervals[-1, 1]), sums

    def describe(self) -> str:
        """For each query: the share of text and of each source, averaged over layers and heads, and its loudest second."""
        lines = [f"Attention of request {self.sample_index}, mean over {len(self.layers)} layer(s) and all heads."]
        shares = self.by_source().mean((0, 1))
        for q, label in enumerate(self.labels):
            parts = [f"text {self.text[:, :, q].mean():.3f}"]
            parts += [f"{name} {shares[q, s]:.3f}" for s, name in enumerate(self.names)]
            if len(self.sources):
                top = int(self.weights[:, :, q].mean((0, 1)).argmax())
                parts.append(f"most at {self.intervals[top, 0]:.2f} s of source {self.sources[top]}")
            lines.append(f"{label!r}: {', '.join(parts)}.")
        return "\n".join(lines)

    def __repr__(self) -> str:
        n, h, q, u = self.weights.shape
        return f"AttentionOverTime(request {self.sample_index}, {n} layers, {h} heads, {q} queries, {u} audio tokens)"


def attention_over_time(
    session: Session,
    batch: PreparedBatch,
    answers: Answer | Sequence[Answer] | None = None,
    queries: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    limit_bytes: int = LIMIT_BYTES,
) -> tuple[AttentionOverTime, ...]:
    """Attention weights of chosen rows to every audio token, by layer and head; one result a request.

    Without more, the query is the last prompt token, which chooses the first new one. With `answers` (see
    `answer_scores`), the rows that predict each token of the answer. `queries` are columns of the padded prompt instead,
    negative ones from its end. `layers` are block numbers 0..n-1, negative ones from the end, all by default. Costs one
    prefill to the deepest block, keeps N x H x Q x L float32 a request and needs the keys of one layer beside it.

    Raises: ArgumentError for rows or layers that do not exist, for both answers and queries, `too_large` before the
    model runs; RequestError `too_long`; SessionBusyError.

    >>> from audiollm import Request, demo
    >>> session = demo.load("moss_music")
    >>> batch = session.prepare([Request("Which instrument?", [demo.clips()["bass"]])])
    >>> (found,) = attention_over_time(session, batch)
    >>> bool(abs(found.weights.sum(-1) + found.text - 1).max() < 1e-5)
    True
    """
    session._check_batch(batch)
    if answers is not None and queries is not None:
        raise ArgumentError("pass answers or queries, not both", code="bad_argument", source="queries")
    blocks = session._adapter.blocks()
    numbers = _block_numbers(len(blocks), layers)
    run, columns, labels = _queries(session, batch, answers, queries)
    config = session.model.config.get_text_config()
    wanted = 4 * len(numbers) * config.num_attention_heads * run.width * sum(len(mine) for mine in columns)
    if wanted > limit_bytes:
        raise too_large(wanted, limit_bytes, "choose layers=, fewer queries, or raise limit_bytes")
    taking = _Taking(session, run, numbers, columns)

    def work() -> None:
        try:
            session._prefill(run, logits_to_keep=1)
        except Halt:
            return

    with taking:
        session._alone(False, work, run)
    return tuple(_result(run, b, numbers, columns[b], labels[b], taking.found) for b in range(len(run)))


def row_weights(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    columns: Sequence[int],
    first: int = 0,
    scaling: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Attention weights [H, Q, L] float32 of one request's query rows, from what attention receives before rotation.

    `query` [L, H, d] and `key` [L, G, d], with H a multiple of G (grouped queries, Ainslie et al., 2023); `cos` and
    `sin` [L, d]; `columns` Q row numbers; keys before `first` are padding, those after a row are not seen, nor those
    `window` or more before it. `scaling` is d**-0.5 where it is not given.
    """
    at = torch.as_tensor(list(columns), device=query.device)
    rows = _rotated(query[at], cos[at][:, None], sin[at][:, None]).float()
    keys = _rotated(key, cos[:, None], sin[:, None]).float()
    n_heads, groups = rows.shape[1], keys.shape[1]
    rows = rows.reshape(len(at), groups, n_heads // groups, -1)
    scores = torch.einsum("qgrd,kgd->grqk", rows, keys) * (rows.shape[-1] ** -0.5 if scaling is None else scaling)
    place = torch.arange(keys.shape[0], device=query.device)
    unseen = (place[None] > at[:, None]) | (place[None] < first)
    if window is not None:
        unseen |= place[None] <= at[:, None] - window
    return scores.masked_fill_(unseen, float("-inf")).softmax(-1).flatten(0, 1)


def _rotated(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding with the two halves of a head as pairs, as Qwen's models have it."""
    left, right = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-right, left], dim=-1) * sin


class _Taking(Context):
    """The hooks of one call: queries and keys of each block, and from its attention the rotation."""

    def __init__(
        self, session: Session, batch: PreparedBatch, layers: Sequence[int], columns: Sequence[Sequence[int]]
    ) -> None:
        super().__init__(session, (), Selection(), batch, must_fire=False)
        self.blocks: Sequence[Any] = session._adapter.blocks()
        self.layers, self.queries = sorted(set(layers)), columns
        self.found: dict[int, list[torch.Tensor]] = {}
        self.heads: dict[str, torch.Tensor] = {}

    def attach(self) -> None:
        """See `Context`. The forward is left once the deepest block has returned, so that other hooks in it fire."""
        for layer in self.layers:
            attention = self.blocks[layer].self_attn
            for name in ("q", "k"):
                self.hook(_source(attention, name), self._keeper(name))
            self.hook(attention, self._weigher(layer))
        self.hook(self.blocks[self.layers[-1]], self._leave)

    def modules(self) -> Sequence[torch.nn.Module]:
        """See `Context`."""
        attentions = [self.blocks[layer].self_attn for layer in self.layers]
        sources = [_source(attention, name) for attention in attentions for name in ("q", "k")]
        return [*attentions, *sources, self.blocks[self.layers[-1]]]

    def _is_mine(self) -> bool:
        return self.depth == 1 and self.inner == 1

    def _keeper(self, name: str) -> Any:
        def keep(module: Any, args: tuple, kwargs: dict, output: torch.Tensor) -> None:
            if self._is_mine():
                self.heads[name] = output

        return keep

    def _weigher(self, layer: int) -> Any:
        def weigh(module: Any, args: tuple, kwargs: dict, output: Any) -> None:
            if not self._is_mine():
                return
            cos, sin = kwargs["position_embeddings"]
            batch = self.batch
            assert batch is not None
            length = self.heads["q"].shape[1]
            query = self.heads.pop("q").view(len(batch), length, -1, module.head_dim)
            key = self.heads.pop("k").view(len(batch), length, -1, module.head_dim)
            self.found[layer] = [
                row_weights(
                    query[b],
                    key[b],
                    cos[b if len(cos) > 1 else 0],
                    sin[b if len(sin) > 1 else 0],
                    columns,
                    batch.width - len(batch.prompts[b]),
                    module.scaling,
                    module.sliding_window,
                )
                for b, columns in enumerate(self.queries)
            ]

        return weigh

    def _leave(self, *_: Any) -> None:
        if self._is_mine():
            raise Halt


def _source(attention: Any, name: str) -> torch.nn.Module:
    """The last module before rotation: the norm, where the family has one, else the projection."""
    norm = getattr(attention, f"{name}_norm", None)
    return getattr(attention, f"{name}_proj") if norm is None else norm


def _result(
    batch: PreparedBatch,
    b: int,
    layers: Sequence[int],
    columns: Sequence[int],
    labels: Sequence[str],
    found: dict[int, list[torch.Tensor]],
) -> AttentionOverTime:
    weights = torch.stack([found[layer][b] for layer in layers]).cpu().numpy()
    mine = [(i, t) for i, t in enumerate(batch.timeline) if t.sample_index == b]
    positions = np.concatenate([t.positions for _, t in mine]) if mine else np.zeros(0, np.int64)
    is_text = np.ones(batch.width, bool)
    is_text[positions] = False
    return AttentionOverTime(
        b,
        tuple(layers),
        tuple(columns),
        tuple(labels),
        weights[..., positions],
        weights[..., is_text].sum(-1),
        np.concatenate([np.full(t.n_tokens, i) for i, t in mine]) if mine else np.zeros(0, np.int64),
        np.concatenate([t.token_intervals() for _, t in mine]) if mine else np.zeros((0, 2)),
        tuple(t.name for _, t in mine),
    )


def _queries(
    session: Session, batch: PreparedBatch, answers: Any, queries: Sequence[int] | None
) -> tuple[PreparedBatch, list[list[int]], list[list[str]]]:
    """The batch to run, and for each request its query columns and what they are called."""
    decode = session.processor.tokenizer.decode
    if answers is not None:
        ids = answer_ids(session, batch, answers)
        longer = answered(session, batch, ids)
        columns = [list(range(longer.width - len(mine) - 1, longer.width - 1)) for mine in ids]
        return longer, columns, [[decode([token]) for token in mine] for mine in ids]
    asked = [-1] if queries is None else list(queries)
    least = min(len(prompt) for prompt in batch.prompts)
    for column in asked:
        if not is_whole(column) or not -least <= column < batch.width:
            raise _bad_query(column, batch.width - least, batch.width)
        if column % batch.width < batch.width - least:
            raise _bad_query(column, batch.width - least, batch.width)
    if not asked:
        raise ArgumentError(
            "queries is empty; pass columns, or None for the last", code="bad_argument", source="queries"
        )
    columns = [[int(column) % batch.width for column in asked] for _ in range(len(batch))]
    ids_of = batch.inputs["input_ids"].tolist()
    return batch, columns, [[decode([ids_of[b][c]]) for c in mine] for b, mine in enumerate(columns)]


def _bad_query(column: object, first: int, width: int) -> ArgumentError:
    return ArgumentError(
        f"query {column!r} is not a column that holds a token of every request; pass {first}..{width - 1}, or negative "
        "ones from the end",
        code="bad_argument",
        source="queries",
    )


def _block_numbers(n_blocks: int, layers: Sequence[int] | None) -> tuple[int, ...]:
    asked = list(range(n_blocks)) if layers is None else list(layers)
    for layer in asked:
        if not is_whole(layer) or not -n_blocks <= layer < n_blocks:
            raise ArgumentError(
                f"layer {layer!r} is not a block; pass 0..{n_blocks - 1}, or negative ones from the end",
                code="bad_argument",
                source="layers",
            )
    if not asked:
        raise ArgumentError("layers is empty; pass at least one, or None for all", code="bad_argument", source="layers")
    return tuple(int(layer) % n_blocks for layer in asked)
