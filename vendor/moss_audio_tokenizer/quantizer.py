"""The residual quantizer: codes to latents and back.

    latent = output_proj(sum over i of out_proj_i(codebook_i[c_i]))

`table` holds every out_proj_i(codebook_i[c]), bias included, so a frame is a sum of rows. Codebook i owns the rows
i * (size + 1) ... i * (size + 1) + size; the last of them is zero and is what an absent code adds. To encode, the
residual starts as input_proj(latent); each codebook in turn takes the entry nearest by cosine to in_proj_i(residual)
and its table row is subtracted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class QuantizerWeights:
    """`table` [n_codebooks * (size + 1), rvq_dim], `output_weight` [latent_dim, rvq_dim], `output_bias` [latent_dim]."""

    size: int
    table: Tensor
    output_weight: Tensor
    output_bias: Tensor

    @property
    def n_codebooks(self) -> int:
        """How many codebooks the table holds."""
        return len(self.table) // (self.size + 1)


@dataclass(frozen=True)
class SearchWeights:
    """What encoding needs besides.

    `input_weight` [rvq_dim, latent_dim], `input_bias` [rvq_dim]; `in_weight` [n, dim, rvq_dim], `in_bias` [n, dim];
    `directions` [n, size, dim], the codebooks with every entry at length 1.
    """

    input_weight: Tensor
    input_bias: Tensor
    in_weight: Tensor
    in_bias: Tensor
    directions: Tensor


def dequantize(weights: QuantizerWeights, codes: Tensor) -> Tensor:
    """Codes [T, n] of the first n codebooks, an absent one written as `size` -> latents [T, latent_dim]."""
    n = codes.shape[1]
    offsets = torch.arange(n, device=codes.device) * (weights.size + 1)
    summed = functional.embedding_bag(codes + offsets, weights.table, mode="sum")
    return functional.linear(summed, weights.output_weight, weights.output_bias)


def quantize(weights: QuantizerWeights, search: SearchWeights, latents: Tensor) -> Tensor:
    """Latents [T, latent_dim] -> codes [T, n_codebooks], int64."""
    residual = functional.linear(latents, search.input_weight, search.input_bias)
    codes = torch.empty(len(latents), weights.n_codebooks, dtype=torch.int64, device=latents.device)
    for i in range(weights.n_codebooks):
        z = functional.linear(residual, search.in_weight[i], search.in_bias[i])
        similarity = functional.normalize(z, dim=1) @ search.directions[i].t()
        codes[:, i] = similarity.argmax(dim=1)
        residual = residual - weights.table[codes[:, i] + i * (weights.size + 1)]
    return codes
