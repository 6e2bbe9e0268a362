"""Forward passes for training: the published computation without what is padding, and several questions behind one prefix.

Music Flamingo's tower runs on the valid frames and two more instead of 3,000, which changes nothing: keys past the valid
frames are masked, and no convolution reaches farther. The logits are those of `Session.forward`; tests compare them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from audiollm.vendor.moss_music.deepstack import run_injected
from torch.nn import functional
from transformers.models.musicflamingo import modeling_musicflamingo as library

from audiollm.families import Family

from .prompts import Row

WINDOW = 480_000  # samples of a Music Flamingo window
_SPARE = 2  # frames past the valid ones that the last valid position sees


@dataclass(frozen=True, eq=False)
class Packed:
    """Rows as tensors [B, L]: ids, positions, the attention mask, audio places, and what is learned where.

    `mask` [B, 1, L, L] bool; `rows`, `columns` [U] of the audio tokens; `at` [2, N] places whose next token is `told` [N].
    """

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    at: torch.Tensor
    told: torch.Tensor


def packed(rows: Sequence[Row], pad_id: int) -> Packed:
    """Put rows side by side, padded on the right; a block sees the prefix and itself."""
    width = max(len(r.prefix) + sum(len(b.asked) + len(b.answer) for b in r.blocks) for r in rows)
    ids = np.full((len(rows), width), pad_id, dtype=np.int64)
    positions = np.zeros((len(rows), width), dtype=np.int64)
    segment = np.full((len(rows), width), -1, dtype=np.int64)
    audio_rows, audio_columns, at, told = [], [], [], []
    for b, row in enumerate(rows):
        start = len(row.prefix)
        ids[b, :start] = row.prefix
        positions[b, :start] = np.arange(start)
        segment[b, :start] = 0
        audio_rows += [b] * len(row.audio_positions)
        audio_columns += row.audio_positions
        for k, block in enumerate(row.blocks):
            n, m = len(block.asked), len(block.answer)
            ids[b, start : start + n + m] = block.asked + block.answer
            positions[b, start : start + n + m] = np.arange(len(row.prefix), len(row.prefix) + n + m)
            segment[b, start : start + n + m] = k + 1
            at += [(b, start + n - 1 + j) for j in range(m)]
            told += block.answer
            start += n + m
    places = torch.from_numpy(segment)
    seen = (places[:, None, :] == 0) | (places[:, None, :] == places[:, :, None])
    seen &= torch.ones(width, width, dtype=torch.bool).tril() & (places[:, None, :] >= 0)
    seen |= torch.eye(width, dtype=torch.bool)
    return Packed(
        torch.from_numpy(ids),
        torch.from_numpy(positions),
        seen[:, None],
        torch.tensor(audio_rows, dtype=torch.long),
        torch.tensor(audio_columns, dtype=torch.long),
        torch.tensor(at, dtype=torch.long).reshape(-1, 2).T,
        torch.tensor(told, dtype=torch.long),
    )


class Pass:
    """A family's training pass over its model."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.model: Any = family.model
        if family.name == "music_flamingo":
            starts = torch.arange(2, dtype=torch.float32)[:, None] * 30.0
            self.times = self.model.model.pos_emb(starts + torch.arange(750) * 0.04, seq_len=750)

    def mel(self, samples: np.ndarray) -> list[torch.Tensor]:
        """The log-mel [128, F] of each of a source's windows (one, for MOSS-Music)."""
        if self.family.name == "moss_music":
            return self.family.features([samples])
        return [self._window_mel(samples[i : i + WINDOW]) for i in range(0, len(samples), WINDOW)]

    def _window_mel(self, samples: np.ndarray) -> torch.Tensor:
        """The extractor's values on the valid frames and `_SPARE` more (fewer where the window ends)."""
        frames = -(-len(samples) // 160)
        padded = np.zeros(min(WINDOW, (frames + _SPARE + 2) * 160 + 400), dtype=np.float32)
        padded[: len(samples)] = samples
        spectrum = torch.stft(
            torch.from_numpy(padded), 400, 160, window=torch.hann_window(400), center=True, return_complex=True
        )
        power = spectrum[:, :-1].abs() ** 2
        filters = torch.from_numpy(self.family.processor.feature_extractor.mel_filters).float()
        log = (filters.T @ power).clamp(min=1e-10).log10()
        log = torch.maximum(log, log.max() - 8.0)
        return ((log + 4.0) / 4.0)[:, : frames + _SPARE]

    def audio(
        self, waves: Sequence[Sequence[np.ndarray]], mels: Sequence[Sequence[Sequence[torch.Tensor]]]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Projected embeddings [U, 160] of all sources of all rows, and the DeepStack streams of the same shape."""
        flat = [mel for row in mels for source in row for mel in source]
        if self.family.name == "moss_music":
            frames = [mel.shape[1] for mel in flat]
            data = torch.stack([functional.pad(mel, (0, max(frames) - mel.shape[1])) for mel in flat])
            sources = self.model.get_audio_features(data, frames, [len(row) for row in mels])
            streams = [torch.cat([s.deepstack_projected[k] for s in sources]) for k in range(3)]
            return torch.cat([s.projected for s in sources]), streams
        sizes = [
            (len(wave[i : i + WINDOW]), i // WINDOW)
            for row in waves
            for wave in row
            for i in range(0, len(wave), WINDOW)
        ]
        return self._tower(flat, [-(-n // 160) for n, _ in sizes], [w for _, w in sizes]), []

    def _tower(self, mels: Sequence[torch.Tensor], frames: Sequence[int], windows: Sequence[int]) -> torch.Tensor:
        """Music Flamingo's tower, rotary time and projector on windows of `frames` [W] valid frames."""
        inner = self.model.model
        tower = inner.audio_tower
        width = max(mel.shape[1] for mel in mels)
        width += width % 2
        floors = torch.stack([mel.min() for mel in mels])
        data = floors[:, None, None].expand(-1, 128, width).clone()
        for row, mel in zip(data, mels, strict=True):
            row[:, : mel.shape[1]] = mel
        hidden = functional.gelu(tower.conv2(functional.gelu(tower.conv1(data)))).permute(0, 2, 1)
        hidden = hidden + tower.embed_positions.weight[: hidden.shape[1]]
        lengths = torch.tensor([(n - 1) // 2 + 1 for n in frames])
        valid = torch.arange(hidden.shape[1])[None] < lengths[:, None]
        for layer in tower.layers:
            hidden = layer(hidden, valid[:, None, None, :].expand(-1, 1, hidden.shape[1], -1))
        hidden = tower.layer_norm(tower.avg_pooler(hidden.permute(0, 2, 1)).permute(0, 2, 1))
        n = hidden.shape[1]
        index = torch.tensor(windows)
        cos, sin = (table[index, :n] for table in self.times)
        hidden = inner.multi_modal_projector(library.apply_rotary_time_emb(hidden, cos, sin))
        counts = torch.tensor([(f + 1) // 4 for f in frames])
        return hidden[torch.arange(n)[None] < counts[:, None]]

    def states(self, batch: Packed, projected: torch.Tensor | None, streams: Sequence[torch.Tensor]) -> torch.Tensor:
        """The language model's final states [B, L, 160]."""
        return self.layers(batch, projected, streams)[-1]

    def layers(
        self, batch: Packed, projected: torch.Tensor | None, streams: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """The language model's states [B, L, 160] by layer, as `Session.forward` numbers them; the last is normed."""
        language = self.family.decoder()
        embeds = language.embed_tokens(batch.ids)
        if projected is not None:
            embeds = embeds.index_put((batch.rows, batch.columns), projected)

        def decode() -> tuple[torch.Tensor, ...]:
            return language(
                inputs_embeds=embeds,
                attention_mask=batch.mask,
                position_ids=batch.positions,
                use_cache=False,
                output_hidden_states=True,
            ).hidden_states

        if not streams:
            return decode()
        return run_injected(decode, language.layers, batch.rows, batch.columns, list(streams))

    def logits(self, states: torch.Tensor, batch: Packed) -> torch.Tensor:
        """Logits [N, V] at the places where an answer's token follows."""
        return self.family.head()(states[batch.at[0], batch.at[1]])
