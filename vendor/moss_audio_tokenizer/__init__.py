"""MOSS-Audio-Tokenizer v2, written here for the published architecture, weight names as published.

    config.py     config.json -> CodecConfig (rates, widths, windows), checked
    stage.py      one windowed transformer stage, in pieces that carry their window
    quantizer.py  codes <-> latents
    codec.py      the stages joined: decode_step, encode_step
    weights.py    published names and shapes -> folded tensors

Works on any device and floating dtype; nothing here reads files.
"""

from .codec import CodecState, DecoderWeights, EncoderWeights, decode_step, encode_step
from .config import CodecConfig, ConfigError, StageConfig, parse_config
from .quantizer import QuantizerWeights, SearchWeights, dequantize, quantize
from .stage import LayerWeights, StageState, StageWeights, run_stage
from .weights import build_decoder, build_encoder, build_quantizer, build_stage, decoder_shapes, encoder_shapes

__all__ = [
    "CodecConfig",
    "CodecState",
    "ConfigError",
    "DecoderWeights",
    "EncoderWeights",
    "LayerWeights",
    "QuantizerWeights",
    "SearchWeights",
    "StageConfig",
    "StageState",
    "StageWeights",
    "build_decoder",
    "build_encoder",
    "build_quantizer",
    "build_stage",
    "decode_step",
    "decoder_shapes",
    "dequantize",
    "encode_step",
    "encoder_shapes",
    "parse_config",
    "quantize",
    "run_stage",
]
