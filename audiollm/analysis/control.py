"""The random-weights control: the same model with parameters that never learned anything.

What a probe reads from it is due to the architecture, the input and the probe, not to training (Zhang and Bowman 2018,
"Language modeling teaches you more than translation does"). Compare every probe with it.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from ..errors import ArgumentError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..session import Session


def random_control(session: Session, seed: int = 0) -> Session:
    """A Session like this one whose parameters are redrawn.

    Every parameter tensor becomes independent normal values with that tensor's own mean and standard deviation
    (biases and norm weights too; tied tensors stay tied), drawn in float32 on the CPU from one generator seeded with
    `seed`, so the values are the same on every device. Buffers, and tables that the architecture itself holds fixed
    (a tower's sinusoids), are copied. Processor, dtype, device and attention are the same. The given session is not
    touched, nor is torch's random state; hooks on it are not taken over.

    Cost: the memory of the weights once more, and one normal value a parameter.
    Raises: ArgumentError for a seed that is not a whole number, and where the model's parameters are not those of its
    architecture any more (an adapter was added).

    >>> from audiollm import demo
    >>> from audiollm.analysis.control import random_control
    >>> session = demo.load("music_flamingo")
    >>> control = random_control(session)
    >>> (control.family, control.n_layers) == (session.family, session.n_layers)
    True
    >>> bool((control.model.lm_head.weight == session.model.lm_head.weight).any())
    False
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ArgumentError(f"seed is {seed!r}; pass a whole number", code="bad_argument", source="seed")
    model = _empty_like(session.model)
    adapter = type(session._adapter)(model, session.processor)
    _check_same(session.model, model)
    generator = torch.Generator("cpu").manual_seed(seed)
    fixed = {name for name, empty in model.named_parameters() if not empty.requires_grad}
    done: dict[int, torch.nn.Parameter] = {}
    for name, learned in session.model.named_parameters(remove_duplicate=False):
        if id(learned) not in done:
            values = learned.detach().clone() if name in fixed else _redrawn(learned.detach(), generator)
            done[id(learned)] = torch.nn.Parameter(values, requires_grad=learned.requires_grad)
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._parameters[leaf] = done[id(learned)]
    for name, buffer in session.model.named_buffers(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = buffer.detach().clone()
    model.train(session.model.training)
    model.generation_config = copy.deepcopy(session.model.generation_config)
    return type(session)(model, session.processor, adapter)


def _empty_like(model: PreTrainedModel) -> PreTrainedModel:
    """The same architecture on the meta device, which draws no random number."""
    with torch.device("meta"):
        return type(model)(copy.deepcopy(model.config))


def _check_same(model: PreTrainedModel, empty: PreTrainedModel) -> None:
    for what in ("named_parameters", "named_buffers"):
        mine = {name: tensor.shape for name, tensor in getattr(model, what)(remove_duplicate=False)}
        built = {name: tensor.shape for name, tensor in getattr(empty, what)(remove_duplicate=False)}
        strange = sorted(name for name in mine.keys() | built.keys() if mine.get(name) != built.get(name))
        if strange:
            raise ArgumentError(
                f"the session's model is not what its configuration describes any more ({strange[0]!r} and "
                f"{len(strange) - 1} other tensor(s) differ); merge adapters into the weights and load it anew",
                code="bad_argument",
                source="session",
            )


def _redrawn(learned: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Normal values of the same mean and standard deviation, shape, dtype and device."""
    std, mean = torch.std_mean(learned.float(), correction=0)
    drawn = torch.empty(learned.shape, dtype=torch.float32, device="cpu").normal_(generator=generator)
    return drawn.mul_(std.item()).add_(mean.item()).to(device=learned.device, dtype=learned.dtype)
