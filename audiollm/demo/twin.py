"""A model with what it learned taken out: the same shape and tokenizer, weights drawn at random at the same scales.

The control for a probe: what can be read from the twin too was in the audio, or in the architecture, and was not learned.
"""

from __future__ import annotations

import torch

SEED = 20261201
# Tables that are computed and not learned.
_COMPUTED = ("embed_positions",)


def forget(model: torch.nn.Module, seed: int = SEED) -> None:
    """Draw every learned tensor of `model` anew, in place: normal, with the mean and standard deviation that it had.

    The same seed gives the same weights for the same model, on every device; the caller's random state is not touched.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(table in name for table in _COMPUTED):
                continue
            values = parameter.detach().to("cpu", torch.float32)
            noise = torch.randn(values.shape, generator=generator, dtype=torch.float32, device="cpu")
            parameter.copy_(values.mean() + values.std(correction=0) * noise)
