"""Music Flamingo snapshots of any size with random weights, in the published layout, for the benchmarks.

Only configuration sizes are chosen here; names and shapes come from the library's model, tokenizer and processor files
from the embedded small snapshot. Weights are drawn with the scale of a freshly initialised network, so that
states neither vanish nor overflow.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import MusicFlamingoConfig, MusicFlamingoForConditionalGeneration

from audiollm import demo

_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)
# Prefixes of the library's names and of the published ones, the longest first.
_PUBLISHED = (
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    ("model.", ""),
)


def write_snapshot(
    folder: Path, *, text: dict, audio: dict, dtype: torch.dtype, shard_bytes: int = 1 << 30, seed: int = 0
) -> int:
    """Write a snapshot whose config is the small one's, changed by `text` (text_config) and `audio` (audio_config).

    Weights go to shards of about `shard_bytes` with an index, or to one file where they fit. Returns the bytes of all
    tensors.
    """
    folder.mkdir(parents=True)
    for name in _TOKENIZER_FILES:
        shutil.copyfile(demo.snapshot("music_flamingo") / name, folder / name)
    config = _config(text, audio, dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    shards = list(_shards(config, dtype, shard_bytes))
    generator = torch.Generator().manual_seed(seed)
    weight_map: dict[str, str] = {}
    total = 0
    for i, shapes in enumerate(shards):
        file = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: _drawn(name, shape, dtype, generator) for name, shape in shapes.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return total


def published_name(name: str) -> str:
    """A tensor's name in the library's model -> its name in the published files."""
    for ours, published in _PUBLISHED:
        if name.startswith(ours):
            return published + name.removeprefix(ours)
    raise ValueError(f"{name!r} has no published name")


def _config(text: dict, audio: dict, dtype: torch.dtype) -> dict:
    config = json.loads((demo.snapshot("music_flamingo") / "config.json").read_text())
    config["text_config"] |= text
    config["text_config"]["layer_types"] = ["full_attention"] * config["text_config"]["num_hidden_layers"]
    config["audio_config"] |= audio
    config["head_dim"] = config["audio_config"]["hidden_size"]
    config["dtype"] = str(dtype).removeprefix("torch.")
    return config


def _shards(config: dict, dtype: torch.dtype, shard_bytes: int) -> Iterator[dict[str, tuple[int, ...]]]:
    """Published names and shapes of each file, in the order of the model."""
    with torch.device("meta"):
        model = MusicFlamingoForConditionalGeneration(MusicFlamingoConfig.from_dict(config))
    shard: dict[str, tuple[int, ...]] = {}
    size = 0
    for name, tensor in model.state_dict().items():
        nbytes = tensor.numel() * dtype.itemsize
        if shard and size + nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[published_name(name)] = tuple(tensor.shape)
        size += nbytes
    yield shard


def _drawn(name: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=dtype)
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype)
    scale = 1.0 if "embed" in name else torch.Size(shape[1:]).numel() ** -0.5
    return (torch.randn(shape, generator=generator) * scale).to(dtype)
