"""Matplotlib figures of what the engine and `audiollm.analysis` compute; computing and drawing are apart."""

from __future__ import annotations

from .activation import activation
from .attention import attention
from .attribution import attribution_curve, occlusion_curve
from .description import description
from .effects import effect_map, next_token_bars
from .layers import norm_curves, norm_map, similarity_map
from .lens import lens
from .overview import overview
from .patching import patching_map
from .probing import probe_curve, probe_timeline
from .projection import projection
from .similarity import cka_heatmap, self_similarity_matrix, stem_retrieval_curve
from .steering import steering_report
from .timeline import timeline
from .token_strip import token_strip

__all__ = [
    "activation",
    "attention",
    "attribution_curve",
    "cka_heatmap",
    "description",
    "effect_map",
    "lens",
    "next_token_bars",
    "norm_curves",
    "norm_map",
    "occlusion_curve",
    "overview",
    "patching_map",
    "probe_curve",
    "probe_timeline",
    "projection",
    "self_similarity_matrix",
    "similarity_map",
    "steering_report",
    "stem_retrieval_curve",
    "timeline",
    "token_strip",
]
