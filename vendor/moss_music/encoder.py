"""The audio encoder: log-mel chunks in, one vector for every 80 ms out.

A source is cut into chunks of 400 mel frames, the last short one kept. A chunk passes three strided convolutions and a
Transformer that sees nothing but that chunk. How wide a chunk is zero-padded matters, because the padding leaks through
the convolutions into its last tokens: chunks of one request share the width of its longest chunk, and never take the
width of another request's.

Letters: A sources, F mel frames, W frames a chunk is padded to, N chunks of one width, T = ceil(W / 8) tokens of a
chunk with padding, U tokens of all sources, D = d_model, K DeepStack taps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration import DOWNSAMPLE_RATE, MossMusicAudioConfig


def n_tokens(frames: int) -> int:
    """Audio tokens of `frames` mel frames, ceil(frames / 8): one a started 80 ms."""
    return -(-frames // DOWNSAMPLE_RATE)


@dataclass(frozen=True)
class Chunk:
    """Mel frames `start` to `start + frames` of one source, to be zero-padded to `width` frames."""

    source: int
    start: int
    frames: int
    width: int

    @property
    def tokens(self) -> int:
        """Audio tokens of the chunk without its padding."""
        return n_tokens(self.frames)


def plan_chunks(seqlens: Sequence[int], group_sizes: Sequence[int], chunk_frames: int) -> list[Chunk]:
    """Cut every source into chunks, in order of sources and time.

    `seqlens` [A] are mel frames a source; `group_sizes` [B] says how many consecutive sources belong to each request;
    `chunk_frames` is 400. The chunks of one request share a width, the longest of them, so a lone source under 400
    frames is not padded at all. Raises `ValueError` if the groups do not add up to the sources, or a source is empty.
    """
    if sum(group_sizes) != len(seqlens) or any(size < 0 for size in group_sizes):
        raise ValueError(
            f"audio_group_sizes {list(group_sizes)} must add up to the {len(seqlens)} sources in audio_data"
        )
    if any(frames < 1 for frames in seqlens):
        raise ValueError(f"audio_data_seqlens {list(seqlens)} holds a source without a mel frame; leave it out")
    chunks = []
    first = 0
    for size in group_sizes:
        members = range(first, first + size)
        width = min(chunk_frames, max((seqlens[source] for source in members), default=0))
        for source in members:
            for start in range(0, seqlens[source], chunk_frames):
                chunks.append(Chunk(source, start, min(chunk_frames, seqlens[source] - start), width))
        first += size
    return chunks


def sinusoid_positions(length: int, channels: int) -> Tensor:
    """The position table [length, channels], float32 on the CPU: sines first, then cosines.

    Inverse timescales are exp(-ln(10000) / (channels / 2 - 1) * k), as in Whisper. It is computed where it is used and
    kept in no buffer, so no `.to()`, `.half()` or loading from the meta device can damage it.
    """
    half = channels // 2
    step = math.log(10_000.0) / max(half - 1, 1)
    timescales = torch.exp(-step * torch.arange(half, dtype=torch.float32, device="cpu"))
    angles = torch.arange(length, dtype=torch.float32, device="cpu")[:, None] * timescales
    return torch.cat([angles.sin(), angles.cos()], dim=1)


@dataclass(frozen=True, repr=False)
class EncoderOutput:
    """What the encoder gives for all sources, one after the other.

    `raw` [U, D] is after the final norm; `taps` are K tensors [U, D], the outputs of the DeepStack layers before it;
    `token_lengths` are A token counts.
    """

    raw: Tensor
    taps: tuple[Tensor, ...]
    token_lengths: tuple[int, ...]

    def __repr__(self) -> str:
        return f"EncoderOutput(raw={list(self.raw.shape)}, taps={len(self.taps)}, token_lengths={self.token_lengths})"


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float = 1.0,
    dropout: float = 0.0,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """Plain attention over heads: [N, heads, T, head] three times in, [N, T, heads, head] and the weights out."""
    scores = query @ key.transpose(-1, -2) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = functional.dropout(scores.softmax(-1), p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights


class EncoderAttention(nn.Module):
    """Self-attention within a chunk; queries are scaled after their projection, keys have no bias."""

    def __init__(self, config: MossMusicAudioConfig) -> None:
        super().__init__()
        self.config = config
        self.head_dim = config.d_model // config.encoder_attention_heads
        self.is_causal = False
        self.q_proj = nn.Linear(config.d_model, config.d_model)
        self.k_proj = nn.Linear(config.d_model, config.d_model, bias=False)
        self.v_proj = nn.Linear(config.d_model, config.d_model)
        self.out_proj = nn.Linear(config.d_model, config.d_model)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """[N, T, D] to [N, T, D]; `mask` as `MossMusicAudioEncoder.key_mask` makes it."""
        split = (*hidden.shape[:2], -1, self.head_dim)
        query = (self.q_proj(hidden) * self.head_dim**-0.5).view(split).transpose(1, 2)
        key = self.k_proj(hidden).view(split).transpose(1, 2)
        value = self.v_proj(hidden).view(split).transpose(1, 2)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        dropout = self.config.attention_dropout if self.training else 0.0
        mixed, _ = attend(self, query, key, value, mask, scaling=1.0, dropout=dropout, is_causal=False)
        return self.out_proj(mixed.reshape(hidden.shape))


class EncoderLayer(nn.Module):
    """One pre-norm Transformer layer: attention, then a GELU network, each added to its input."""

    def __init__(self, config: MossMusicAudioConfig) -> None:
        super().__init__()
        self.config = config
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.self_attn = EncoderAttention(config)
        self.final_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.fc1 = nn.Linear(config.d_model, config.encoder_ffn_dim)
        self.fc2 = nn.Linear(config.encoder_ffn_dim, config.d_model)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """[N, T, D] to [N, T, D]."""
        hidden = hidden + self._drop(self.self_attn(self.self_attn_layer_norm(hidden), mask), self.config.dropout)
        inner = functional.gelu(self.fc1(self.final_layer_norm(hidden)))
        inner = self._drop(inner, self.config.activation_dropout)
        return hidden + self._drop(self.fc2(inner), self.config.dropout)

    def _drop(self, hidden: Tensor, rate: float) -> Tensor:
        return functional.dropout(hidden, p=rate, training=self.training)


class MossMusicAudioEncoder(PreTrainedModel):
    """Convolutions, chunk Transformer, final norm and DeepStack taps."""

    config: MossMusicAudioConfig
    config_class = MossMusicAudioConfig
    main_input_name = "audio_data"
    base_model_prefix = "encoder"
    _supports_sdpa = True
    _supports_flash_attn = True
    _no_split_modules: list[str] = ["EncoderLayer"]  # noqa: RUF012  transformers wants a plain list

    def __init__(self, config: MossMusicAudioConfig) -> None:
        super().__init__(config)
        channels = config.downsample_hidden_size
        self.conv1 = nn.Conv2d(1, channels, kernel_size=3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, kernel_size=3, stride=2, padding=1)
        self.conv3 = nn.Conv2d(channels, channels, kernel_size=3, stride=2, padding=1)
        self.stem_proj = nn.Linear(channels * config.stem_bins, config.d_model)
        self.layers = nn.ModuleList([EncoderLayer(config) for _ in range(config.encoder_layers)])
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.post_init()

    def forward(self, audio_data: Tensor, seqlens: Sequence[int], group_sizes: Sequence[int]) -> EncoderOutput:
        """Encode the sources of any number of requests.

        `audio_data` [A, 128, F] is log-mel, cast here to the encoder's dtype; what lies beyond a source's `seqlens` is
        never read. `group_sizes` [B] says which sources belong to one request, for the chunk width. Raises `ValueError`
        where the three do not fit.
        """
        if audio_data.dim() != 3 or audio_data.shape[1] != self.config.num_mel_bins or len(audio_data) != len(seqlens):
            raise ValueError(
                f"audio_data is {list(audio_data.shape)}; it must be [{len(seqlens)}, {self.config.num_mel_bins}, F], "
                "one log-mel for each entry of audio_data_seqlens"
            )
        if max(seqlens, default=0) > audio_data.shape[2]:
            raise ValueError(
                f"audio_data_seqlens asks for {max(seqlens)} frames, but audio_data has {audio_data.shape[2]}"
            )
        chunks = plan_chunks(seqlens, group_sizes, self.config.chunk_frames)
        order: list[int] = []
        streams: list[list[Tensor]] = [[] for _ in range(1 + len(self.config.deepstack_encoder_layer_indexes))]
        for width in sorted({chunk.width for chunk in chunks}):
            members = [index for index, chunk in enumerate(chunks) if chunk.width == width]
            order += members
            for stream, states in zip(streams, self._encode(audio_data, [chunks[i] for i in members]), strict=True):
                stream += [state[: chunks[i].tokens] for state, i in zip(states, members, strict=True)]
        back = sorted(range(len(order)), key=order.__getitem__)
        raw, *taps = [self._join([stream[place] for place in back]) for stream in streams]
        return EncoderOutput(raw, tuple(taps), tuple(n_tokens(frames) for frames in seqlens))

    def key_mask(self, tokens: Sequence[int], like: Tensor) -> Tensor | None:
        """What keeps padding out of attention, for chunks of `tokens` [N] real tokens in `like` [N, T, D].

        None where nothing is padded; for flash attention a bool [N, T], True for real tokens; else an additive
        [N, 1, 1, T] with the dtype's minimum at padding, whose weight is then exactly 0.
        """
        if min(tokens) == like.shape[1]:
            return None
        ends = torch.tensor(tokens, device=like.device)
        real = torch.arange(like.shape[1], device=like.device) < ends[:, None]
        if "flash" in (self.config._attn_implementation or ""):
            return real
        mask = torch.zeros(real.shape, dtype=like.dtype, device=like.device)
        return mask.masked_fill(~real, torch.finfo(like.dtype).min)[:, None, None, :]

    def _encode(self, audio_data: Tensor, chunks: list[Chunk]) -> list[Tensor]:
        """Chunks of one width to 1 + K tensors [N, T, D]: the final state, then the taps."""
        block = self.config.conv_chunksize or len(chunks)
        stems = [self._stem(audio_data, chunks[i : i + block]) for i in range(0, len(chunks), block)]
        hidden = torch.cat(stems)
        hidden = functional.dropout(hidden, p=self.config.dropout, training=self.training)
        mask = self.key_mask([chunk.tokens for chunk in chunks], hidden)
        taps = {}
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, mask)
            if index in self.config.deepstack_encoder_layer_indexes:
                taps[index] = hidden
        return [self.layer_norm(hidden), *(taps[i] for i in self.config.deepstack_encoder_layer_indexes)]

    def _stem(self, audio_data: Tensor, chunks: list[Chunk]) -> Tensor:
        """Mel to the Transformer's input [N, T, D], positions added."""
        pieces = [
            functional.pad(audio_data[c.source, :, c.start : c.start + c.frames], (0, c.width - c.frames))
            for c in chunks
        ]
        image = torch.stack(pieces).to(self.conv1.weight)[:, None]  # [N, 1, mel bins, W]
        for convolution in (self.conv1, self.conv2, self.conv3):
            image = functional.gelu(convolution(image))  # at the end [N, C, 16, T]
        hidden = self.stem_proj(image.flatten(1, 2).transpose(1, 2))  # [N, T, D]
        return hidden + sinusoid_positions(*hidden.shape[1:]).to(hidden)

    def _join(self, pieces: list[Tensor]) -> Tensor:
        if pieces:
            return torch.cat(pieces)
        return self.conv1.weight.new_zeros(0, self.config.d_model)
