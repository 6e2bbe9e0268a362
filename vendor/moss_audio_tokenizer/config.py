"""What a MOSS-Audio-Tokenizer is made of, read from its config.json.

Conventions: rates are in Hz; a *row* is one position of a stage; a *frame* is one row of codes (12.5 a second). Audio
is interleaved (L R L R ...), so `sample_rate * channels` values make one second. A stage sees `context` positions:
query q sees key k when 0 <= q - k < context, context = round(stage rate * context_duration).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MODEL_TYPE = "moss-audio-tokenizer"
# Bounds that no published size comes near; past them a config is taken for damaged.
MAX_WIDTH, MAX_LAYERS, MAX_CONTEXT, MAX_CODEBOOKS, MAX_CODEBOOK_SIZE = 65_536, 512, 1 << 20, 1024, 1 << 20
MAX_STAGES = 64


class ConfigError(ValueError):
    """A config that does not describe a codec this code can run; the message names the key."""


@dataclass(frozen=True)
class StageConfig:
    """One windowed transformer stack.

    `name` as in the published weights ("decoder.4"), `rate` in Hz, widths `input_dim`, `d_model`, `output_dim`,
    `heads`, `layers`, `ff` (feed-forward width), `context` in positions, `max_period` of the rotation, and `patch`:
    how many rows a row becomes after this stage (decoder), or how many become one before it (encoder).
    """

    name: str
    rate: float
    input_dim: int
    d_model: int
    output_dim: int
    heads: int
    layers: int
    ff: int
    context: int
    patch: int
    max_period: float = 10_000.0

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.heads


@dataclass(frozen=True)
class CodecConfig:
    """The whole codec: rates, quantizer and the stages of both directions (`encoder` is () where there is none)."""

    sample_rate: int
    channels: int
    n_codebooks: int
    codebook_size: int
    codebook_dim: int
    rvq_dim: int
    latent_dim: int
    decoder: tuple[StageConfig, ...]
    encoder: tuple[StageConfig, ...] = ()

    @property
    def samples_per_frame(self) -> int:
        """Interleaved samples of one frame of codes, all channels (7680 for v2)."""
        return math.prod(stage.patch for stage in self.decoder)

    @property
    def frame_rate(self) -> float:
        """Frames of codes a second (12.5 for v2)."""
        return self.sample_rate * self.channels / self.samples_per_frame


def parse_config(config: Mapping) -> CodecConfig:
    """config.json of a published snapshot -> CodecConfig.

    Raises: ConfigError naming the key, for another model type, a missing or impossible value, or a feature that the
    v2 architecture does not have.
    """
    if config.get("model_type") != MODEL_TYPE:
        raise ConfigError(f"model_type is {config.get('model_type')!r}, not {MODEL_TYPE!r}")
    rate = _whole(config, "sampling_rate" if "sampling_rate" in config else "sample_rate", 768_000)
    channels = _whole(config, "number_channels", 64) if "number_channels" in config else 1
    if channels > 1 and config.get("enable_channel_interleave") is not True:
        raise ConfigError(f"number_channels is {channels} without enable_channel_interleave; only that form is known")
    modules = config.get("decoder_kwargs")
    if modules is None and config.get("reversed_decoder_kwargs") is not None:
        modules = _mirrored(_module_list(config["reversed_decoder_kwargs"], "reversed_decoder_kwargs"))
    modules = _module_list(modules, "decoder_kwargs")
    default_s = config.get("causal_transformer_context_duration")
    quantizer = config.get("quantizer_kwargs")
    if not isinstance(quantizer, Mapping):
        raise ConfigError("quantizer_kwargs is missing")
    kind = quantizer.get("quantizer_type", config.get("quantizer_type", "rlfq"))
    if kind != "rlfq":
        raise ConfigError(f"quantizer_type is {kind!r}; only 'rlfq' is known")
    latent = _whole(quantizer, "output_dim", MAX_WIDTH)
    if _whole(quantizer, "input_dim", MAX_WIDTH) != latent:
        raise ConfigError("quantizer_kwargs: input_dim and output_dim differ")
    decoder = _decoder_stages(modules, rate * channels, default_s)
    encoder: tuple[StageConfig, ...] = ()
    if config.get("encoder_kwargs") is not None:
        encoder = _encoder_stages(_module_list(config["encoder_kwargs"], "encoder_kwargs"), rate * channels, default_s)
    result = CodecConfig(
        sample_rate=rate,
        channels=channels,
        n_codebooks=_whole(quantizer, "num_quantizers", MAX_CODEBOOKS),
        codebook_size=_whole(quantizer, "codebook_size", MAX_CODEBOOK_SIZE),
        codebook_dim=_whole(quantizer, "codebook_dim", MAX_WIDTH),
        rvq_dim=_whole(quantizer, "rvq_dim", MAX_WIDTH),
        latent_dim=latent,
        decoder=decoder,
        encoder=encoder,
    )
    _check_joints(result, config.get("downsample_rate"))
    return result


def _decoder_stages(modules: Sequence[Mapping], value_rate: int, default_s: object) -> tuple[StageConfig, ...]:
    """Transformer, patch, transformer, patch ...: a patch belongs to the stage before it."""
    pairs: list[tuple[int, Mapping, int]] = []
    for i, module in enumerate(modules):
        if module["module_type"] == "Transformer":
            pairs.append((i, module, 1))
        elif pairs:
            at, transformer, patch = pairs[-1]
            pairs[-1] = (at, transformer, patch * _whole(module, "patch_size", MAX_WIDTH))
        else:
            raise ConfigError("decoder_kwargs starts with a patch")
    rate = value_rate / math.prod(patch for _, _, patch in pairs)
    stages = []
    for i, module, patch in pairs:
        stages.append(_stage(f"decoder.{i}", module, rate, patch, default_s))
        rate *= patch
    return tuple(stages)


def _encoder_stages(modules: Sequence[Mapping], value_rate: int, default_s: object) -> tuple[StageConfig, ...]:
    """Patch, transformer, patch, transformer ...: a patch belongs to the stage after it."""
    stages, patch, rate = [], 1, float(value_rate)
    for i, module in enumerate(modules):
        if module["module_type"] == "Transformer":
            rate /= patch
            stages.append(_stage(f"encoder.{i}", module, rate, patch, default_s))
            patch = 1
        else:
            patch *= _whole(module, "patch_size", MAX_WIDTH)
    if patch != 1 or not stages:
        raise ConfigError("encoder_kwargs ends with a patch")
    return tuple(stages)


def _stage(name: str, module: Mapping, rate: float, patch: int, default_s: object) -> StageConfig:
    known = {
        "causal": (True,),
        "norm": ("layer_norm",),
        "positional_embedding": ("rope",),
        "gating": ("none",),
    }
    for key, allowed in known.items():
        if module.get(key, allowed[0]) not in allowed:
            raise ConfigError(f"{name}: {key} is {module[key]!r}; only {allowed[0]!r} is known")
    seconds = module.get("context_duration", default_s)
    if not _is_number(seconds) or not seconds > 0:
        raise ConfigError(f"{name}: context_duration is {seconds!r}, not a length in seconds")
    period = module.get("max_period", 10_000)
    if not _is_number(period) or not period > 1:
        raise ConfigError(f"{name}: max_period is {period!r}")
    stage = StageConfig(
        name=name,
        rate=rate,
        input_dim=_whole(module, "input_dimension", MAX_WIDTH),
        d_model=_whole(module, "d_model", MAX_WIDTH),
        output_dim=_whole(module, "output_dimension", MAX_WIDTH),
        heads=_whole(module, "num_heads", MAX_WIDTH),
        layers=_whole(module, "num_layers", MAX_LAYERS),
        ff=_whole(module, "dim_feedforward", MAX_WIDTH * 4),
        context=min(round(rate * float(seconds)), MAX_CONTEXT + 1),
        patch=patch,
        max_period=float(period),
    )
    if stage.d_model % stage.heads or stage.head_dim % 2:
        raise ConfigError(f"{name}: {stage.heads} heads do not divide d_model {stage.d_model} into even widths")
    if not 1 <= stage.context <= MAX_CONTEXT:
        raise ConfigError(f"{name}: a context of {seconds} s is {stage.context} positions")
    return stage


def _check_joints(config: CodecConfig, downsample: object) -> None:
    """Every stage must take what the one before it gives, and the patches must make the declared rate."""
    width = config.latent_dim
    for stage in config.decoder:
        if stage.input_dim != width:
            raise ConfigError(f"{stage.name}: input_dimension is {stage.input_dim}, but {width} arrives")
        if stage.output_dim % stage.patch:
            raise ConfigError(f"{stage.name}: output_dimension {stage.output_dim} is no multiple of {stage.patch}")
        width = stage.output_dim // stage.patch
    if width != 1:
        raise ConfigError(f"the decoder ends {width} wide, not in single samples")
    for stage in config.encoder:
        if stage.input_dim != width * stage.patch:
            raise ConfigError(f"{stage.name}: input_dimension is {stage.input_dim}, but {width * stage.patch} arrives")
        width = stage.output_dim
    if config.encoder:
        if width != config.latent_dim:
            raise ConfigError(f"the encoder ends {width} wide, but the quantizer takes {config.latent_dim}")
        if math.prod(stage.patch for stage in config.encoder) != config.samples_per_frame:
            raise ConfigError("encoder and decoder have different frame rates")
    if config.samples_per_frame % config.channels:
        raise ConfigError(f"{config.samples_per_frame} samples a frame do not split into {config.channels} channels")
    if downsample is not None and downsample != config.samples_per_frame // config.channels:
        raise ConfigError(
            f"downsample_rate is {downsample!r}, but the patches make {config.samples_per_frame // config.channels}"
        )


def _mirrored(modules: Sequence[Mapping]) -> list[Mapping]:
    """`reversed_decoder_kwargs` is the list back to front, with each module's input and output swapped."""
    swap = {"input_dimension": "output_dimension", "output_dimension": "input_dimension"}
    return [{swap.get(key, key): value for key, value in module.items()} for module in reversed(modules)]


def _module_list(modules: object, key: str) -> list[Mapping]:
    if not isinstance(modules, list) or not modules or len(modules) > 2 * MAX_STAGES:
        raise ConfigError(f"{key} is not a list of 1-{2 * MAX_STAGES} modules")
    for i, module in enumerate(modules):
        kind = module.get("module_type") if isinstance(module, Mapping) else None
        if kind not in ("Transformer", "PatchedPretransform"):
            raise ConfigError(f"{key}[{i}]: module_type is {kind!r}; known are Transformer and PatchedPretransform")
    return modules


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _whole(table: Mapping, key: str, most: int) -> int:
    value = table.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"{key} is {value!r}, not a whole number in 1-{most:,}")
    return value
