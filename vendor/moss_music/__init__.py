"""MOSS-Music: the model that transformers lacks, written here; see vendor/README.md."""

from __future__ import annotations

from .configuration import MossAudioConfig, MossMusicAudioConfig, MossMusicConfig
from .encoder import Chunk, EncoderOutput, MossMusicAudioEncoder, n_tokens, plan_chunks, sinusoid_positions
from .mel import log_mel, n_frames
from .modeling import AUDIO_INPUTS, MossMusicForConditionalGeneration, SourceFeatures
from .processing import MossMusicProcessor
from .prompt import AudioSpan, AudioTokenIds, PlacedSpan, PromptIds, audio_span

__all__ = [
    "AUDIO_INPUTS",
    "AudioSpan",
    "AudioTokenIds",
    "Chunk",
    "EncoderOutput",
    "MossAudioConfig",
    "MossMusicAudioConfig",
    "MossMusicAudioEncoder",
    "MossMusicConfig",
    "MossMusicForConditionalGeneration",
    "MossMusicProcessor",
    "PlacedSpan",
    "PromptIds",
    "SourceFeatures",
    "audio_span",
    "log_mel",
    "n_frames",
    "n_tokens",
    "plan_chunks",
    "sinusoid_positions",
]
