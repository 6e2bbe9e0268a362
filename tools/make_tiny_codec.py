"""Make the embedded codec snapshot: `python tools/make_tiny_codec.py`.

The published architecture, rates, codebooks and windows at small widths, with seeded random weights in float16. What it
decodes is noise. Later codebooks are scaled down, so that a residual's depths look as they do in a trained codec.
Nothing in the package imports this file.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from audiollm.vendor.moss_audio_tokenizer import decoder_shapes, encoder_shapes, parse_config
from safetensors.torch import save_file

OUT = Path(__file__).resolve().parent.parent / "audiollm" / "demo" / "codec"
SEED = 2601
WIDTHS = ((24, 32, 32, 2), (16, 24, 24, 2), (12, 24, 24, 1), (12, 24, 24, 1), (12, 24, 24, 1), (12, 24, 240, 1))
WINDOWS_S = (10.0, 10.0, 8.0, 4.0, 2.0, 1.0)
NOTICE = (
    "RANDOM weights: a small copy of the MOSS-Audio-Tokenizer v2 architecture to try the calls with. It makes noise."
)


def transformer(input_dim: int, width: int, output_dim: int, layers: int, window_s: float) -> dict:
    return {
        "module_type": "Transformer",
        "input_dimension": input_dim,
        "output_dimension": output_dim,
        "d_model": width,
        "num_heads": 2,
        "num_layers": layers,
        "dim_feedforward": 2 * width,
        "context_duration": window_s,
        "causal": True,
        "norm": "layer_norm",
        "positional_embedding": "rope",
        "max_period": 10000,
        "gating": "none",
        "layer_scale": 0.01,
        "conv_layout": True,
    }


def make_config() -> dict:
    decoder, encoder = [], []
    for i, ((before, width, after, layers), window) in enumerate(zip(WIDTHS, WINDOWS_S, strict=True)):
        patch = {"module_type": "PatchedPretransform", "patch_size": 240 if i == 5 else 2}
        decoder += [transformer(before, width, after, layers, window), patch]
        # What the decoder patches up, the encoder has patched down: it takes `after` and gives `before`.
        encoder = [patch, transformer(after, width, before, layers, window), *encoder]
    return {
        "notice": NOTICE,
        "model_type": "moss-audio-tokenizer",
        "sampling_rate": 48000,
        "downsample_rate": 3840,
        "number_channels": 2,
        "enable_channel_interleave": True,
        "causal_transformer_context_duration": 10.0,
        "decoder_kwargs": decoder,
        "encoder_kwargs": encoder,
        "quantizer_kwargs": {
            "input_dim": 24,
            "rvq_dim": 16,
            "output_dim": 24,
            "num_quantizers": 32,
            "codebook_size": 1024,
            "codebook_dim": 8,
            "quantizer_type": "rlfq",
        },
    }


def make_weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    weights = {}
    for name, shape in sorted(shapes.items()):
        noise = torch.randn(shape, generator=generator)
        if name.endswith(("norm1.weight", "norm2.weight")):
            value = 1 + 0.1 * noise
        elif name.endswith(".scale"):
            value = 0.3 + 0.1 * noise
        elif name.endswith("original0"):
            value = 1 + 0.1 * noise.abs()
        elif name.endswith(".bias"):
            value = 0.02 * noise
        elif name.endswith("codebook.weight"):
            value = noise * 0.85 ** int(name.split(".")[2])
        else:
            value = noise / shape[1] ** 0.5
        if name == "decoder.10.output_proj.weight":
            value = value * 0.05
        weights[name] = value.to(torch.float16)
    return weights


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    config = make_config()
    (OUT / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    parsed = parse_config(config)
    weights = make_weights(decoder_shapes(parsed) | encoder_shapes(parsed))
    save_file(weights, OUT / "model.safetensors", metadata={"format": "pt", "notice": NOTICE})

    from audiollm.codec import Model

    time = np.arange(2 * 48000) / 48000
    tone = 0.3 * np.sin(2 * np.pi * (110 * time + 110 * time**2))
    stereo = np.stack([tone, tone[::-1]], axis=1).astype(np.float32)
    codes = Model.from_pretrained(OUT, device="cpu").speech2codes.infer(stereo, sample_rate=48000)
    np.save(OUT / "codes.npy", codes.astype(np.int16))
    size = sum(path.stat().st_size for path in OUT.iterdir())
    print(f"wrote {OUT}: {size / 1e6:.2f} MB, codes {codes.shape}")


if __name__ == "__main__":
    main()
