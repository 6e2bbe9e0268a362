"""The table of docs/instruments.md, cell by cell and family by family: what it says yes to works, what it refuses is refused."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from looking import FAMILIES, hooks, mixed_batch, mixed_requests, noise

from audiollm import ArgumentError, Request, edits
from audiollm.analysis import (
    answer_scores,
    answered,
    attention_over_time,
    gradient_x_input,
    integrated_gradients,
    linear_cka,
    logit_lens,
    occlusion,
    patch_sweep,
    probe,
    self_similarity,
    steering_vector,
)

PAGE = (Path(__file__).parent.parent / "docs" / "instruments.md").read_text()
COLUMNS = ("batch", "generated", "gradients")


def table() -> dict[tuple[str, str], str]:
    rows = [line.strip("|").split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
    return {
        (row[0].strip(" `").split("`")[0], c): cell.strip()
        for row in rows
        for c, cell in zip(COLUMNS, row[1:], strict=True)
    }


TABLE = table()


def one() -> list[Request]:
    return [Request("what is it", [noise(16_000, 1)])]


# Each cell: a function of a session. It returns what must be true, or raises the refusal.


def observe_batch(s):
    seen = s.capture(mixed_batch(s), ["resid[1]", "projected"])
    return set(seen["resid[1]"].rows.sample_index) == {0, 1, 2} and set(seen["projected"].rows.source) == {0, 1, 2}


def observe_generated(s):
    with s.observe("resid[1]") as seen:
        s.generate(one(), max_new_tokens=3)
    return seen["resid[1]"].rows.step.max() >= 1


def observe_gradients(s):
    return s.capture(s.prepare(one()), "resid[1]", grad=True)["resid[1]"].values.requires_grad


def edit_batch(s):
    with s.edit({"resid[1]": edits.zero()}, source=2):
        seen = s.capture(mixed_batch(s), "resid[1]")["resid[1]"]
    return not seen.source(2).values.any() and seen.source(1).values.any()


def edit_generated(s):
    with s.edit({"resid[1]": edits.zero()}, steps=[1]), s.observe("resid[1]", tokens="steps") as seen:
        s.generate(one(), max_new_tokens=3)
    return not seen["resid[1]"].values[0].any()


def edit_gradients(s):
    batch = s.prepare(one())
    leaf = s.capture(batch, "projected")["projected"].values.requires_grad_()
    with s.edit({"projected": edits.replace(leaf)}):
        total = answer_scores(s, batch, "a", grad=True).total.sum()
    return torch.autograd.grad(total, leaf)[0].any()


def lens_batch(s):
    return set(logit_lens(s, mixed_batch(s)).rows.source) == {0, 1, 2}


def lens_generated(s):
    (answer,) = s.generations(one(), max_new_tokens=3)
    longer = answered(s, s.prepare(one()), [answer.token_ids])
    lens = logit_lens(s, longer, layers=[-1], tokens=range(longer.width - 4, longer.width - 1))
    return lens.top_ids[0, :, 0].tolist() == list(answer.token_ids)


def numbers(function, *arguments):
    """There is no argument that asks for a graph, and what comes back, or stays in the model, has none."""

    def none(s):
        assert "grad" not in inspect.signature(function).parameters
        found = function(s, *(argument(s) for argument in arguments))
        fields = [value for one in (found if isinstance(found, tuple) else [found]) for value in vars(one).values()]
        assert any(isinstance(value, np.ndarray) for value in fields)
        assert not any(isinstance(value, torch.Tensor) and value.requires_grad for value in fields)
        return all(parameter.grad is None for parameter in s.model.parameters())

    return none


def attention_batch(s):
    return [a.sample_index for a in attention_over_time(s, mixed_batch(s))] == [0, 1, 2]


def attention_generated(s):
    return attention_over_time(s, s.prepare(one()), "ab")[0].labels == ("a", "b")


def scores_batch(s):
    return answer_scores(s, mixed_batch(s), "a").total.shape == (3,)


def scores_generated(s):
    return len(answer_scores(s, s.prepare(one()), "abc").tokens[0]) == 3


def scores_gradients(s):
    return answer_scores(s, s.prepare(one()), "abc", grad=True).total.requires_grad


def occlusion_batch(s):
    found = occlusion(s, mixed_batch(s), "a", window_s=2.0, source=1, level="embedding")
    return found.slot.audio_index == 0 and np.isfinite(found.change).all()


def occlusion_generated(s):
    return len(occlusion(s, one()[0], "ab", window_s=0.5, level="embedding").change) >= 2


def gradients_batch(s):
    return len(gradient_x_input(s, mixed_batch(s), "a")) == 3


def gradients_generated(s):
    return len(integrated_gradients(s, s.prepare(one()), "ab", steps=2)) == 1


def patch(s, clean, corrupted):
    return patch_sweep(s, clean, corrupted, "ab", layers=[1], seconds=0.5)


def patch_batch(s):
    return patch(s, mixed_batch(s), mixed_batch(s))


def patch_generated(s):
    return np.isfinite(patch(s, one()[0], Request("what is it", [noise(16_000, 2)])).values).all()


def vector(s):
    negatives = [Request("other words", r.audios) for r in mixed_requests()]
    return steering_vector(s, mixed_requests(), negatives, "resid[2]")


def steering_batch(s):
    return vector(s).vector.any()


def steering_generated(s):
    with vector(s).apply(s, 3.0), s.observe("resid[2]", tokens="steps") as seen:
        s.generate(one(), max_new_tokens=2)
    return len(seen["resid[2]"].values) == 1


def steering_gradients(s):
    with vector(s).apply(s, 1.0):
        return answer_scores(s, s.prepare(one()), "a", grad=True).total.requires_grad


def states_of(s):
    requests = [Request("x", [noise(16_000, seed)]) for seed in range(4)]
    return s.extract_contextual_embeddings(s.prepare(requests), (0, 2))


def probe_batch(s):
    found = s.extract_contextual_embeddings(mixed_batch(s), (0, 2))
    parts = [dict(source) for source in found]
    labels = [[i % 2] * len(source[0]) for i, source in enumerate([*parts, *states_of(s)])]
    return probe([*parts, *states_of(s)], labels, n_folds=2, n_shuffles=1)


def probe_generated(s):
    with s.observe("resid[1]", tokens="steps") as seen:
        s.generate(one(), max_new_tokens=3)
    rows = seen["resid[1]"].rows
    assert np.isnan(rows.start_s).all()
    return probe([{1: seen["resid[1]"].values}], [rows.start_s])


def cka_batch(s):
    first, second = s.extract_contextual_embeddings(mixed_batch(s), (0, 2))[:2]
    return np.isfinite(linear_cka(first[0], first[2])) and np.isfinite(linear_cka(second[0], second[2]))


def cka_generated(s):
    with s.observe("resid[1]", tokens="steps") as seen:
        s.generate(one(), max_new_tokens=3)
    return self_similarity(seen["resid[1]"].values, seen["resid[1]"].rows.intervals)


def cka_gradients(s):
    first = states_of(s)[0]
    grown = first[0].clone().requires_grad_()
    assert isinstance(linear_cka(grown, first[2]), float)
    return grown.grad is None


def probe_gradients(s):
    grown = [{k: v.clone().requires_grad_() for k, v in source.items()} for source in states_of(s)]
    probe(grown, [[i % 2] * len(source[0]) for i, source in enumerate(grown)], n_folds=2)
    return all(v.grad is None for source in grown for v in source.values())


CELLS = {
    ("session.observe", "batch"): observe_batch,
    ("session.observe", "generated"): observe_generated,
    ("session.observe", "gradients"): observe_gradients,
    ("session.edit", "batch"): edit_batch,
    ("session.edit", "generated"): edit_generated,
    ("session.edit", "gradients"): edit_gradients,
    ("logit_lens", "batch"): lens_batch,
    ("logit_lens", "generated"): lens_generated,
    ("logit_lens", "gradients"): numbers(logit_lens, mixed_batch),
    ("attention_over_time", "batch"): attention_batch,
    ("attention_over_time", "generated"): attention_generated,
    ("attention_over_time", "gradients"): numbers(attention_over_time, mixed_batch),
    ("answer_scores", "batch"): scores_batch,
    ("answer_scores", "generated"): scores_generated,
    ("answer_scores", "gradients"): scores_gradients,
    ("occlusion", "batch"): occlusion_batch,
    ("occlusion", "generated"): occlusion_generated,
    ("occlusion", "gradients"): numbers(occlusion, lambda s: one()[0], lambda s: "a"),
    ("gradient_x_input", "batch"): gradients_batch,
    ("gradient_x_input", "generated"): gradients_generated,
    ("gradient_x_input", "gradients"): numbers(gradient_x_input, mixed_batch, lambda s: "a"),
    ("patch_sweep", "batch"): patch_batch,
    ("patch_sweep", "generated"): patch_generated,
    ("patch_sweep", "gradients"): numbers(patch_sweep, lambda s: one()[0], lambda s: one()[0], lambda s: "a"),
    ("steering_vector", "batch"): steering_batch,
    ("steering_vector", "generated"): steering_generated,
    ("steering_vector", "gradients"): steering_gradients,
    ("probe", "batch"): probe_batch,
    ("probe", "generated"): probe_generated,
    ("probe", "gradients"): probe_gradients,
    ("linear_cka", "batch"): cka_batch,
    ("linear_cka", "generated"): cka_generated,
    ("linear_cka", "gradients"): cka_gradients,
}


def test_the_table_has_a_test_for_every_cell():
    assert set(TABLE) == set(CELLS)
    assert all(re.match(r"(yes|refused: .+|none: .+)", cell) for cell in TABLE.values())


@pytest.mark.filterwarnings("ignore:the integral")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cell", sorted(CELLS), ids=lambda cell: "-".join(cell))
def test_cell(cell, family, request):
    session = request.getfixturevalue(family)
    before = hooks(session)
    if not TABLE[cell].startswith("refused"):
        assert CELLS[cell](session)
    else:
        with pytest.raises(ArgumentError):
            CELLS[cell](session)
    assert hooks(session) == before
