"""Plain functions that look inside a model; each returns a frozen result with its seconds and a `describe()` in words."""

from __future__ import annotations

from .answers import AnswerScores, answer_scores, answered
from .attention import AttentionOverTime, attention_over_time
from .cka import CKAMatrix, cka, linear_cka, linear_cka_streamed
from .comparison import session_cka
from .control import random_control
from .cross_similarity import CrossSimilarity, cross_similarity
from .effects import EditEffect, NextToken, edit_effect
from .extraction import probe_session
from .gradients import Attribution, gradient_x_input, integrated_gradients
from .labels import TokenLabels, label_tokens
from .lens import LogitLens, logit_lens
from .norms import LayerNorms, layer_norms
from .occlusion import Occlusion, occlusion
from .patching import PatchGrid, patch_sweep
from .probing import ProbeResult, ProbeRow, probe
from .projection import Projection, project
from .similarity import SelfSimilarity, StemRetrieval, self_similarity, stem_retrieval
from .steering import SteeringTrace, SteeringVector, steering_trace, steering_vector

__all__ = [
    "AnswerScores",
    "AttentionOverTime",
    "Attribution",
    "CKAMatrix",
    "CrossSimilarity",
    "EditEffect",
    "LayerNorms",
    "LogitLens",
    "NextToken",
    "Occlusion",
    "PatchGrid",
    "ProbeResult",
    "ProbeRow",
    "Projection",
    "SelfSimilarity",
    "SteeringTrace",
    "SteeringVector",
    "StemRetrieval",
    "TokenLabels",
    "answer_scores",
    "answered",
    "attention_over_time",
    "cka",
    "cross_similarity",
    "edit_effect",
    "gradient_x_input",
    "integrated_gradients",
    "label_tokens",
    "layer_norms",
    "linear_cka",
    "linear_cka_streamed",
    "logit_lens",
    "occlusion",
    "patch_sweep",
    "probe",
    "probe_session",
    "project",
    "random_control",
    "self_similarity",
    "session_cka",
    "steering_trace",
    "steering_vector",
    "stem_retrieval",
]
