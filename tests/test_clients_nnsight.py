"""nnsight traces a Session's model, and reads what `session.capture` reads: the example of the documentation."""

from __future__ import annotations

import pytest
import torch
from looking import FAMILIES, hooks, mixed_requests

nnsight = pytest.importorskip("nnsight")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trace_of_a_language_block_is_our_capture(family, request):
    session = request.getfixturevalue(family)
    before = hooks(session)
    batch = session.prepare(mixed_requests()[:2])
    ours = session.capture(batch, ["resid[1]", "attn_out[1]", "resid[2]"])
    mask = batch.inputs["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)

    traced = nnsight.NNsight(session.model)
    language = traced.model.language_model if session.family == "music_flamingo" else traced.language_model
    with torch.no_grad(), traced.trace(**batch.inputs, position_ids=positions, use_cache=False):
        received = language.layers[1].input.save()
        attention = language.layers[1].self_attn.output[0].save()
        handed_on = language.layers[2].input.save()

    for point, its in (("resid[1]", received), ("attn_out[1]", attention), ("resid[2]", handed_on)):
        rows = ours[point].rows
        mine = its[torch.from_numpy(rows.sample_index), torch.from_numpy(rows.position)]
        torch.testing.assert_close(mine, ours[point].values, atol=1e-4, rtol=1e-4)
    assert hooks(session) == before
