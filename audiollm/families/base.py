"""What every family shares: one request after the other becomes ids and mel, then all are padded to one batch.

A family is one small class with the arithmetic and the spellings of its models: see `Family`'s abstract methods. The
order of work in `prepare` is: look at prompts and headers, refuse what cannot fit, decode, compute mel, pad.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import BatchFeature, PreTrainedModel

from ..audio import Decoded, Header, decode, read_header, resample_ratio, resampled_length
from ..batch import AudioEmbedding, AudioSlot, EncodedPrompt, ModelShape, PreparedBatch, TokenCount
from ..errors import ArgumentError, AudioError, RequestError, SnapshotError
from ..generation import GREEDY, Profile
from ..points import Point
from ..request import MARKER, Request, Waveform
from ..timeline import Clock, SourceTimeline, Timeline


class Family(ABC):
    """An adapter to one family of models, made for one loaded model and its processor.

    Attributes: `name` as users see it; `model_types` of config.json; `clock`; `max_s`, the longest audio in seconds or
    None; `context`, the tokens that prompt and answer share; `control_spellings`, native marker texts that a prompt
    must not hold even where the tokenizer does not know them; `sampled`, its profile "generic_sampled".
    """

    name: ClassVar[str]
    model_types: ClassVar[tuple[str, ...]]
    control_spellings: ClassVar[tuple[str, ...]]
    sampled: ClassVar[Profile]

    clock: Clock
    max_s: float | None
    context: int

    def __init__(self, model: PreTrainedModel, processor: Any) -> None:
        self.model = model
        self.processor = processor
        self.tokenizer = processor.tokenizer
        self._check_control_tokens()

    # What a family must say.

    @classmethod
    @abstractmethod
    def build(cls, config: dict, attention: str) -> PreTrainedModel:
        """The family's model for a config.json, without weights; called under `torch.device("meta")`."""

    @classmethod
    @abstractmethod
    def load_processor(cls, folder: Path) -> Any:
        """The tokenizer and feature extractor of a snapshot folder, offline and without its code."""

    @abstractmethod
    def n_tokens(self, n_samples: int) -> int:
        """Audio tokens of `n_samples` at the model's rate."""

    @abstractmethod
    def shortest(self) -> int:
        """The smallest number of samples that makes one audio token."""

    @abstractmethod
    def place_markers(self, request: Request) -> str:
        """The user's turn with one `<audio>` marker a source."""

    @abstractmethod
    def encode_prompt(self, content: str, n_tokens: Sequence[int]) -> EncodedPrompt:
        """The whole prompt as ids, with `n_tokens[k]` audio tokens where the k-th `<audio>` stands in `content`."""

    @abstractmethod
    def features(self, waveforms: Sequence[np.ndarray]) -> Any:
        """One request's mel and what goes with it, on the CPU in float32, as `collate` takes it."""

    @abstractmethod
    def collate(
        self, features: Sequence[Any], prompts: Sequence[EncodedPrompt], mask: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The audio inputs of all requests; `mask` [B, L] is their attention mask, prompts stand at its right end."""

    @abstractmethod
    def embed_audio(self, batch: PreparedBatch) -> list[AudioEmbedding]:
        """Run the audio tower and projector, not the language model; one result a slot."""

    @abstractmethod
    def blocks(self) -> Sequence[torch.nn.Module]:
        """The decoder blocks, first to last."""

    @abstractmethod
    def decoder(self) -> torch.nn.Module:
        """The module that runs the blocks and the final norm."""

    @abstractmethod
    def head(self) -> torch.nn.Module:
        """The module that receives the final normed states and gives logits."""

    @abstractmethod
    def final_norm(self) -> torch.nn.Module:
        """The module that receives what the last block hands on, and gives what the head receives."""

    @abstractmethod
    def audio_points(self) -> list[Point]:
        """The places from the encoder to what stands in the prompt, in the order of computing."""

    @abstractmethod
    def audio_dtype(self) -> torch.dtype:
        """The dtype that mel must have at the model's door."""

    # What all families share.

    @property
    def end_id(self) -> int:
        """The id that ends an answer."""
        return int(self.tokenizer.convert_tokens_to_ids("<|im_end|>"))

    @property
    def pad_id(self) -> int:
        """The id that fills rows on the left."""
        return int(self.end_id if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id)

    @property
    def profiles(self) -> dict[str, Profile]:
        """Ways to generate, by name."""
        return {profile.name: profile for profile in (GREEDY, self.sampled)}

    def _check_control_tokens(self) -> None:
        """The turn marks must be one id each, within the embedding: a tokenizer without them would spell them out."""
        for text in ("<|im_start|>", "<|im_end|>"):
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(ids) != 1:
                raise _bad_tokens(f"the tokenizer spells {text} in {len(ids)} tokens; its files lack the added tokens")
        self._check_ids({"pad_token": self.pad_id, "<|im_end|>": self.end_id})

    def _check_ids(self, ids: Mapping[str, int | None]) -> None:
        """Raises: SnapshotError for an id that the embedding does not hold."""
        size = self.model.config.get_text_config().vocab_size
        for name, token in ids.items():
            if token is None or not 0 <= token < size:
                raise _bad_tokens(f"{name} has the id {token}, and the embedding holds 0..{size - 1}")

    def points(self) -> dict[str, Point]:
        """Every named place of the model, see `audiollm.points`."""
        blocks, n = self.blocks(), len(self.blocks())
        text = self.model.config.get_text_config()

        def place(name: str, module: Any, side: str, layer: int | None = None, size: int = text.hidden_size) -> Point:
            return Point(name, ("R", size), layer, module, side, "prompt", (size,))

        found = [*self.audio_points(), place("embed", blocks[0], "in", 0)]
        for i, block in enumerate(blocks):
            found.append(place(f"resid[{i}]", block, "in", i))
            found.append(place(f"attn_out[{i}]", block.self_attn, "out"))
            found.append(place(f"mlp_out[{i}]", block.mlp, "out"))
        found.append(place(f"resid[{n}]", self.final_norm(), "in"))
        found.append(place("final", self.final_norm(), "out", n))
        found.append(place("logits", self.head(), "out", size=text.vocab_size))
        return {point.name: point for point in found}

    def model_shape(self) -> ModelShape:
        """Blocks, width, dtype and padding id, for a batch to carry."""
        text = self.model.config.get_text_config()
        return ModelShape(self.name, text.num_hidden_layers, text.hidden_size, self.model.dtype, self.pad_id)

    def prepare(self, requests: Sequence[Request], device: torch.device) -> PreparedBatch:
        """Requests -> a padded batch on `device`; raises as `Session.prepare`."""
        self._check_requests(requests)
        contents = [self._checked_content(request, b) for b, request in enumerate(requests)]
        for b, request in enumerate(requests):
            self._check_headers(request, contents[b], b)
        heard = [self._hear(request, b) for b, request in enumerate(requests)]
        prompts = []
        for b, (content, sources) in enumerate(zip(contents, heard, strict=True)):
            prompts.append(self.encode_prompt(content, [self.n_tokens(len(s.samples)) for s in sources]))
            self._check_context(len(prompts[b]), b)
        inputs = self._pad(prompts)
        features = [self.features([s.samples for s in sources]) for sources in heard]
        inputs |= self.collate(features, prompts, inputs["attention_mask"])
        slots, timeline = self._slots(heard, prompts)
        return PreparedBatch(
            inputs=BatchFeature({name: self._to(tensor, device) for name, tensor in inputs.items()}),
            slots=slots,
            timeline=timeline,
            requests=tuple(requests),
            prompts=tuple(prompts),
            model_shape=self.model_shape(),
            decode_token=functools.partial(_decoded_token, self.tokenizer),
        )

    def _check_requests(self, requests: Sequence[Request]) -> None:
        if isinstance(requests, Request) or not isinstance(requests, Sequence):
            raise ArgumentError("requests is not a list; pass [Request(...)]", code="bad_argument", source="requests")
        if not requests:
            raise ArgumentError("requests is empty; pass at least one Request", code="bad_argument", source="requests")
        for b, request in enumerate(requests):
            if not isinstance(request, Request):
                raise ArgumentError(
                    f"requests[{b}] is a {type(request).__name__}, not a Request(prompt, audios)",
                    code="bad_argument",
                    source=f"requests[{b}]",
                )

    def _checked_content(self, request: Request, b: int) -> str:
        """The user's turn with its markers, after the prompt was searched for control tokens."""
        offset = 0
        for piece in request.prompt.split(MARKER):
            self._refuse_control(piece, offset, b)
            offset += len(piece) + len(MARKER)
        return request.prompt if request.n_markers else self.place_markers(request)

    def _refuse_control(self, text: str, offset: int, b: int) -> None:
        for spelling in self.control_spellings:
            if spelling in text:
                raise self._control(spelling, offset + text.index(spelling), b)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        reserved = self._reserved_ids()
        for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            if token in reserved:
                raise self._control(text[start:end], offset + start, b)

    def _reserved_ids(self) -> set[int]:
        return {*self.tokenizer.all_special_ids, *self.tokenizer.get_added_vocab().values()}

    def _control(self, token: str, offset: int, b: int) -> RequestError:
        return RequestError(
            f"the prompt of request {b} holds the control token {token!r} at character {offset}; write {MARKER} where a "
            "source goes and spell other tokens differently",
            code="control_token",
            source=f"requests[{b}].prompt[{offset}]",
        )

    def count_tokens(self, request: Request) -> TokenCount:
        """What a request would take, from its headers; see `Session.count_tokens`."""
        content = self._checked_content(request, 0)
        counts = self._header_counts(request)
        return TokenCount(len(self.encode_prompt(content, counts)), tuple(counts), self.context)

    def _header_counts(self, request: Request) -> list[int]:
        """Audio tokens of each source as its header tells the length; at least one each."""
        headers = [read_header(audio, self._name(audio, k)) for k, audio in enumerate(request.audios)]
        return [max(1, self.n_tokens(self._used_samples(header))) for header in headers]

    def _check_headers(self, request: Request, content: str, b: int) -> None:
        """Refuse what is too long for the context before anything is decoded."""
        self._check_context(len(self.encode_prompt(content, self._header_counts(request))), b, request)

    def _used_samples(self, header: Header) -> int:
        n = resampled_length(header.frames, *resample_ratio(header, self.clock.sample_rate))
        return n if self.max_s is None else min(n, round(self.max_s * self.clock.sample_rate))

    def _check_context(self, n_prompt: int, b: int, request: Request | None = None) -> None:
        if n_prompt > self.context:
            raise RequestError(
                f"request {b} takes {n_prompt:,} tokens and the context holds {self.context:,}; an audio token is "
                f"{self.clock.token_s:g} s: send fewer or shorter sources, or less text",
                code="too_long",
                source=f"requests[{b}]",
            )

    def _hear(self, request: Request, b: int) -> list[Decoded]:
        return [self._decoded(audio, self._name(audio, k), b, k) for k, audio in enumerate(request.audios)]

    def _decoded(self, audio: str | Path | Waveform, name: str | None, b: int, k: int) -> Decoded:
        source = decode(audio, self.clock.sample_rate, self.max_s, name)
        if self.n_tokens(len(source.samples)) == 0:
            n, least = len(source.samples), self.shortest()
            raise AudioError(
                f"{source.header.name} is {n} sample(s) at {self.clock.sample_rate} Hz, too short for one audio token; "
                f"{least} samples ({1000 * least / self.clock.sample_rate:.1f} ms) are the least",
                code="too_short",
                source=source.header.path or f"requests[{b}].audios[{k}]",
            )
        return source

    def _name(self, audio: str | Path | Waveform, k: int) -> str | None:
        return f"waveform {k + 1}" if isinstance(audio, Waveform) else None

    def _pad(self, prompts: Sequence[EncodedPrompt]) -> dict[str, torch.Tensor]:
        """input_ids and attention_mask [B, L], int64, padded on the left."""
        width = max(len(prompt) for prompt in prompts)
        ids = torch.full((len(prompts), width), self.pad_id, dtype=torch.int64, device="cpu")
        mask = torch.zeros((len(prompts), width), dtype=torch.int64, device="cpu")
        for b, prompt in enumerate(prompts):
            ids[b, width - len(prompt) :] = torch.tensor(prompt.ids, dtype=torch.int64, device="cpu")
            mask[b, width - len(prompt) :] = 1
        return {"input_ids": ids, "attention_mask": mask}

    def _slots(
        self, heard: Sequence[Sequence[Decoded]], prompts: Sequence[EncodedPrompt]
    ) -> tuple[tuple[AudioSlot, ...], Timeline]:
        width = max(len(prompt) for prompt in prompts)
        slots, sources = [], []
        for b, (decoded, prompt) in enumerate(zip(heard, prompts, strict=True)):
            for k, source in enumerate(decoded):
                positions = prompt.audio_positions(k) + width - len(prompt)
                positions.setflags(write=False)
                timeline = self._timeline(source, positions, b, k)
                sources.append(timeline)
                slots.append(_slot(source, timeline))
        return tuple(slots), Timeline(tuple(sources))

    def _timeline(self, source: Decoded, positions: np.ndarray, b: int, k: int) -> SourceTimeline:
        return SourceTimeline(
            sample_index=b,
            audio_index=k,
            name=source.header.name,
            clock=self.clock,
            n_samples=len(source.samples),
            n_tokens=len(positions),
            file_rate=source.header.sample_rate,
            positions=positions,
        )

    def _to(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        dtype = self.audio_dtype() if tensor.is_floating_point() else tensor.dtype
        return tensor.to(device=device, dtype=dtype)


def _decoded_token(tokenizer: Any, token: int) -> str:
    """One token as text; a function of the tokenizer alone, so that a stored batch does not take a model along."""
    return tokenizer.decode([token], skip_special_tokens=False)


def _bad_tokens(what: str) -> SnapshotError:
    return SnapshotError(f"{what}; the folder mixes files of different models", code="bad_weights", source="tokenizer")


def _slot(source: Decoded, timeline: SourceTimeline) -> AudioSlot:
    return AudioSlot(
        sample_index=timeline.sample_index,
        audio_index=timeline.audio_index,
        token_positions=torch.from_numpy(timeline.positions.copy()),
        name=source.header.name,
        path=source.header.path,
        waveform=torch.from_numpy(source.samples),
        sample_rate=source.sample_rate,
        duration_s=source.duration_s,
        used_s=source.used_s,
        windows=timeline.windows(),
    )
