"""One windowed transformer stage: the arithmetic, whole or in pieces that carry their window.

A row x of width d_model passes, per layer,

    x += out_proj(attention(LN1 x)) * ls1          x += ffn2(gelu(ffn0(LN2 x))) * ls2

with LayerNorm eps 1e-5, exact GELU, no biases, rotation on interleaved pairs at absolute positions from 0 on q and k,
scale 1/sqrt(head width), and key k seen by query q when 0 <= q - k < context. Layer scales are folded into `out` and
`down` when the weights are built.

A piece attends to the last `context - 1` rotated keys and values of the pieces before it plus its own rows, so cutting
a clip into pieces of any size changes nothing but float noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from .config import StageConfig

# Rows of queries that share one slice of keys. Small blocks waste few masked keys; a GPU prefers fewer calls.
QUERY_BLOCK_CPU, QUERY_BLOCK_GPU = 64, 512
# Rows that pass norm and feed-forward together, which bounds the wide activation.
FEED_FORWARD_ROWS = 1024

# Called with (layer, rows [T, d_model]); layer 0 is what enters the first block. The rows are overwritten afterwards.
Tap = Callable[[int, Tensor], None]


@dataclass(frozen=True)
class LayerWeights:
    """One block: norms [d], `qkv` [3d, d] (rows q, k, v), `out` [d, d] and `down` [d, ff] scaled, `up` [ff, d]."""

    norm1_weight: Tensor
    norm1_bias: Tensor
    qkv: Tensor
    out: Tensor
    norm2_weight: Tensor
    norm2_bias: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True)
class StageWeights:
    """A stage: `input_proj` [d_model, input_dim], its blocks, `output_proj` [output_dim, d_model]."""

    config: StageConfig
    input_proj: Tensor
    layers: tuple[LayerWeights, ...]
    output_proj: Tensor


@dataclass
class StageState:
    """What a stage remembers between pieces: rows seen, and per layer the window's keys and values [<=context-1, d]."""

    seen: int = 0
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))


def run_stage(weights: StageWeights, rows: Tensor, state: StageState, tap: Tap | None = None) -> Tensor:
    """Rows [T, input_dim] at positions state.seen ... -> [T, output_dim]; `state` moves on by T rows."""
    config = weights.config
    x = functional.linear(rows, weights.input_proj)
    if tap is not None:
        tap(0, x)
    count, width = x.shape
    past = min(state.seen, config.context - 1)
    rotation = _rotation(config, state.seen, count, x)
    query, context_rows = torch.empty_like(x), torch.empty_like(x)
    keys, values = (x.new_empty(past + count, width) for _ in range(2))
    mask = _window_mask(config.context, min(count, _query_block(x)), x)
    first = not state.keys
    keep = min(past + count, config.context - 1)
    for i, layer in enumerate(weights.layers):
        if past:
            keys[:past].copy_(state.keys[i])
            values[:past].copy_(state.values[i])
        _project_qkv(layer, x, query, keys[past:], values[past:])
        _rotate(query, rotation, config.heads)
        _rotate(keys[past:], rotation, config.heads)
        _attend(config, query, keys, values, past, mask, context_rows)
        x.addmm_(context_rows, layer.out.t())
        _feed_forward(layer, x)
        if tap is not None:
            tap(i + 1, x)
        held_keys, held_values = keys[past + count - keep :].clone(), values[past + count - keep :].clone()
        if first:
            state.keys.append(held_keys)
            state.values.append(held_values)
        else:
            state.keys[i], state.values[i] = held_keys, held_values
    state.seen += count
    return functional.linear(x, weights.output_proj)


def _project_qkv(layer: LayerWeights, x: Tensor, query: Tensor, keys: Tensor, values: Tensor) -> None:
    """Norm and three products, written straight to where attention reads them."""
    width = x.shape[1]
    for start in range(0, len(x), FEED_FORWARD_ROWS):
        rows = slice(start, start + FEED_FORWARD_ROWS)
        normed = functional.layer_norm(x[rows], (width,), layer.norm1_weight, layer.norm1_bias, 1e-5)
        for part, target in enumerate((query, keys, values)):
            torch.mm(normed, layer.qkv[part * width : (part + 1) * width].t(), out=target[rows])


def _feed_forward(layer: LayerWeights, x: Tensor) -> None:
    width = x.shape[1]
    for start in range(0, len(x), FEED_FORWARD_ROWS):
        rows = x[start : start + FEED_FORWARD_ROWS]
        normed = functional.layer_norm(rows, (width,), layer.norm2_weight, layer.norm2_bias, 1e-5)
        hidden = functional.gelu(torch.mm(normed, layer.up.t()))
        rows.addmm_(hidden, layer.down.t())


def _attend(
    config: StageConfig, query: Tensor, keys: Tensor, values: Tensor, past: int, mask: Tensor, out: Tensor
) -> None:
    """Windowed attention, one block of queries at a time; `keys` and `values` begin `past` rows before the queries."""
    heads, reach, step = config.heads, config.context - 1, mask.shape[0]
    q, k, v, o = (t.view(1, len(t), heads, config.head_dim).transpose(1, 2) for t in (query, keys, values, out))
    for start in range(0, len(query), step):
        stop = min(start + step, len(query))
        low = max(0, past + start - reach)
        dropped = reach - (past + start - low)
        # A slice that begins anywhere suits no GPU kernel; whole blocks are the mask itself and copy nothing.
        window = mask[: stop - start, dropped : reach + stop - start].contiguous()
        o[:, :, start:stop] = functional.scaled_dot_product_attention(
            q[:, :, start:stop], k[:, :, low : past + stop], v[:, :, low : past + stop], attn_mask=window
        )


def _window_mask(context: int, block: int, like: Tensor) -> Tensor:
    """[block, block + context - 1], 0 where a key is seen and -inf elsewhere; column 0 is context - 1 rows back."""
    row = torch.arange(block, device=like.device)[:, None]
    column = torch.arange(block + context - 1, device=like.device)[None]
    hidden = (column < row) | (column >= row + context)
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -math.inf)


def _query_block(x: Tensor) -> int:
    return QUERY_BLOCK_CPU if x.device.type == "cpu" else QUERY_BLOCK_GPU


def _rotation(config: StageConfig, start: int, count: int, like: Tensor) -> Tensor:
    """Unit complex numbers [count, 1, head_dim / 2], angle = position * max_period ** (-2 i / head_dim).

    Frequencies are exp of a float32 and positions float32, as published; float64 angles are 4.5e-6 away at 30 s.
    """
    half = config.head_dim // 2
    index = torch.arange(half, dtype=torch.float32, device=like.device)
    frequency = torch.exp(index * (-math.log(config.max_period) * 2 / config.head_dim))
    position = torch.arange(start, start + count, dtype=torch.float32, device=like.device)
    angle = position[:, None] * frequency
    rotation = torch.polar(torch.ones_like(angle), angle)[:, None]
    return rotation.to(torch.complex128) if like.dtype == torch.float64 else rotation


def _rotate(x: Tensor, rotation: Tensor, heads: int) -> None:
    """Rotate pairs (2i, 2i+1) of each head of [T, heads * head_dim] in place."""
    pairs = x.view(len(x), heads, -1, 2)
    if x.dtype in (torch.float32, torch.float64):
        torch.view_as_complex(pairs).mul_(rotation)
    else:  # half precision: turn in float32, round once
        turned = torch.view_as_complex(pairs.float()).mul_(rotation)
        pairs.copy_(torch.view_as_real(turned))
