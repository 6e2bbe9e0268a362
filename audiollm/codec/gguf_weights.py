"""The decoder weights of a loom GGUF: sizes from its metadata and shapes, windows from its graph's constants.

Widths come from the shapes; windows and head widths from the mask, frequency and scale tensors of the file's graph,
each checked against the formula this code uses, so that a file whose graph means something else is refused instead of
decoded wrongly.
"""

from __future__ import annotations

import math

import torch

from ..vendor.moss_audio_tokenizer import (
    CodecConfig,
    DecoderWeights,
    QuantizerWeights,
    StageConfig,
    build_stage,
)
from ..vendor.moss_audio_tokenizer.config import (
    MAX_CODEBOOK_SIZE,
    MAX_CODEBOOKS,
    MAX_CONTEXT,
    MAX_LAYERS,
    MAX_STAGES,
    MODEL_TYPE,
)
from ..vendor.moss_audio_tokenizer.weights import Place
from .gguf_file import GgufFile
from .gguf_names import Names

# The windows of the published v2 decoder, for a build that carries no masks.
_V2_WINDOWS_S = (10.0, 10.0, 8.0, 4.0, 2.0, 1.0)
_DEFAULT_HEAD_DIM = 64


def read_decoder(file: GgufFile, absent: int | None, place: Place) -> DecoderWeights:
    """Every weight that decoding needs, placed.

    Raises: ModelFileError `bad_weights` naming the tensor or key that is missing, misshapen or contradicts another,
    `unsupported` for another architecture or a feature that v2 does not have.
    """
    check_architecture(file)
    names = Names(file)
    config = read_config(file, names)
    names.check_size(config)
    quantizer = _read_quantizer(file, names, config, absent, place)
    stages = tuple(build_stage(names.fetch, stage, place) for stage in config.decoder)
    names.check_leftovers()
    return DecoderWeights(config, quantizer, stages)


def read_config(file: GgufFile, names: Names) -> CodecConfig:
    """Rates and sizes from the metadata, widths from the shapes, windows from the graph's constants."""
    frame_rate = file.number("loom.codec.frame_rate", "f32")
    sample_rate = _count(file, "loom.sample_rate", 768_000)
    channels = _count(file, "loom.channels", 64, default=1)
    n_codebooks = _count(file, "loom.codec.n_codebooks", MAX_CODEBOOKS)
    size = _count(file, "loom.codec.codebook_size", MAX_CODEBOOK_SIZE)
    if frame_rate is None or not math.isfinite(frame_rate) or frame_rate <= 0:
        file.fail(f"loom.codec.frame_rate is {frame_rate!r}, not a rate in Hz")
    table, output = names.require("decoder_table"), names.require("decoder_output_proj_weight")
    if len(table.shape) != 2 or len(output.shape) != 2:
        file.fail(f"tensors {table.name} and {output.name} must have two dimensions")
    indices = names.stage_indices
    if not 1 <= len(indices) <= MAX_STAGES:
        file.fail(f"it has {len(indices)} decoder stages")
    inputs = [_width(file, names, f"decoder_{i}_input_proj_weight") for i in indices]
    outputs = [_width(file, names, f"decoder_{i}_output_proj_weight") for i in indices]
    stages, rate = [], float(frame_rate)
    for ordinal, (index, (d_model, input_dim), (output_dim, _)) in enumerate(
        zip(indices, inputs, outputs, strict=True)
    ):
        following = inputs[ordinal + 1][1] if ordinal + 1 < len(indices) else 1
        if output_dim % following:
            file.fail(f"decoder {index} gives {output_dim} channels, the next stage takes {following}")
        head_dim = _head_dim(file, names, ordinal, d_model)
        layers = sorted({int(m[1]) for m in names.tails(rf"decoder_{index}_transformer_layers_(\d+)_norm1_weight")})
        if layers != list(range(len(layers))) or not 1 <= len(layers) <= MAX_LAYERS:
            file.fail(f"decoder {index} has the layers {layers[:8]}, not 0, 1, 2 ... in a row")
        up = names.require(
            f"decoder_{index}_transformer_layers_0_ffn_0_weight", f"decoder_{index}_transformer_layers_0_linear1_weight"
        )
        stages.append(
            StageConfig(
                name=f"decoder.{index}",
                rate=rate,
                input_dim=input_dim,
                d_model=d_model,
                output_dim=output_dim,
                heads=d_model // head_dim,
                layers=len(layers),
                ff=up.shape[0],
                context=_context(file, names, ordinal, len(indices), rate),
                patch=output_dim // following,
            )
        )
        rate *= stages[-1].patch
    if inputs[0][1] != output.shape[0]:
        file.fail(f"decoder {indices[0]} takes {inputs[0][1]} channels, the quantizer gives {output.shape[0]}")
    if abs(rate - sample_rate * channels) > 1e-3 * rate:
        file.fail(f"the stages make {rate:g} values a second, {sample_rate} Hz with {channels} channels is declared")
    config = CodecConfig(
        sample_rate=sample_rate,
        channels=channels,
        n_codebooks=n_codebooks,
        codebook_size=size,
        codebook_dim=0,  # folded into the table
        rvq_dim=table.shape[1],
        latent_dim=output.shape[0],
        decoder=tuple(stages),
    )
    if config.samples_per_frame % channels:
        file.fail(f"{config.samples_per_frame} samples a frame do not split into {channels} channels")
    return config


def check_architecture(file: GgufFile) -> None:
    """Raises: ModelFileError `unsupported` when the file is some other model, `bad_weights` when it says nothing."""
    architecture = file.text("loom.architecture")
    if not architecture:
        kind = file.text("general.architecture", "unknown")
        file.fail(
            f"loom.architecture is missing (general.architecture is {kind!r}); a loom export is needed",
            "unsupported",
        )
    if architecture != MODEL_TYPE:
        file.fail(f"this is a {architecture!r} model; only {MODEL_TYPE!r} is decoded here", "unsupported")
    for key, wanted in (("loom.input.kind", "audio_codes"), ("loom.output.kind", "audio")):
        if file.text(key, wanted) != wanted:
            file.fail(f"{key} is {file.text(key)!r}, not {wanted!r}", "unsupported")


def absent_code(file: GgufFile) -> int | None:
    """The id that the file declares for a missing code. Raises: ModelFileError when it is a real entry's."""
    absent = file.number("loom.codec.absent_code", "u32")
    if absent is None:
        return None
    if absent < _count(file, "loom.codec.codebook_size", MAX_CODEBOOK_SIZE):
        file.fail(f"loom.codec.absent_code is {absent}, the id of a real entry")
    return int(absent)


def _read_quantizer(
    file: GgufFile, names: Names, config: CodecConfig, absent: int | None, place: Place
) -> QuantizerWeights:
    """The folded table, given a zero row for absent codes where the file has none."""
    n, size = config.n_codebooks, config.codebook_size
    info = names.require("decoder_table")
    if info.shape[0] not in (n * size, n * (size + 1)):
        file.fail(f"tensor {info.name} has {info.shape[0]} rows; {n} codebooks of {size} need {n * (size + 1)}")
    stride = info.shape[0] // n
    offsets = names.find("decoder_offsets")
    if offsets is not None:
        expected = torch.arange(n, dtype=torch.float32) * stride
        if math.prod(offsets.shape) != n or not torch.equal(file.read(offsets.name).flatten(), expected):
            file.fail(f"tensor {offsets.name} is not 0, {stride}, {2 * stride} ...")
    table = names.values(info, info.shape).reshape(n, stride, config.rvq_dim)
    if stride == size:
        table = torch.cat([table, torch.zeros(n, 1, config.rvq_dim)], dim=1)
    elif absent is not None and bool(table[:, size].any()):
        file.fail(f"tensor {info.name}: the rows of the absent code are not zero")
    weight = names.values(names.require("decoder_output_proj_weight"), (config.latent_dim, config.rvq_dim))
    bias = names.values(names.require("decoder_output_proj_bias"), (config.latent_dim,))
    return QuantizerWeights(size, place(table.reshape(-1, config.rvq_dim)), place(weight), place(bias))


def _head_dim(file: GgufFile, names: Names, ordinal: int, d_model: int) -> int:
    """From the rotation frequencies (each twice), else the attention scale, else 64; what is there must agree."""
    frequencies, scale = (names.find(f"decoder_stages_{ordinal}_{word}") for word in ("inv_freq", "scale"))
    width = _DEFAULT_HEAD_DIM
    if scale is not None:
        value = float(file.read(scale.name).flatten()[0])
        width = round(value**-2) if 1e-3 < value <= 1 else 0
        if math.prod(scale.shape) != 1 or width == 0 or abs(value - width**-0.5) > 1e-4 * value:
            file.fail(f"tensor {scale.name} is no attention scale, 1 / sqrt(head width)", "unsupported")
    if frequencies is not None:
        stored = file.read(frequencies.name).flatten()
        if scale is None:
            width = len(stored)
        index = torch.arange(width // 2, dtype=torch.float32)
        formula = torch.exp(index * (-math.log(10_000) * 2 / width)).repeat_interleave(2)
        if stored.shape != formula.shape or not torch.allclose(stored, formula, rtol=1e-4, atol=0):
            file.fail(f"tensor {frequencies.name} is not the rotation of v2: base 10000, {width} wide", "unsupported")
    if width < 2 or width % 2 or d_model % width:
        file.fail(f"heads {width} wide do not divide the {d_model} channels of stage {ordinal}")
    return width


def _context(file: GgufFile, names: Names, ordinal: int, stages: int, rate: float) -> int:
    """The window in positions, from the mask [block, blocks * block] of the file's graph."""
    info = names.find(f"decoder_stages_{ordinal}_window_mask")
    if info is None:
        if stages != len(_V2_WINDOWS_S):
            file.fail(f"decoder_stages_{ordinal}_window_mask is missing, and {stages} stages are not the published v2")
        return round(rate * _V2_WINDOWS_S[ordinal])
    if len(info.shape) != 2 or info.shape[1] % info.shape[0]:
        file.fail(f"tensor {info.name} has shape {list(info.shape)}, not [block, blocks * block]")
    block, reach = info.shape
    visible = file.read(info.name) > -1.0
    context = int(visible[-1].sum())
    back = (reach - block + torch.arange(block))[:, None] - torch.arange(reach)[None]
    if not 1 <= context <= MAX_CONTEXT or not torch.equal(visible, (back >= 0) & (back < context)):
        file.fail(f"tensor {info.name} is not a causal window", "unsupported")
    return context


def _width(file: GgufFile, names: Names, tail: str) -> tuple[int, int]:
    info = names.require(tail)
    if len(info.shape) != 2:
        file.fail(f"tensor {info.name} has shape {list(info.shape)}, not two dimensions")
    return info.shape[0], info.shape[1]


def _count(file: GgufFile, key: str, most: int, default: int | None = None) -> int:
    value = file.number(key, "u32")
    if value is None and default is not None:
        return default
    if value is None:
        file.fail(f"{key} is missing")
    if not 1 <= value <= most:
        file.fail(f"{key} is {value}, outside 1-{most:,}")
    return int(value)
