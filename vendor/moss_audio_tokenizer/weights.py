"""Published weight names and shapes, and how they become the folded tensors that run.

A source of weights is a function `get(name, shape) -> float32 tensor on the CPU`; it raises when the tensor is missing
or has another shape. The names here are those of the published snapshot; a GGUF reader maps them to its own.
Folded while building: layer scales into the projections before them, weight norm into plain matrices (w = g * v / |v|,
norm per output row), codebooks and their output projections into one table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from .codec import DecoderWeights, EncoderWeights
from .config import CodecConfig, StageConfig
from .quantizer import QuantizerWeights, SearchWeights
from .stage import LayerWeights, StageWeights

GetTensor = Callable[[str, tuple[int, ...]], Tensor]
Place = Callable[[Tensor], Tensor]


def stage_shapes(config: StageConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Published names of one stage with their shapes."""
    d, ff = config.d_model, config.ff
    yield f"{config.name}.input_proj.weight", (d, config.input_dim)
    for i in range(config.layers):
        layer = f"{config.name}.transformer.layers.{i}"
        for norm in ("norm1", "norm2"):
            yield f"{layer}.{norm}.weight", (d,)
            yield f"{layer}.{norm}.bias", (d,)
        yield f"{layer}.self_attn.in_proj.weight", (3 * d, d)
        yield f"{layer}.self_attn.out_proj.weight", (d, d)
        yield f"{layer}.ffn.0.weight", (ff, d)
        yield f"{layer}.ffn.2.weight", (d, ff)
        yield f"{layer}.layer_scale_1.scale", (d,)
        yield f"{layer}.layer_scale_2.scale", (d,)
    yield f"{config.name}.output_proj.weight", (config.output_dim, d)


def _normed_shapes(name: str, out: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.bias", (out,)
    yield f"{name}.parametrizations.weight.original0", (out, 1, 1)
    yield f"{name}.parametrizations.weight.original1", (out, width, 1)


def decoder_shapes(config: CodecConfig) -> dict[str, tuple[int, ...]]:
    """Published names and shapes that decoding needs."""
    shapes: dict[str, tuple[int, ...]] = {}
    for stage in config.decoder:
        shapes.update(stage_shapes(stage))
    shapes.update(_normed_shapes("quantizer.output_proj", config.latent_dim, config.rvq_dim))
    for i in range(config.n_codebooks):
        shapes[f"quantizer.quantizers.{i}.codebook.weight"] = (config.codebook_size, config.codebook_dim)
        shapes.update(_normed_shapes(f"quantizer.quantizers.{i}.out_proj", config.rvq_dim, config.codebook_dim))
    return shapes


def encoder_shapes(config: CodecConfig) -> dict[str, tuple[int, ...]]:
    """Published names and shapes that encoding needs besides; empty where the config has no encoder."""
    shapes: dict[str, tuple[int, ...]] = {}
    if config.encoder:
        for stage in config.encoder:
            shapes.update(stage_shapes(stage))
        shapes.update(_normed_shapes("quantizer.input_proj", config.rvq_dim, config.latent_dim))
        for i in range(config.n_codebooks):
            shapes.update(_normed_shapes(f"quantizer.quantizers.{i}.in_proj", config.codebook_dim, config.rvq_dim))
    return shapes


def build_stage(get: GetTensor, config: StageConfig, place: Place) -> StageWeights:
    """Fold and place the weights of one stage."""
    shapes = dict(stage_shapes(config))

    def fetch(name: str) -> Tensor:
        full = f"{config.name}.{name}"
        return get(full, shapes[full])

    layers = []
    for i in range(config.layers):
        at = f"transformer.layers.{i}"
        layers.append(
            LayerWeights(
                norm1_weight=place(fetch(f"{at}.norm1.weight")),
                norm1_bias=place(fetch(f"{at}.norm1.bias")),
                qkv=place(fetch(f"{at}.self_attn.in_proj.weight")),
                out=place(fetch(f"{at}.self_attn.out_proj.weight") * fetch(f"{at}.layer_scale_1.scale")[:, None]),
                norm2_weight=place(fetch(f"{at}.norm2.weight")),
                norm2_bias=place(fetch(f"{at}.norm2.bias")),
                up=place(fetch(f"{at}.ffn.0.weight")),
                down=place(fetch(f"{at}.ffn.2.weight") * fetch(f"{at}.layer_scale_2.scale")[:, None]),
            )
        )
    return StageWeights(config, place(fetch("input_proj.weight")), tuple(layers), place(fetch("output_proj.weight")))


def _weight_normed(get: GetTensor, name: str, out: int, width: int) -> tuple[Tensor, Tensor]:
    """(weight [out, width], bias [out]) of a weight-normed 1x1 projection."""
    (bias, _), (gain, gain_shape), (direction, direction_shape) = _normed_shapes(name, out, width)
    v = get(direction, direction_shape)[:, :, 0]
    g = get(gain, gain_shape)[:, :, 0]
    return g * v / v.norm(dim=1, keepdim=True), get(bias, (out,))


def build_quantizer(get: GetTensor, config: CodecConfig, place: Place) -> QuantizerWeights:
    """Fold the codebooks and their output projections into one table with a zero row for an absent code."""
    table = torch.zeros(config.n_codebooks, config.codebook_size + 1, config.rvq_dim)
    for i in range(config.n_codebooks):
        name = f"quantizer.quantizers.{i}"
        codebook = get(f"{name}.codebook.weight", (config.codebook_size, config.codebook_dim))
        weight, bias = _weight_normed(get, f"{name}.out_proj", config.rvq_dim, config.codebook_dim)
        table[i, :-1] = functional.linear(codebook, weight, bias)
    weight, bias = _weight_normed(get, "quantizer.output_proj", config.latent_dim, config.rvq_dim)
    return QuantizerWeights(config.codebook_size, place(table.flatten(0, 1)), place(weight), place(bias))


def build_decoder(get: GetTensor, config: CodecConfig, place: Place) -> DecoderWeights:
    """Everything that decoding needs; `place` moves a float32 CPU tensor to its device and dtype."""
    quantizer = build_quantizer(get, config, place)
    return DecoderWeights(config, quantizer, tuple(build_stage(get, stage, place) for stage in config.decoder))


def build_encoder(get: GetTensor, config: CodecConfig, quantizer: QuantizerWeights, place: Place) -> EncoderWeights:
    """Everything that encoding needs besides `quantizer`."""
    weight, bias = _weight_normed(get, "quantizer.input_proj", config.rvq_dim, config.latent_dim)
    in_weights, in_biases, directions = [], [], []
    for i in range(config.n_codebooks):
        name = f"quantizer.quantizers.{i}"
        w, b = _weight_normed(get, f"{name}.in_proj", config.codebook_dim, config.rvq_dim)
        codebook = get(f"{name}.codebook.weight", (config.codebook_size, config.codebook_dim))
        in_weights.append(w)
        in_biases.append(b)
        directions.append(functional.normalize(codebook, dim=1))
    search = SearchWeights(
        place(weight),
        place(bias),
        place(torch.stack(in_weights)),
        place(torch.stack(in_biases)),
        place(torch.stack(directions)),
    )
    stages = tuple(build_stage(get, stage, place) for stage in config.encoder)
    return EncoderWeights(config, quantizer, search, stages)
