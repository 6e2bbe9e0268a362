"""The random-weights twin of an embedded snapshot: same shape, other weights, always the same ones."""

from __future__ import annotations

import pytest
import torch

from audiollm import ArgumentError, demo


@pytest.mark.parametrize("name", demo.SNAPSHOTS)
def test_same_shape_and_scales_other_weights(name: str) -> None:
    state = torch.random.get_rng_state()
    snapshot, twin = demo.load(name), demo.load(name, weights="random")
    assert torch.equal(torch.random.get_rng_state(), state)
    learned, drawn = ({n: p.detach() for n, p in session.model.named_parameters()} for session in (snapshot, twin))
    assert learned.keys() == drawn.keys()
    for key, values in learned.items():
        other = drawn[key]
        assert other.shape == values.shape and other.dtype == values.dtype
        if "embed_positions" in key:
            assert torch.equal(other, values)
            continue
        if values.std() > 0 and values.numel() > 2_000:
            assert not torch.allclose(other, values)
            assert other.std() == pytest.approx(float(values.std()), rel=0.1)
    assert twin.processor.tokenizer.get_vocab() == snapshot.processor.tokenizer.get_vocab()


def test_the_same_twin_at_every_call_and_dtype() -> None:
    torch.manual_seed(5)
    one = demo.load("moss_music", weights="random").model.state_dict()
    torch.manual_seed(6)
    two = demo.load("moss_music", weights="random").model.state_dict()
    assert all(torch.equal(one[key], two[key]) for key in one)
    half = demo.load("moss_music", dtype=torch.bfloat16, weights="random").model.state_dict()
    assert all(torch.allclose(one[key], half[key].float(), atol=0.05, rtol=0.02) for key in one)


def test_another_word_is_refused() -> None:
    with pytest.raises(ArgumentError, match="weights") as caught:
        demo.load(weights="trained")
    assert caught.value.code == "bad_argument"
