"""MOSS-Music: 4 s chunks through a convolutional tower, 80 ms a token, time written into the prompt, DeepStack, Qwen3.

The model and its processor are our own, `audiollm.vendor.moss_music`: transformers lacks them. Here they are given the
same protocol as every family.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedModel

from ..batch import AudioEmbedding, EncodedPrompt, PreparedBatch
from ..generation import Profile, sampled
from ..points import Layout, Point
from ..request import MARKER, Request
from ..timeline import Clock
from ..vendor.moss_music import MossMusicConfig, MossMusicForConditionalGeneration, MossMusicProcessor, n_tokens
from ..vendor.moss_music.configuration import DOWNSAMPLE_RATE
from ..vendor.moss_music.encoder import plan_chunks
from ..vendor.moss_music.mel import HOP_LENGTH, SAMPLE_RATE
from .base import Family

_TURN = "<|im_start|>"
_TURN_ROLES = ("system", "user", "assistant")


class MossMusic(Family):
    """Adapter to MOSS-Music and MOSS-Audio, which share a layout."""

    name: ClassVar[str] = "moss_music"
    model_types: ClassVar[tuple[str, ...]] = ("moss_music", "moss_audio")
    control_spellings: ClassVar[tuple[str, ...]] = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    sampled: ClassVar[Profile] = sampled(temperature=1.0, top_p=0.8, top_k=50)

    def __init__(self, model: PreTrainedModel, processor: Any) -> None:
        super().__init__(model, processor)
        chunk = model.config.audio_config.chunk_frames * HOP_LENGTH
        self.clock = Clock(
            sample_rate=SAMPLE_RATE,
            samples_per_frame=HOP_LENGTH,
            samples_per_token=DOWNSAMPLE_RATE * HOP_LENGTH,
            samples_per_window=chunk,
            counts_started_frames=False,
            token_sees=f"the whole {chunk / SAMPLE_RATE:g} s chunk in the encoder; in the language model also every "
            "position before it",
        )
        self.max_s = None
        ids = processor.ids
        self._check_ids({"audio": ids.audio, "audio start": ids.start, "audio end": ids.end})
        self.context = int(model.config.language_config.max_position_embeddings)

    @classmethod
    def build(cls, config: dict, attention: str) -> PreTrainedModel:
        """Our model for a config.json; see `Family.build`."""
        parsed = MossMusicConfig.from_dict(config)
        parsed._attn_implementation = attention
        return MossMusicForConditionalGeneration(parsed)

    @classmethod
    def load_processor(cls, folder: Path) -> Any:
        """Our processor, which gives the tokenizer, the mel and the ids."""
        return MossMusicProcessor.from_snapshot(folder)

    def n_tokens(self, n_samples: int) -> int:
        """ceil(frames / 8), with samples // 160 frames: under 160 samples there is none."""
        return n_tokens(n_samples // HOP_LENGTH)

    def shortest(self) -> int:
        """One whole frame."""
        return HOP_LENGTH

    def place_markers(self, request: Request) -> str:
        """One numbered line a source before the prompt, also for a single one."""
        return "".join(f"Audio {k + 1}: {MARKER}\n" for k in range(len(request.audios))) + request.prompt

    def encode_prompt(self, content: str, n_tokens: Sequence[int]) -> EncodedPrompt:
        """Text pieces tokenized one by one, spans as ids between them; time digits are markers."""
        texts = content.split(MARKER)
        pieces: list[str | int] = [texts[0]]
        for count, text in zip(n_tokens, texts[1:], strict=True):
            pieces += [count, text]
        built = self.processor.build_prompt(pieces)
        prompt = EncodedPrompt(list(built.ids), self._turns(built.ids), [-1] * len(built.ids), [None] * len(built.ids))
        for source, span in enumerate(built.spans):
            everything = range(span.start, span.end + 1)
            for position in everything:
                prompt.roles[position] = "marker"
                prompt.sources[position] = source
            for position in span.audio_positions:
                prompt.roles[position] = "audio"
            for position, second in zip(span.marker_positions, span.marker_seconds, strict=True):
                prompt.marker_s[position] = float(second)
        return prompt

    def _turns(self, ids: Sequence[int]) -> list[str]:
        """system, user or assistant for each id, by the turn that it stands in."""
        begins = np.cumsum(np.asarray(ids) == self.tokenizer.convert_tokens_to_ids(_TURN)) - 1
        return [_TURN_ROLES[turn] for turn in begins]

    def features(self, waveforms: Sequence[np.ndarray]) -> Any:
        """The log-mel [128, F_i] float32 of each source of one request, over the whole source."""
        return [self.processor.log_mel(samples) for samples in waveforms]

    def collate(
        self, features: Sequence[Any], prompts: Sequence[EncodedPrompt], mask: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """audio_data [A, 128, F_max] and what tells its sources apart; nothing where no request has audio."""
        mels = [mel for group in features for mel in group]
        if not mels:
            return {}
        frames = [mel.shape[1] for mel in mels]
        data = torch.zeros((len(mels), mels[0].shape[0], max(frames)), dtype=torch.float32)
        for mel, row in zip(mels, data, strict=True):
            row[:, : mel.shape[1]] = mel
        is_audio = torch.zeros_like(mask, dtype=torch.bool)
        for prompt, row in zip(prompts, is_audio, strict=True):
            row[len(row) - len(prompt) :] = torch.tensor([role == "audio" for role in prompt.roles])
        return {
            "audio_data": data,
            "audio_data_seqlens": torch.tensor(frames),
            "audio_input_mask": is_audio,
            "audio_token_lengths": torch.tensor([n_tokens(count) for count in frames]),
            "audio_group_sizes": torch.tensor([len(group) for group in features]),
        }

    def embed_audio(self, batch: PreparedBatch) -> list[AudioEmbedding]:
        """Encoder, adapter and DeepStack mergers."""
        if not batch.slots:
            return []
        inputs = batch.inputs
        sources = self.model.get_audio_features(
            inputs["audio_data"], inputs["audio_data_seqlens"], inputs["audio_group_sizes"]
        )
        return [
            AudioEmbedding(
                slot.sample_index,
                slot.audio_index,
                source.raw,
                source.projected,
                source.deepstack_raw,
                source.deepstack_projected,
                timeline.token_intervals(),
            )
            for slot, timeline, source in zip(batch.slots, batch.timeline, sources, strict=True)
        ]

    def blocks(self) -> Sequence[torch.nn.Module]:
        """The Qwen3 decoder layers."""
        return list(self.model.language_model.layers)

    def decoder(self) -> torch.nn.Module:
        """The Qwen3 model without its head."""
        return self.model.language_model

    def head(self) -> torch.nn.Module:
        """The output projection."""
        return self.model.lm_head

    def final_norm(self) -> torch.nn.Module:
        """Qwen3's last norm."""
        return self.model.language_model.norm

    def audio_points(self) -> list[Point]:
        """Encoder blocks, which run once a chunk width, then raw, projected and the DeepStack streams."""
        model, config = self.model, self.model.config
        width, language = config.audio_config.d_model, config.language_config.hidden_size

        def place(name: str, module: torch.nn.Module, side: str, size: int, layouts: Any = _flat_layout) -> Point:
            return Point(name, ("U", size), None, module, side, "audio", (size,), layouts)

        return [
            *(
                place(f"encoder.block[{i}]", block, "out", width, self._chunk_layouts)
                for i, block in enumerate(model.audio_encoder.layers)
            ),
            place("encoder.out", model.audio_adapter, "in", width),
            place("projected", model.audio_adapter, "out", language),
            *(
                place(f"deepstack[{k}]", merger, "out", language)
                for k, merger in enumerate(model.deepstack_audio_merger_list)
            ),
        ]

    def _chunk_layouts(self, batch: PreparedBatch) -> list[Layout]:
        """The encoder's calls, narrow chunks first: where each chunk's tokens lie in [N, T]."""
        frames = batch.inputs["audio_data_seqlens"].tolist()
        chunks = plan_chunks(
            frames, batch.inputs["audio_group_sizes"].tolist(), self.model.config.audio_config.chunk_frames
        )
        first = np.cumsum([0, *(chunk.tokens for chunk in chunks)])
        layouts = []
        for chunk_width in sorted({chunk.width for chunk in chunks}):
            members = [i for i, chunk in enumerate(chunks) if chunk.width == chunk_width]
            wide = n_tokens(chunk_width)
            take = [torch.arange(chunks[i].tokens) + wide * place for place, i in enumerate(members)]
            rows = [torch.arange(chunks[i].tokens) + int(first[i]) for i in members]
            layouts.append(Layout(torch.cat(take), torch.cat(rows)))
        return layouts

    def audio_dtype(self) -> torch.dtype:
        """float32 whatever the model is in; the encoder casts at its door."""
        return torch.float32


def _flat_layout(batch: PreparedBatch) -> list[Layout]:
    """One call over all tokens [U] of all sources."""
    everything = torch.arange(sum(len(slot.token_positions) for slot in batch.slots))
    return [Layout(everything, everything)]
