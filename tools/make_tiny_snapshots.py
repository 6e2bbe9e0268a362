"""Make the embedded small snapshots: the published architectures and file layouts, small widths, random weights.

    python tools/make_tiny_snapshots.py            # writes audiollm/demo/<family>/

The same seed gives the same tensors with the same torch release. Nothing imports this file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from audiollm.vendor.moss_music import MossMusicConfig, MossMusicForConditionalGeneration
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import MusicFlamingoConfig, MusicFlamingoForConditionalGeneration

DEMO = Path(__file__).resolve().parent.parent / "audiollm" / "demo"
SEED = 20261130
N_WORDS = 620  # 256 bytes and the merges learned from CORPUS

# What the small tokenizer learns its words from.
CORPUS = """
Describe this track. Describe the music you hear. What instruments are playing? Which instrument carries the melody?
The piano plays a chord progression in C major while the bass follows the roots and the drums keep a steady beat.
A guitar, a violin, a flute, a trumpet, an organ, a synthesizer, strings and brass, a drum kit with kick, snare and
hi-hat. The tempo is slow, medium, fast; about ninety-six beats per minute. The key is A minor, D minor, G major, F
major, E flat major, B flat minor. The chord is major, minor, diminished, dominant seventh, suspended. The melody is
rising, falling, staying on the same note. Compare the two tracks. Which of the sources is louder, brighter, higher?
Audio 1: Audio 2: Audio 3: Audio 4: Audio 5: mix, drums, bass, keys, vocals, other stems. When does the second note
begin? How many bars are there? Is there a drum in this recording? Listen first. Now name the key. Yes. No. The first
source is the mixture and the second source is one of its stems. It sounds like jazz, rock, pop, classical, folk,
electronic music. The mood is calm, bright, sad, happy, tense. one two three four five six seven eight nine ten.
"""

PLAIN = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = """{% if messages[0].role != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def learned_tokenizer(
    special: tuple[str, ...], lines: Iterable[str] = CORPUS.splitlines(), n_words: int = N_WORDS
) -> Tokenizer:
    """A byte-level BPE in Qwen's manner, 256 bytes and merges learned from `lines`, with `special` as its last ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_words, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path, special: tuple[str, ...], config: dict) -> None:
    """vocab.json, merges.txt, tokenizer.json, added_tokens.json and tokenizer_config.json, as published folders have them."""
    tokenizer.model.save(str(folder))
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "added_tokens.json", {text: tokenizer.token_to_id(text) for text in special})
    write_json(
        folder / "tokenizer_config.json",
        {
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "model_max_length": 32768,
            "pad_token": "<|endoftext|>",
            "tokenizer_class": "Qwen2Tokenizer",
            "unk_token": None,
            **config,
        },
    )


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def random_weights(model: torch.nn.Module, seed: int) -> None:
    """Fill a model so that states keep a size of about one through its layers and differ from token to token."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(0.1 * noise + (1.0 if name.endswith("weight") else 0.0))
            elif name.endswith("bias"):
                parameter.copy_(0.02 * noise)
            elif "embed" in name:
                parameter.copy_(noise if "tokens" in name else 0.3 * noise)
            else:
                parameter.copy_(noise * parameter[0].numel() ** -0.5)


def music_flamingo(folder: Path) -> None:
    """A Music Flamingo of 0.6 M parameters."""
    sound = ("<sound>", "<|sound_bos|>", "<|sound_eos|>")
    tokenizer = learned_tokenizer(SPECIAL + sound)
    ids = {text: tokenizer.token_to_id(text) for text in SPECIAL + sound}
    write_tokenizer(tokenizer, folder, SPECIAL + sound, {"processor_class": "MusicFlamingoProcessor"})
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    write_json(folder / "processor_config.json", music_flamingo_processor())
    write_json(
        folder / "generation_config.json", {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]}
    )
    config = music_flamingo_config(ids, tokenizer.get_vocab_size())
    write_json(folder / "config.json", config)
    model = MusicFlamingoForConditionalGeneration(MusicFlamingoConfig.from_dict(config))
    random_weights(model, SEED)
    tensors = {flat_name(n): t.detach().to(torch.bfloat16).contiguous() for n, t in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def music_flamingo_processor() -> dict:
    return {
        "audio_bos_token": "<|sound_bos|>",
        "audio_eos_token": "<|sound_eos|>",
        "audio_token": "<sound>",
        "feature_extractor": {
            "chunk_length": 30,
            "dither": 0.0,
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": 128,
            "hop_length": 160,
            "n_fft": 400,
            "n_samples": 480000,
            "nb_max_frames": 3000,
            "padding_side": "right",
            "padding_value": 0.0,
            "return_attention_mask": True,
            "sampling_rate": 16000,
        },
        "max_audio_len": 1200,
        "processor_class": "MusicFlamingoProcessor",
    }


def music_flamingo_config(ids: dict[str, int], n_vocab: int) -> dict:
    text_layers = 6
    return {
        "architectures": ["MusicFlamingoForConditionalGeneration"],
        "model_type": "musicflamingo",
        "audio_token_id": ids["<sound>"],
        "audio_bos_token_id": ids["<|sound_bos|>"],
        "audio_eos_token_id": ids["<|sound_eos|>"],
        "audio_frame_step": 0.01,
        "projector_bias": True,
        "projector_hidden_act": "gelu",
        "rope_parameters": {"partial_rotary_factor": 0.2, "rope_theta": 1200.0, "rope_type": "default"},
        "audio_config": {
            "model_type": "audioflamingo3_encoder",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_hidden_layers": 4,
            "num_mel_bins": 128,
            "max_source_positions": 1500,
            "activation_function": "gelu",
        },
        "text_config": {
            "model_type": "qwen2",
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": text_layers,
            "layer_types": ["full_attention"] * text_layers,
            "hidden_act": "silu",
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
            "tie_word_embeddings": False,
            "vocab_size": n_vocab,
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
        },
    }


def flat_name(name: str) -> str:
    """A tensor's name in the library's model -> its name in published Music Flamingo files."""
    if name.startswith("lm_head."):
        return f"language_model.{name}"
    return name.removeprefix("model.").replace("language_model.", "language_model.model.", 1)


def moss_music(folder: Path) -> None:
    """A MOSS-Music of 0.5 M parameters, with the real one's files: no tokenizer.json, no special_tokens_map.json."""
    audio = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    tokenizer = learned_tokenizer(SPECIAL + audio)
    ids = {text: tokenizer.token_to_id(text) for text in SPECIAL + audio}
    described = {str(ids[text]): {"content": text, "special": True, **PLAIN} for text in SPECIAL + audio}
    settings = {"added_tokens_decoder": described, "processor_class": "MossMusicProcessor"}
    write_tokenizer(tokenizer, folder, SPECIAL + audio, settings)
    (folder / "tokenizer.json").unlink()
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    named = zip(("audio_token_id", "audio_start_id", "audio_end_id"), audio, strict=True)
    write_json(
        folder / "preprocessor_config.json",
        {"processor_class": "MossMusicProcessor", "enable_time_marker": True} | {key: ids[text] for key, text in named},
    )
    write_json(
        folder / "generation_config.json", {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]}
    )
    config = moss_music_config(ids, tokenizer.get_vocab_size())
    write_json(folder / "config.json", config)
    model = MossMusicForConditionalGeneration(MossMusicConfig.from_dict(config))
    random_weights(model, SEED + 1)
    tensors = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def moss_music_config(ids: dict[str, int], n_vocab: int) -> dict:
    text_layers = 6
    return {
        "architectures": ["MossMusicModel"],
        "model_type": "moss_music",
        "adapter_hidden_size": 96,
        "deepstack_num_inject_layers": 3,
        "tie_word_embeddings": False,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "vocab_size": n_vocab,
        "num_hidden_layers": text_layers,
        "audio_config": {
            "d_model": 64,
            "output_dim": 64,
            "encoder_layers": 6,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "deepstack_encoder_layer_indexes": [1, 3, 4],
            "downsample_hidden_size": 16,
            "downsample_rate": 8,
            "activation_function": "gelu",
            "layer_norm_eps": 1e-5,
            "max_source_positions": 1500,
            "num_mel_bins": 128,
            "n_window": 200,
            "conv_chunksize": 64,
        },
        "language_config": {
            "model_type": "qwen3",
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_hidden_layers": text_layers,
            "layer_types": ["full_attention"] * text_layers,
            "hidden_act": "silu",
            "attention_bias": False,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": False,
            "vocab_size": n_vocab,
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
        },
    }


FAMILIES = {"music_flamingo": music_flamingo, "moss_music": moss_music}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    for name in parser.parse_args().families or FAMILIES:
        folder = DEMO / name
        folder.mkdir(parents=True, exist_ok=True)
        FAMILIES[name](folder)
        print(f"{name}: {sum(p.stat().st_size for p in folder.iterdir()):,} bytes in {folder}")


if __name__ == "__main__":
    main()
