"""From the encoder's width to the language model's: the adapter, and one merger for each DeepStack tap."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), no biases: [..., width_in] to [..., width_out]."""

    def __init__(self, width_in: int, width_hidden: int, width_out: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width_in, width_hidden, bias=False)
        self.up_proj = nn.Linear(width_in, width_hidden, bias=False)
        self.down_proj = nn.Linear(width_hidden, width_out, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """Project audio states to the language model's width."""
        return self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states))
