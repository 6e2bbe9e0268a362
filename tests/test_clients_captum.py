"""captum works on a Session's model, and its layer integrated gradients are ours: the example of the documentation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from looking import FAMILIES, hooks, noise

from audiollm import Request, Waveform
from audiollm.analysis.answers import answer_ids, answered
from audiollm.analysis.gradients import integrated_gradients

attr = pytest.importorskip("captum.attr")

MEL = {"music_flamingo": "input_features", "moss_music": "audio_data"}


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_integrated_gradients_on_the_projector_are_ours(family, request):
    session = request.getfixturevalue(family)
    before, steps, answer = hooks(session), 2, "hello"
    batch = session.prepare([Request("what", [noise(32_000)])])
    silent = session.prepare([Request("what", [Waveform(np.zeros(32_000, np.float32), 16_000)])])

    # The prompt with the answer behind it; the model's inputs but the mel are passed along as they are.
    (ids,) = answer_ids(session, batch, answer)
    inputs = dict(answered(session, batch, answer).inputs)
    mel, baseline = inputs.pop(MEL[session.family]), silent.inputs[MEL[session.family]]

    def logprob(mel, *others):
        named = dict(zip(inputs, others, strict=True))
        logits = session.model(**{MEL[session.family]: mel}, **named, use_cache=False).logits
        wanted = torch.tensor(ids).expand(len(logits), -1)[..., None]
        return logits[:, -len(ids) - 1 : -1].log_softmax(-1).gather(2, wanted).sum((1, 2))

    projector = session.points("projected")[0].module
    lig = attr.LayerIntegratedGradients(logprob, projector)
    its = lig.attribute(mel, baselines=baseline, additional_forward_args=tuple(inputs.values()), n_steps=steps)

    with pytest.warns(UserWarning, match="misses"):  # 2 steps are few
        (ours,) = integrated_gradients(session, batch, answer, baseline="silence", steps=steps)
    its = its.reshape(-1, its.shape[-1])[: len(ours.values)].sum(-1).detach().numpy()  # Music Flamingo pads to 750
    assert np.abs(ours.values).max() > 0.01
    np.testing.assert_allclose(its, ours.values, atol=1e-4)
    assert hooks(session) == before
