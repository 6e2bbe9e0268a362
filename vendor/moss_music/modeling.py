"""MOSS-Music: audio encoder, adapter, DeepStack mergers and a Qwen3 language model, weights named as published.

Letters: B requests, A sources of all requests, F mel frames, L prompt width, U audio tokens of all requests, U_i of one
source, D language width, K DeepStack taps, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .adapter import GatedMLP
from .configuration import MossMusicConfig
from .deepstack import run_injected
from .encoder import MossMusicAudioEncoder, n_tokens
from .language import MossMusicLanguageModel, cache_arguments, cached_length

AUDIO_INPUTS = ("audio_data", "audio_data_seqlens", "audio_input_mask", "audio_token_lengths", "audio_group_sizes")


@dataclass(frozen=True, repr=False)
class SourceFeatures:
    """One source after the encoder and the adapters.

    `raw` [U_i, 1280] is after the encoder's final norm, `projected` [U_i, D] after the adapter; `deepstack_raw` and
    `deepstack_projected` are K tensors of the same shapes, the taps before and after their mergers.
    """

    raw: Tensor
    projected: Tensor
    deepstack_raw: tuple[Tensor, ...]
    deepstack_projected: tuple[Tensor, ...]

    def __repr__(self) -> str:
        shapes = f"raw={list(self.raw.shape)}, projected={list(self.projected.shape)}"
        return f"SourceFeatures({shapes}, deepstack={len(self.deepstack_raw)})"


class MossMusicForConditionalGeneration(PreTrainedModel, GenerationMixin):
    """The whole model: prompts with 0 or more audio sources each in, logits or text out."""

    config: MossMusicConfig
    config_class = MossMusicConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    input_modalities = ("audio", "text")
    supports_gradient_checkpointing = True  # it can be switched on; forward says why training with it is refused
    _supports_sdpa = True
    _supports_flash_attn = True
    _no_split_modules: list[str] = ["EncoderLayer", "Qwen3DecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement: list[str] = ["past_key_values", "cache"]  # noqa: RUF012
    _tied_weights_keys: dict[str, str] = {"lm_head.weight": "language_model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: MossMusicConfig) -> None:
        super().__init__(config)
        audio, language = config.audio_config, config.language_config
        sizes = (audio.d_model, config.adapter_hidden_size, language.hidden_size)
        self.audio_encoder = MossMusicAudioEncoder(audio)
        self.audio_adapter = GatedMLP(*sizes)
        self.deepstack_audio_merger_list = nn.ModuleList(
            [GatedMLP(*sizes) for _ in audio.deepstack_encoder_layer_indexes]
        )
        self.language_model = MossMusicLanguageModel(language)
        self.lm_head = nn.Linear(language.hidden_size, language.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding [V, D]."""
        return self.language_model.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding."""
        self.language_model.embed_tokens = value

    def get_output_embeddings(self) -> nn.Linear:
        """The head [V, D]."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the head."""
        self.lm_head = new_embeddings

    def get_decoder(self) -> nn.Module:
        """The Qwen3 decoder without its head."""
        return self.language_model

    def recompute_buffers(self, device: torch.device | str | None = None) -> None:
        """Compute every non-persistent buffer anew in float32: for a model built on the meta device and then filled.

        They are the language model's rotary frequencies; the encoder's position table is no buffer. `device` defaults
        to where each buffer is.
        """
        self.language_model.recompute_buffers(device)

    def get_audio_features(
        self,
        audio_data: Tensor,
        audio_data_seqlens: Tensor | Sequence[int],
        audio_group_sizes: Tensor | Sequence[int] | None = None,
    ) -> tuple[SourceFeatures, ...]:
        """Encode and project A sources without running the language model; differentiable from `audio_data` on.

        `audio_data` [A, 128, F] is float32 log-mel, `audio_data_seqlens` [A] its frames a source, `audio_group_sizes`
        [B] how many consecutive sources belong to each request (absent: all to one). Returns A `SourceFeatures`.
        Raises `ValueError` where they do not fit each other.
        """
        seqlens = _integers(audio_data_seqlens)
        groups = [len(seqlens)] if audio_group_sizes is None else _integers(audio_group_sizes)
        encoded = self.audio_encoder(audio_data, seqlens, groups)
        lengths = list(encoded.token_lengths)
        mergers = zip(self.deepstack_audio_merger_list, encoded.taps, strict=True)
        streams = [
            encoded.raw,
            self.audio_adapter(encoded.raw),
            *encoded.taps,
            *(merger(tap) for merger, tap in mergers),
        ]
        last_tap = 2 + len(encoded.taps)
        return tuple(
            SourceFeatures(parts[0], parts[1], parts[2:last_tap], parts[last_tap:])
            for parts in zip(*(stream.split(lengths) for stream in streams), strict=True)
        )

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        audio_data: Tensor | None = None,
        audio_data_seqlens: Tensor | None = None,
        audio_input_mask: Tensor | None = None,
        audio_token_lengths: Tensor | None = None,
        audio_group_sizes: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """One pass over any left-padded batch; audio is put in and DeepStack added where there is no filled cache.

        `input_ids` [B, L] or `inputs_embeds` [B, L, D]; `attention_mask` [B, L], or [B, past + L] with a cache;
        `audio_data` [A, 128, F], `audio_data_seqlens` [A], `audio_input_mask` [B, L] bool, True where audio tokens are,
        sources in order; `audio_token_lengths` [A] is only checked; `audio_group_sizes` [B] sources a request, needed
        from two requests on. The cache may come as `past_key_values` or `cache`. `position_ids` default to counting
        each row's real tokens. `logits_to_keep` keeps the last so many positions (0: all) or those of an index tensor.

        Returns transformers' CausalLMOutputWithPast: logits [B, L, V], the cache under the decoder's own name, and with
        `output_hidden_states=True` n_layers + 1 tensors [B, L, D]: the decoder's input with audio in, each layer's
        output after injection, the last one after the final norm.

        Raises `TypeError` for an `output_hidden_states` that is not a bool; `ValueError` for inputs that do not fit
        each other, for audio behind a filled cache, and for gradient checkpointing in training mode.
        """
        if output_hidden_states is not None and not isinstance(output_hidden_states, bool):
            raise TypeError("output_hidden_states must be True or False; other values differ between releases")
        self._refuse_checkpointing()
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if past_key_values is not None and cache is not None:
            raise ValueError("give the cache once, as past_key_values or as cache")
        if inputs_embeds is None:
            inputs_embeds = self.language_model.embed_tokens(input_ids)
        width = inputs_embeds.shape[1]
        filled = cached_length(past_key_values) or cached_length(cache)
        if filled:
            if audio_input_mask is not None and audio_input_mask.shape[1] == width and audio_input_mask.any():
                raise ValueError("audio behind a filled cache; run the whole conversation without a cache instead")
            audio_data = audio_input_mask = None
        if position_ids is None and attention_mask is not None and attention_mask.dim() == 2:
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -width:]
        options = {"output_hidden_states": output_hidden_states, **cache_arguments(past_key_values, cache)}
        options = {name: value for name, value in options.items() if value is not None} | kwargs

        def decode() -> Any:
            return self.language_model(
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                position_ids=position_ids,
                use_cache=use_cache,
                **options,
            )

        if audio_data is None or len(audio_data) == 0:
            if audio_input_mask is not None and audio_input_mask.any():
                raise ValueError("audio_input_mask marks audio tokens, but audio_data holds no source")
            # Nothing to inject, but a call of its own: inside a hook of another call, that one's audio stays out.
            nowhere = torch.zeros(0, dtype=torch.long)
            outputs = run_injected(decode, self.language_model.layers, nowhere, nowhere, [])
        else:
            mask, frames, groups = self._fit_audio(
                inputs_embeds, audio_data_seqlens, audio_input_mask, audio_token_lengths, audio_group_sizes
            )
            sources = self.get_audio_features(audio_data, frames, groups)
            rows, columns = mask.nonzero(as_tuple=True)
            projected = torch.cat([source.projected for source in sources])
            inputs_embeds = inputs_embeds.index_put((rows, columns), projected.to(inputs_embeds))
            streams = [
                torch.cat([source.deepstack_projected[k] for source in sources]) for k in range(self.config.n_injected)
            ]
            outputs = run_injected(decode, self.language_model.layers, rows, columns, streams)

        states = outputs.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(states[:, kept])
        loss = None
        if labels is not None:
            if logits.shape[1] != width:
                raise ValueError("labels need the logits of every position; leave logits_to_keep at 0")
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1])
        names = {"cache", "past_key_values", "hidden_states", "attentions"}
        result = CausalLMOutputWithPast(
            loss=loss, logits=logits, **{name: outputs[name] for name in outputs.keys() & names}
        )
        return result.to_tuple() if return_dict is False else result

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, *args: Any, is_first_iteration: bool | None = False, **kwargs: Any
    ) -> dict[str, Any]:
        """One step's inputs of `generate`: audio at the first step only, or at every step where no cache is kept."""
        audio = {name: kwargs.pop(name) for name in AUDIO_INPUTS if name in kwargs}
        inputs = super().prepare_inputs_for_generation(
            input_ids, *args, is_first_iteration=is_first_iteration, **kwargs
        )
        if not is_first_iteration and kwargs.get("use_cache", True):
            return inputs
        mask = audio.get("audio_input_mask")
        if mask is not None and not is_first_iteration:
            audio["audio_input_mask"] = nn.functional.pad(mask, (0, input_ids.shape[1] - mask.shape[1]), value=False)
        return {**inputs, **audio}

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Any = None, **model_kwargs: Any
    ) -> Any:
        """Refuse what would repeat rows without their sources."""
        if expand_size > 1 and model_kwargs.get("audio_data") is not None:
            raise ValueError(
                "num_beams and num_return_sequences above 1 mix up the sources of audio prompts; repeat the request in "
                "the batch instead"
            )
        return super()._expand_inputs_for_generation(
            expand_size=expand_size, is_encoder_decoder=is_encoder_decoder, input_ids=input_ids, **model_kwargs
        )

    def _refuse_checkpointing(self) -> None:
        for layer in self.language_model.layers:
            if layer.training and getattr(layer, "gradient_checkpointing", False):
                raise ValueError(
                    "gradient checkpointing in training mode: layers are run again in the backward pass, when the "
                    "DeepStack hooks are gone, so gradients would be those of another model; call "
                    "model.gradient_checkpointing_disable()"
                )

    def _fit_audio(
        self,
        inputs_embeds: Tensor,
        seqlens: Tensor | None,
        mask: Tensor | None,
        token_lengths: Tensor | None,
        group_sizes: Tensor | None,
    ) -> tuple[Tensor, list[int], list[int]]:
        """The mask [B, L] as bool on the embeddings' device, frames [A] and group sizes [B], checked to fit."""
        shape = list(inputs_embeds.shape[:2])
        if seqlens is None or mask is None:
            raise ValueError("audio_data needs audio_data_seqlens and audio_input_mask beside it")
        if list(mask.shape) != shape:
            raise ValueError(f"audio_input_mask is {list(mask.shape)}; it must be {shape}, as wide as the prompt")
        frames = _integers(seqlens)
        if group_sizes is None and shape[0] > 1:
            raise ValueError("audio_group_sizes is missing: without it, which sources share a request is unknown")
        groups = [len(frames)] if group_sizes is None else _integers(group_sizes)
        if len(groups) != shape[0] or sum(groups) != len(frames):
            raise ValueError(
                f"audio_group_sizes {groups} must have one entry for each of {shape[0]} requests and add up to the "
                f"{len(frames)} entries of audio_data_seqlens"
            )
        tokens = [n_tokens(count) for count in frames]
        if token_lengths is not None and _integers(token_lengths) != tokens:
            raise ValueError(f"audio_token_lengths {_integers(token_lengths)} must be ceil(frames / 8): {tokens}")
        mask = mask.to(device=inputs_embeds.device, dtype=torch.bool)
        first = 0
        for row, (size, marked) in enumerate(zip(groups, mask.sum(1).tolist(), strict=True)):
            needed = sum(tokens[first : first + size])
            if marked != needed:
                raise ValueError(f"audio_input_mask[{row}] marks {marked} tokens; the row's sources have {needed}")
            first += size
        return mask, frames, groups


def _integers(values: Tensor | Sequence[int]) -> list[int]:
    return [int(value) for value in (values.tolist() if isinstance(values, Tensor) else values)]
