"""Music Flamingo: 30 s windows through a Whisper-like tower, 40 ms a token, rotary time, a Qwen2 language model.

The model and its processor are transformers' own (`MusicFlamingoForConditionalGeneration`). Two things are done
here that the library does not do: several sources in one prompt or none, mixed in one batch, and windows whose tail is
too short for a token (1 to 320 samples), which the library counts to the next source.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import jinja2
import numpy as np
import torch
from transformers import MusicFlamingoConfig, MusicFlamingoProcessor, PreTrainedModel
from transformers.models.musicflamingo import modeling_musicflamingo as library
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from ..batch import AudioEmbedding, EncodedPrompt, PreparedBatch
from ..errors import SnapshotError
from ..generation import Profile, sampled
from ..points import Layout, Point
from ..request import MARKER, Request
from ..snapshot import read_json, rebuild_buffers
from ..timeline import Clock
from .base import Family

# The tower halves the frames twice: a convolution of stride 2 and an average pool of 2.
FRAMES_PER_TOKEN = 4
_TURN = "<|im_start|>"
# What a template's own arithmetic may raise.
_TEMPLATE_ERRORS = (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError, MemoryError)
# What the tower was trained on; another extractor would be another model.
_EXTRACTOR = {
    "chunk_length": 30, "dither": 0.0, "feature_size": 128, "hop_length": 160, "n_fft": 400, "padding_side": "right",
    "sampling_rate": 16_000,
}  # fmt: skip
# A private-use character that no chat template adds, to find where the template puts the user's text.
_PROBE = "\uf8ff"


class MusicFlamingo(Family):
    """Adapter to Music Flamingo and the models that share its `model_type`, such as Audio Flamingo Next."""

    name: ClassVar[str] = "music_flamingo"
    model_types: ClassVar[tuple[str, ...]] = ("musicflamingo",)
    control_spellings: ClassVar[tuple[str, ...]] = ("<sound>", "<|sound_bos|>", "<|sound_eos|>")
    sampled: ClassVar[Profile] = sampled(temperature=0.7, top_p=0.9, top_k=50)

    def __init__(self, model: PreTrainedModel, processor: Any) -> None:
        super().__init__(model, processor)
        extractor = processor.feature_extractor
        self.clock = Clock(
            sample_rate=extractor.sampling_rate,
            samples_per_frame=extractor.hop_length,
            samples_per_token=FRAMES_PER_TOKEN * extractor.hop_length,
            samples_per_window=extractor.chunk_length * extractor.sampling_rate,
            counts_started_frames=True,
            token_sees=f"the whole {extractor.chunk_length} s window in the tower; in the language model also every "
            "position before it",
        )
        self.max_s = _positive(processor.max_audio_len)
        self.context = int(model.config.text_config.max_position_embeddings)
        self._check_audio_id()
        self._rendered("")
        _mend(model)

    def _check_audio_id(self) -> None:
        self._check_ids({self.processor.audio_token: self.processor.audio_token_id})
        wanted, found = self.model.config.audio_token_id, self.processor.audio_token_id
        if wanted != found:
            raise SnapshotError(
                f"config.json says audio_token_id {wanted}, the tokenizer gives {self.processor.audio_token!r} the id "
                f"{found}; the folder mixes files of different models",
                code="bad_weights",
                source="audio_token_id",
            )

    @classmethod
    def build(cls, config: dict, attention: str) -> PreTrainedModel:
        """The library's model for a config.json; see `Family.build`."""
        parsed = MusicFlamingoConfig.from_dict(config)
        parsed._attn_implementation = attention
        return library.MusicFlamingoForConditionalGeneration(parsed)

    @classmethod
    def load_processor(cls, folder: Path) -> Any:
        """The library's processor, offline and without the folder's code.

        Raises: SnapshotError where the files ask for another extractor, or for an audio tokenizer: the library would
        fetch that one from the network or unpickle it.
        """
        path = folder / "processor_config.json"
        settings = read_json(path) if path.is_file() else {}
        if "audio_tokenizer" in settings or (folder / "audio_tokenizer_config.json").exists():
            raise SnapshotError(
                f"{folder} asks for an audio tokenizer, which Music Flamingo does not have; remove it from "
                "processor_config.json and audio_tokenizer_config.json",
                code="bad_weights",
                source=path,
            )
        extractor = settings.get("feature_extractor")
        if isinstance(extractor, dict):
            wrong = {k: extractor[k] for k, v in _EXTRACTOR.items() if k in extractor and extractor[k] != v}
            if wrong:
                raise SnapshotError(
                    f"{path} sets up another feature extractor, {wrong}; this model hears {_EXTRACTOR}",
                    code="bad_weights",
                    source=path,
                )
        return MusicFlamingoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)

    def n_tokens(self, n_samples: int) -> int:
        """(frames + 1) // 4 a window, with ceil(samples / 160) frames: a tail of 1-320 samples has no token."""
        windows, tail = divmod(n_samples, self.clock.samples_per_window)
        frames = -(-tail // self.clock.samples_per_frame)
        return windows * self.clock.tokens_per_window + (frames + 1) // FRAMES_PER_TOKEN

    def shortest(self) -> int:
        """Three frames make a token, and the third begins after two hops."""
        return 2 * self.clock.samples_per_frame + 1

    def place_markers(self, request: Request) -> str:
        """One source: the marker and a newline before the prompt; several: one numbered line each."""
        n = len(request.audios)
        if n == 1:
            return f"{MARKER}\n{request.prompt}"
        return "".join(f"Audio {k + 1}: {MARKER}\n" for k in range(n)) + request.prompt

    def encode_prompt(self, content: str, n_tokens: Sequence[int]) -> EncodedPrompt:
        """Tokenize the rendered turns with one sound token a source, then repeat each as often as it has tokens.

        Raises: SnapshotError where the chat template does not keep the user's text once, as it is.
        """
        processor = self.processor
        span = processor.audio_bos_token + processor.audio_token + processor.audio_eos_token
        text, user_at, assistant_at = self._rendered(content.replace(MARKER, span))
        encoded = self.tokenizer(text, return_offsets_mapping=True)
        prompt = EncodedPrompt([], [], [], [])
        source = -1
        for token, (start, _) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            if token == processor.audio_token_id:
                source += 1
                prompt.extend([token] * n_tokens[source], "audio", source)
            elif token == processor.audio_bos_token_id:
                prompt.extend([token], "marker", source + 1)
            elif token == processor.audio_eos_token_id:
                prompt.extend([token], "marker", source)
            else:
                role = "assistant" if start >= assistant_at else "user" if start >= user_at else "system"
                prompt.extend([token], role)
        return prompt

    def _rendered(self, content: str) -> tuple[str, int, int]:
        """The chat template around a user's turn, and the characters where the user's and assistant's turns begin."""
        head, probe, tail = self._template(_PROBE).partition(_PROBE)
        if not probe or _PROBE in tail:
            raise _bad_template("does not give the user's text once")
        text = self._template(content)
        if text != head + content + tail:
            raise _bad_template("changes the user's text; a template must keep a string as it is")
        user_at = max(head.rfind(_TURN), 0)
        assistant_at = len(head) + len(content) + max(tail.find(_TURN), 0)
        return text, user_at, assistant_at

    def _template(self, content: str) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                [{"role": "user", "content": content}],
                chat_template=self.processor.chat_template,
                tokenize=False,
                add_generation_prompt=True,
            )
        except (jinja2.TemplateError, *_TEMPLATE_ERRORS) as error:
            raise _bad_template(f"cannot be used ({error})") from error

    def features(self, waveforms: Sequence[np.ndarray]) -> Any:
        """input_features [W, 128, 3000] float32 and input_features_mask [W, 3000] of one request's windows.

        Each source goes through the library's extractor by itself, so that no neighbour can change a value.
        """
        extractor, size = self.processor.feature_extractor, self.clock.samples_per_window
        mels, masks = [], []
        for samples in waveforms:
            windows = [samples[start : start + size] for start in range(0, len(samples), size)]
            with _plain_float32():
                out = extractor(
                    windows, sampling_rate=self.clock.sample_rate, return_attention_mask=True, return_tensors="pt"
                )
            mels.append(out["input_features"])
            masks.append(out["attention_mask"])
        if not mels:
            return {}
        return {"input_features": torch.cat(mels), "input_features_mask": torch.cat(masks)}

    def collate(
        self, features: Sequence[Any], prompts: Sequence[EncodedPrompt], mask: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The windows of all requests, one after the other; nothing where no request has audio."""
        some = [f for f in features if f]
        return {name: torch.cat([f[name] for f in some]) for name in some[0]} if some else {}

    def embed_audio(self, batch: PreparedBatch) -> list[AudioEmbedding]:
        """Tower, RoTE and projector in one library call; the padding rows of its raw output are dropped."""
        if not batch.slots:
            return []
        inputs = batch.inputs
        out = self.model.get_audio_features(
            inputs["input_features"], inputs["input_features_mask"], input_ids=inputs["input_ids"], return_dict=True
        )
        counts = [len(slot.token_positions) for slot in batch.slots]
        raw = out.last_hidden_state[_valid(self.model, inputs["input_features_mask"], out.last_hidden_state)]
        return [
            AudioEmbedding(slot.sample_index, slot.audio_index, raw_k, projected_k, (), (), timeline.token_intervals())
            for slot, timeline, raw_k, projected_k in zip(
                batch.slots, batch.timeline, raw.split(counts), out.pooler_output.split(counts), strict=True
            )
        ]

    def blocks(self) -> Sequence[torch.nn.Module]:
        """The Qwen2 decoder layers."""
        return list(self.model.model.language_model.layers)

    def decoder(self) -> torch.nn.Module:
        """The Qwen2 model without its head."""
        return self.model.model.language_model

    def head(self) -> torch.nn.Module:
        """The output projection."""
        return self.model.lm_head

    def final_norm(self) -> torch.nn.Module:
        """Qwen2's last norm."""
        return self.model.model.language_model.norm

    def audio_points(self) -> list[Point]:
        """Tower blocks at two positions of 20 ms a token, then raw, after rotary time, and projected."""
        inner, config = self.model.model, self.model.config
        width, language = config.audio_config.hidden_size, config.text_config.hidden_size
        tower, projector = inner.audio_tower, inner.multi_modal_projector

        def place(name: str, module: torch.nn.Module, side: str, size: int) -> Point:
            return Point(name, ("U", size), None, module, side, "audio", (size,), _window_layout)

        blocks = [
            Point(f"encoder.block[{i}]", ("U", 2, width), None, block, "out", "audio", (2, width), _window_layout)
            for i, block in enumerate(tower.layers)
        ]
        return [
            *blocks,
            place("encoder.out", tower.layer_norm, "out", width),
            place("timed", projector, "in", width),
            place("projected", projector, "out", language),
        ]

    def audio_dtype(self) -> torch.dtype:
        """The tower's own dtype; it refuses any other."""
        return self.model.model.audio_tower.conv1.weight.dtype


def _bad_template(what: str) -> SnapshotError:
    source = "chat_template.jinja"
    return SnapshotError(f"the snapshot's chat template {what}", code="bad_weights", source=source)


def _positive(seconds: Any) -> float:
    """The longest audio in seconds, as the processor's files say it."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
        raise SnapshotError(
            f"processor_config.json says max_audio_len {seconds!r}; it must be a number of seconds",
            code="bad_weights",
            source="max_audio_len",
        )
    return float(seconds)


def _valid(model: PreTrainedModel, mask: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
    """[W, 750] bool: which rows of the tower's output are tokens."""
    lengths = _token_lengths(mask.sum(-1))
    return torch.arange(raw.shape[1], device=raw.device)[None, :] < lengths[:, None].to(raw.device)


def _window_layout(batch: PreparedBatch) -> list[Layout]:
    """One call over all windows [W, 750]; a window's tokens are its first rows."""
    lengths = _token_lengths(batch.inputs["input_features_mask"].sum(-1).cpu())
    per_window = -(-batch.inputs["input_features_mask"].shape[1] // FRAMES_PER_TOKEN)
    valid = torch.arange(per_window)[None, :] < lengths[:, None]
    take = valid.flatten().nonzero()[:, 0]
    return [Layout(take, torch.arange(len(take)))]


def _token_lengths(frames: torch.Tensor) -> torch.Tensor:
    """Tokens of a window by its frames: (frames + 1) // 4."""
    return (frames.to(torch.long) + 1) // FRAMES_PER_TOKEN


@contextmanager
def _plain_float32() -> Iterator[None]:
    """Without autocast and with float32 as torch's default, which the library's extractor takes for granted."""
    default = torch.get_default_dtype()
    try:
        if default is not torch.float32:  # it is one for all threads, so leave it alone where it is right
            torch.set_default_dtype(torch.float32)
        with torch.autocast("cpu", enabled=False), torch.device("cpu"):
            yield
    finally:
        if default is not torch.float32:
            torch.set_default_dtype(default)


# Three things of the library's are mended in this one model: by functions that do not hold it, so that it is freed with its
# last reference and can be pickled and copied; where a module itself is needed, by a subclass that keeps its name.


def _mend(model: Any) -> None:
    inner = model.model
    inner._build_audio_timestamps = functools.partial(_audio_timestamps, inner.config)
    model._expand_inputs_for_generation = _OneAnswer(model)
    inner.pos_emb.__class__ = MusicFlamingoRotaryEmbedding
    inner.language_model.rotary_emb.__class__ = TextRotaryEmbedding


class _Float32Tables(torch.nn.Module):
    """Rotary tables that are computed anew after `.to(dtype)` and `.half()`, which would round them."""

    inv_freq: torch.Tensor

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        rebuild_buffers(self, self.inv_freq.device)
        return self


class MusicFlamingoRotaryEmbedding(_Float32Tables, library.MusicFlamingoRotaryEmbedding):
    """Rotary time, in float32 whatever the model is in."""


class TextRotaryEmbedding(_Float32Tables, Qwen2RotaryEmbedding):
    """The language model's rotary positions, in float32 whatever the model is in."""


def _audio_timestamps(
    config: MusicFlamingoConfig, input_ids: torch.Tensor, post_lengths: torch.Tensor, max_post_length: int
) -> torch.Tensor:
    """[W, max_post_length] float32 seconds within the source of every row of the tower's output.

    `input_ids` [B, L]; `post_lengths` [W] tokens a window. Each window is given to the source it belongs to, also one
    without a token. The library finds a window's source by where its tokens would begin. A window without tokens
    begins where the next source does, so the library counts it there, and every window of that source is rotated by 30 s
    too much (or, at the very end of a batch, an index is out of bounds). Such a window is always the tail of the source
    before. Raises ValueError where tokens and windows do not match.
    """
    device = post_lengths.device
    is_audio = torch.nn.functional.pad((input_ids == config.audio_token_id).to(torch.int8), (1, 1))
    edges = torch.diff(is_audio, dim=1)
    lengths = torch.nonzero(edges == -1)[:, 1] - torch.nonzero(edges == 1)[:, 1]  # [A] tokens of each source
    source_ends = torch.cumsum(lengths.to(device), dim=0)
    if int(source_ends[-1] if len(lengths) else 0) != int(post_lengths.sum()):
        raise ValueError(
            f"the prompt holds {int(lengths.sum())} audio tokens and the windows make {int(post_lengths.sum())}; pass "
            "input_ids and features of one batch, as Session.prepare gives them"
        )
    last_token = torch.cumsum(post_lengths, dim=0) - 1  # of a window, or of the one before where it has none
    source = torch.searchsorted(source_ends, last_token, right=True)  # [W]
    first_window = torch.searchsorted(source, torch.arange(len(lengths), device=device))  # [A]
    index = torch.arange(len(post_lengths), device=device) - first_window[source]
    step_s = config.audio_frame_step * FRAMES_PER_TOKEN
    offsets = torch.arange(max_post_length, device=device, dtype=torch.float32) * step_s
    return (index * max_post_length).to(torch.float32).unsqueeze(1) * step_s + offsets


class _OneAnswer:
    """In place of a model's `_expand_inputs_for_generation`: refuses beams and several return sequences with audio.

    The library repeats the rows of every input for them, windows too, which then belong to other sources than before.
    """

    def __init__(self, model: Any) -> None:
        self._model: Any = weakref.ref(model)

    def __call__(self, expand_size: int = 1, **inputs: Any) -> Any:
        if expand_size > 1 and inputs.get("input_features") is not None:
            raise ValueError(
                "num_beams and num_return_sequences above 1 mix up the windows of audio prompts; repeat the request in "
                "the batch instead"
            )
        model: Any = self._model()
        parent: Any = super(type(model), model)
        return parent._expand_inputs_for_generation(expand_size=expand_size, **inputs)

    def __deepcopy__(self, memo: dict) -> _OneAnswer:
        return _OneAnswer(memo.get(id(self._model()), self._model()))

    def __reduce__(self) -> tuple:
        return _OneAnswer, (self._model(),)
