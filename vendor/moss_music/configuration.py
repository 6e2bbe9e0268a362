"""What a MOSS-Music snapshot's config.json says, as two transformers configurations.

Keys are the published ones. Three may be absent: `n_window` (200), `conv_chunksize` (64) and
`deepstack_num_inject_layers` (None: every tap is injected). Audio token ids are in no configuration; see processing.py.
"""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PreTrainedConfig, Qwen3Config

DOWNSAMPLE_RATE = 8  # three convolutions of stride 2: mel frames per audio token


class MossMusicAudioConfig(PreTrainedConfig):
    """The audio encoder: `audio_config` in config.json.

    `n_window` is half a chunk in mel frames; `encoder_attention_window_size` is published but unused, because attention
    spans exactly one chunk. Raises `ValueError` where a key asks for something that this definition does not compute.
    """

    model_type = "moss_music_audio_encoder"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_hidden_layers": "encoder_layers",
        "num_attention_heads": "encoder_attention_heads",
    }

    num_mel_bins: int = 128
    d_model: int = 1280
    output_dim: int | None = None
    encoder_layers: int = 32
    encoder_attention_heads: int = 20
    encoder_ffn_dim: int = 5120
    downsample_rate: int = DOWNSAMPLE_RATE
    downsample_hidden_size: int = 480
    max_source_positions: int = 1500
    n_window: int | None = 200
    conv_chunksize: int | None = 64
    deepstack_encoder_layer_indexes: list[int] | tuple[int, ...] = (8, 16, 24)
    layer_norm_eps: float = 1e-5
    activation_function: str = "gelu"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill what is absent and check what is there."""
        kwargs.pop("_attn_implementation", None)  # chosen for the whole model, never by the snapshot
        self.n_window = 200 if self.n_window is None else self.n_window
        self.conv_chunksize = 64 if self.conv_chunksize is None else self.conv_chunksize
        self.output_dim = self.d_model if self.output_dim is None else self.output_dim
        self.deepstack_encoder_layer_indexes = list(self.deepstack_encoder_layer_indexes)
        super().__post_init__(**kwargs)
        if self.downsample_rate != DOWNSAMPLE_RATE:
            raise ValueError(f"audio_config.downsample_rate is {self.downsample_rate}; this encoder computes 8")
        if self.output_dim != self.d_model:
            raise ValueError(
                f"audio_config.output_dim is {self.output_dim} and d_model {self.d_model}; this encoder has no output "
                "projection, so they must be equal"
            )
        if self.activation_function != "gelu":
            raise ValueError(
                f"audio_config.activation_function is {self.activation_function!r}; this encoder uses gelu"
            )
        if self.n_window < 1 or self.conv_chunksize < 1:
            raise ValueError("audio_config.n_window and conv_chunksize must be at least 1")
        if self.chunk_frames % DOWNSAMPLE_RATE:
            raise ValueError("audio_config.n_window must be a multiple of 4, so that a chunk is whole tokens")
        if self.d_model % self.encoder_attention_heads or self.d_model % 2:
            raise ValueError("audio_config.d_model must be even and a multiple of encoder_attention_heads")
        if -(-self.chunk_frames // DOWNSAMPLE_RATE) > self.max_source_positions:
            raise ValueError("audio_config.n_window asks for longer chunks than max_source_positions holds")
        taps = self.deepstack_encoder_layer_indexes
        if taps != sorted(set(taps)) or any(not 0 <= tap < self.encoder_layers for tap in taps):
            raise ValueError(
                f"audio_config.deepstack_encoder_layer_indexes is {taps}; it must be rising, each between 0 and "
                f"{self.encoder_layers - 1}"
            )

    @property
    def chunk_frames(self) -> int:
        """Mel frames in one whole chunk: 400 as published, which are 4 s and 50 tokens."""
        return 2 * int(self.n_window or 0)

    @property
    def stem_bins(self) -> int:
        """Rows left of the mel bins after the three convolutions: 16 of 128."""
        bins = self.num_mel_bins
        for _ in range(3):
            bins = (bins + 1) // 2
        return bins


class MossMusicConfig(PreTrainedConfig):
    """A whole config.json: `audio_config`, `language_config` (Qwen3), and how the two are joined.

    Build it with `MossMusicConfig.from_dict(json.load(file))`. `model_type` moss_audio has the same layout and gives a
    `MossAudioConfig`. The attention implementation ("sdpa", "eager", "flash_attention_2") is set for both halves by
    `from_dict(json, attn_implementation=...)` or by assigning `config._attn_implementation` before building.
    Raises `ValueError` for another `model_type`, another language model, or sizes that do not fit each other.
    """

    model_type = "moss_music"
    sub_configs: ClassVar[dict[str, type]] = {"audio_config": MossMusicAudioConfig, "language_config": Qwen3Config}

    audio_config: Any = None
    language_config: Any = None
    adapter_hidden_size: int = 8192
    deepstack_num_inject_layers: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    ignore_index: int = -100
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs: Any) -> None:
        """Build the two halves and check that they fit."""
        if not isinstance(self.audio_config, PreTrainedConfig):
            self.audio_config = MossMusicAudioConfig(**(self.audio_config or {}))
        if not isinstance(self.language_config, PreTrainedConfig):
            language = dict(self.language_config or {})
            if language.pop("model_type", "qwen3") != "qwen3":
                raise ValueError("language_config.model_type must be qwen3; no other language model is defined here")
            self.language_config = Qwen3Config(**language)
        for name in ("vocab_size", "num_hidden_layers"):
            given, needed = kwargs.get(name), getattr(self.language_config, name)
            if given is not None and given != needed:
                raise ValueError(f"config.json says {name} {given}, but its language_config says {needed}")
        super().__post_init__(**kwargs)
        taps = len(self.audio_config.deepstack_encoder_layer_indexes)
        asked = self.deepstack_num_inject_layers
        if asked is not None and not 0 <= asked <= taps:
            raise ValueError(f"deepstack_num_inject_layers is {asked}, but the encoder has {taps} taps")
        if self.n_injected > self.language_config.num_hidden_layers:
            raise ValueError("more DeepStack taps than language layers; set deepstack_num_inject_layers")

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """A configuration from the content of config.json, which is left as it is.

        Returns a `MossMusicConfig`, or a `MossAudioConfig` for `model_type` moss_audio. Raises `ValueError` for any
        other `model_type`.
        """
        content = dict(config_dict)
        model_type = content.pop("model_type", cls.model_type)
        kinds = {kind.model_type: kind for kind in (MossMusicConfig, MossAudioConfig)}
        if model_type not in kinds:
            raise ValueError(f"config.json says model_type {model_type!r}; this definition is for {sorted(kinds)}")
        if kinds[model_type] is not cls:
            return kinds[model_type].from_dict({**content, "model_type": model_type}, **kwargs)
        return super().from_dict(content, **kwargs)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> Any:
        """The language model's half, whichever end is asked for: what `generate` and the caches size themselves by."""
        return self.language_config

    @property
    def text_config(self) -> Any:
        """The language model's half under the name that most of transformers uses."""
        return self.language_config

    @property
    def n_injected(self) -> int:
        """How many language layers DeepStack adds to at prefill: layers 0 to n_injected - 1."""
        taps = len(self.audio_config.deepstack_encoder_layer_indexes)
        return taps if self.deepstack_num_inject_layers is None else int(self.deepstack_num_inject_layers)


class MossAudioConfig(MossMusicConfig):
    """The same layout under `model_type` moss_audio."""

    model_type = "moss_audio"
