"""From a snapshot folder: the tokenizer, the ids of audio, and prompts as ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Tokenizer

from .mel import HOP_LENGTH, N_FFT, N_MELS, SAMPLE_RATE, log_mel, n_frames
from .prompt import AudioTokenIds, PlacedSpan, PromptIds, audio_span

SYSTEM_PROMPT = "You are a helpful assistant."
_PROMPT_OPENING = f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\n"
_PROMPT_CLOSING = "<|im_end|>\n<|im_start|>assistant\n"
_REFUSED_IN_TEXT = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
_MEL = {"mel_sr": SAMPLE_RATE, "mel_dim": N_MELS, "mel_n_fft": N_FFT, "mel_hop_length": HOP_LENGTH}


class MossMusicProcessor:
    """What turns text and sources into a model's inputs: `.tokenizer`, `.ids`, `log_mel` and `build_prompt`."""

    def __init__(self, tokenizer: Any, ids: AudioTokenIds | None = None) -> None:
        self.tokenizer = tokenizer
        self.ids = AudioTokenIds() if ids is None else ids

    @classmethod
    def from_snapshot(cls, folder: str | Path) -> MossMusicProcessor:
        """Read a local snapshot folder; never the network, and never code from the folder (`auto_map` is not followed).

        Audio ids are `audio_token_id`, `audio_start_id` and `audio_end_id` of preprocessor_config.json where it has
        them, else the published defaults. Raises `FileNotFoundError` for a missing folder or vocabulary, and
        `ValueError` where preprocessor_config.json or the vocabulary contradicts what is computed here.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not a folder; give the path of a local snapshot")
        if not (folder / "tokenizer.json").is_file():
            for name in ("vocab.json", "merges.txt"):
                if not (folder / name).is_file():
                    raise FileNotFoundError(f"{folder / name} is missing; copy it from the snapshot's origin")
        settings_path = folder / "preprocessor_config.json"
        settings = json.loads(settings_path.read_text(encoding="utf-8")) if settings_path.is_file() else {}
        mel = settings.get("mel_config") or {}
        other = {name: mel[name] for name, value in _MEL.items() if mel.get(name, value) != value}
        if other:
            raise ValueError(f"{settings_path}: mel_config has {other}; this definition computes {_MEL}")
        if settings.get("enable_time_marker") is False:
            raise ValueError(f"{settings_path}: enable_time_marker is false; prompts here always have time markers")
        tokenizer = Qwen2Tokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        known = AudioTokenIds()
        ids = AudioTokenIds(
            audio=int(settings.get("audio_token_id", known.audio)),
            start=int(settings.get("audio_start_id", known.start)),
            end=int(settings.get("audio_end_id", known.end)),
        )
        digits = tuple(tokenizer.convert_tokens_to_ids(list("0123456789")))
        if digits != ids.digits:
            raise ValueError(f"{folder}: the vocabulary has the digits at {digits}, not at 15 to 24; markers need them")
        return cls(tokenizer, ids)

    def log_mel(self, waveform: Any) -> torch.Tensor:
        """The log-mel [128, F] float32 of mono samples [N] at 16 kHz; see mel.py."""
        return log_mel(waveform)

    def n_frames(self, n_samples: int) -> int:
        """Mel frames of so many samples at 16 kHz."""
        return n_frames(n_samples)

    def build_prompt(self, pieces: Sequence[str | int]) -> PromptIds:
        """The ids of a prompt with the system turn, one user turn and the assistant's turn opened.

        `pieces` is the user turn in order: text as str, a source as its number of audio tokens. Text between spans is
        tokenized piece by piece (neighbouring texts as one), spans are emitted as ids. Raises `ValueError` for text
        that spells one of the model's own control tokens.
        """
        ids: list[int] = []
        spans: list[PlacedSpan] = []
        text = _PROMPT_OPENING
        for number, piece in enumerate(pieces):
            if isinstance(piece, str):
                spelled = [token for token in _REFUSED_IN_TEXT if token in piece]
                if spelled:
                    raise ValueError(f"pieces[{number}] spells the control token {spelled[0]}; reword the text")
                text += piece
                continue
            ids += self._tokenize(text)
            text = ""
            span = audio_span(piece, self.ids)
            first = len(ids)
            ids += span.ids
            spans.append(
                PlacedSpan(
                    start=first,
                    end=len(ids) - 1,
                    audio_positions=tuple(first + offset for offset in span.audio_offsets),
                    marker_positions=tuple(first + offset for offset in span.marker_offsets),
                    marker_seconds=span.marker_seconds,
                )
            )
        ids += self._tokenize(text + _PROMPT_CLOSING)
        return PromptIds(tuple(ids), tuple(spans))

    def _tokenize(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
