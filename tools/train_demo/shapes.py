"""The demo snapshots' shapes and files: the published architectures at 128 and 160 wide, and how their weights begin.

What is written here is a snapshot folder in the published layout; config files and names of weights are made as for the
random test snapshots (tools/make_tiny_snapshots.py), with other sizes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from .. import make_tiny_snapshots as tiny
from ..make_tiny_snapshots import SPECIAL, TEMPLATE, write_json, write_tokenizer
from .tokenizer import N_IDS, demo_tokenizer

MARKERS = {
    "music_flamingo": ("<sound>", "<|sound_bos|>", "<|sound_eos|>"),
    "moss_music": ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
}
LANGUAGE = {"hidden_size": 160, "intermediate_size": 448, "num_attention_heads": 5, "num_hidden_layers": 4}
N_LAYERS = 4


def write_folder(name: str, folder: Path) -> dict[str, Any]:
    """Everything of a snapshot but its weights; returns config.json's content."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = demo_tokenizer(MARKERS[name])
    special = SPECIAL + MARKERS[name]
    ids = {text: tokenizer.token_to_id(text) for text in special}
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    write_json(
        folder / "generation_config.json", {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]}
    )
    if name == "music_flamingo":
        write_tokenizer(tokenizer, folder, special, {"processor_class": "MusicFlamingoProcessor"})
        write_json(folder / "processor_config.json", tiny.music_flamingo_processor())
        config = music_flamingo_config(ids)
    else:
        described = {str(ids[text]): {"content": text, "special": True, **tiny.PLAIN} for text in special}
        write_tokenizer(
            tokenizer, folder, special, {"added_tokens_decoder": described, "processor_class": "MossMusicProcessor"}
        )
        (folder / "tokenizer.json").unlink()
        named = zip(("audio_token_id", "audio_start_id", "audio_end_id"), MARKERS[name], strict=True)
        settings = {"processor_class": "MossMusicProcessor", "enable_time_marker": True}
        write_json(folder / "preprocessor_config.json", settings | {key: ids[text] for key, text in named})
        config = moss_music_config(ids)
    write_json(folder / "config.json", config)
    return config


def music_flamingo_config(ids: dict[str, int]) -> dict[str, Any]:
    """config.json of the small Music Flamingo: 2.4 M parameters."""
    config = tiny.music_flamingo_config(ids, N_IDS)
    config["audio_config"] |= {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
    }
    text = LANGUAGE | {"num_key_value_heads": 5, "layer_types": ["full_attention"] * N_LAYERS}
    config["text_config"] |= text
    return config


def moss_music_config(ids: dict[str, int]) -> dict[str, Any]:
    """config.json of the small MOSS-Music: 2.6 M parameters."""
    config = tiny.moss_music_config(ids, N_IDS)
    config |= {"adapter_hidden_size": 192, "num_hidden_layers": N_LAYERS}
    config["audio_config"] |= {
        "d_model": 128,
        "output_dim": 128,
        "encoder_layers": 4,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 384,
        "deepstack_encoder_layer_indexes": [0, 1, 2],
        "downsample_hidden_size": 32,
    }
    text = LANGUAGE | {"num_key_value_heads": 5, "head_dim": 32, "layer_types": ["full_attention"] * N_LAYERS}
    config["language_config"] |= text
    return config


def first_weights(name: str, model: nn.Module, seed: int) -> None:
    """Weights that training can begin with; with the libraries' own, pitch stayed at chance for minutes.

    Matrices have a standard deviation of 0.05. Convolutions 1.4 / sqrt(fan in) for Music Flamingo; for MOSS-Music
    1.6 / sqrt(fan in), and 2.5 / sqrt(fan in) for the projection after them. Biases are 0, norms 1; the tower's position
    table holds sinusoids times 0.3 and is not trained.
    """
    generator = torch.Generator().manual_seed(seed)
    conv_gain = 1.4 if name == "music_flamingo" else 1.6
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "embed_positions" in key:
                parameter.copy_(0.3 * sinusoids(*parameter.shape))
                parameter.requires_grad_(False)
            elif parameter.dim() < 2:
                parameter.fill_(1.0 if "norm" in key and key.endswith("weight") else 0.0)
            else:
                fan_in = parameter[0].numel()
                scale = 0.05
                if parameter.dim() > 2:
                    scale = conv_gain / fan_in**0.5
                elif "stem_proj" in key:
                    scale = 2.5 / fan_in**0.5
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))


def sinusoids(length: int, channels: int) -> torch.Tensor:
    """Whisper's position table [length, channels]: sines, then cosines."""
    from audiollm.vendor.moss_music.encoder import sinusoid_positions

    return sinusoid_positions(length, channels)


def save_weights(name: str, model: nn.Module, folder: Path) -> None:
    """model.safetensors in bfloat16, named as published."""
    rename = tiny.flat_name if name == "music_flamingo" else str
    tensors = {rename(key): t.detach().to(torch.bfloat16).contiguous() for key, t in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
