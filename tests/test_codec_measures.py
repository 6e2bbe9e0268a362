"""Looking inside: captured states, and what codes and codebooks do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_cases import DATA, TOLERANCE, gguf_codes, gguf_model, relative_rms, snapshot_model

from audiollm import codec
from audiollm.errors import ArgumentError

CODES = np.load(DATA / "cases" / "codes_T200.npy")


def test_a_capture_holds_what_was_asked_for_with_its_times():
    model = snapshot_model("tiny")
    seen = model.capture(CODES[:20], stages=(0, -1), layers=(0, 1, -1))
    assert sorted(seen.outputs) == [0, 5]
    assert sorted(seen.layers) == [(0, 0), (0, 1), (0, 3), (5, 0), (5, 1), (5, 2)]
    assert seen.layers[0, 3].shape == (20, 32) and seen.layers[5, 0].shape == (640, 24)
    np.testing.assert_allclose(seen.times_s(0), np.arange(20) / 12.5)
    np.testing.assert_allclose(seen.times_s(-1), np.arange(640) / 400)
    np.testing.assert_allclose(seen.times_s("decoder.10"), seen.times_s(5))
    np.testing.assert_array_equal(seen.audio.samples, model.codes2speech.infer(CODES[:20]).samples)


def test_layers_are_what_one_block_hands_to_the_next():
    """The last layer through the output projection is the stage's output; layer 0 is the projected latents."""
    model = snapshot_model("tiny")
    seen = model.capture(CODES[:9], stages=0, layers=(0, -1))
    stage = model.decoder.stages[0]
    torch.testing.assert_close(seen.layers[0, 0], seen.latents @ stage.input_proj.T)
    torch.testing.assert_close(seen.layers[0, 3], seen.layers[0, 3].clone())
    torch.testing.assert_close(seen.outputs[0], seen.layers[0, 3] @ stage.output_proj.T)
    assert not torch.equal(seen.layers[0, 0], seen.layers[0, 3])


def test_a_long_capture_is_joined_across_steps(monkeypatch):
    model = snapshot_model("tiny")
    whole = model.capture(CODES, stages=2, layers=1)
    monkeypatch.setattr("audiollm.codec.capture.STEP_FRAMES", 30)
    monkeypatch.setattr("audiollm.vendor.moss_audio_tokenizer.codec.ROWS_PER_STEP", 50)
    parts = model.capture(CODES, stages=2, layers=1)
    assert relative_rms(parts.layers[2, 1], whole.layers[2, 1]) <= TOLERANCE
    assert relative_rms(parts.outputs[2], whole.outputs[2]) <= TOLERANCE


@pytest.mark.parametrize(
    ("stages", "layers", "words"),
    [
        (6, (), "0-5"),
        (-7, (), "0-5"),
        ("decoder.3", (), "decoder.2"),
        ("encoder.1", (), "no stage"),
        (1.5, (), "pass numbers"),
        ([1.5], (), "1.5"),
        (0, 4, "0-3 in decoder.0"),
        (None, 3, "0-2 in decoder.2"),
        (0, "norm", "'norm'"),
        (True, (), "True"),
    ],
)
def test_a_stage_or_layer_that_is_not_there_says_what_is(stages, layers, words):
    with pytest.raises(ArgumentError, match=words):
        snapshot_model("tiny").capture(CODES[:1], stages=stages, layers=layers)


def test_times_of_a_stage_that_was_not_captured_are_refused():
    with pytest.raises(ArgumentError, match="not captured"):
        snapshot_model("tiny").capture(CODES[:1], stages=0).times_s(3)


def test_a_state_that_never_comes_by_is_an_error(monkeypatch):
    monkeypatch.setattr("audiollm.codec.capture.decode", lambda *args: iter([np.zeros(768, np.float32)]))
    with pytest.raises(codec.CodecError, match="nothing came by"):
        snapshot_model("tiny").capture(CODES[:1], stages=0)


def test_a_capture_leaves_the_model_as_it_was():
    model = gguf_model()
    before = model.codes2speech.infer(gguf_codes("T5")).samples
    seen = model.capture(gguf_codes("T5"), layers=(0, 1))
    seen.layers[0, 0].zero_()
    np.testing.assert_array_equal(model.codes2speech.infer(gguf_codes("T5")).samples, before)
    assert repr(seen) == repr(seen) and "decoder.10" in seen._repr_html_()


def test_usage_counts_entries_and_absent_codes():
    codes = np.zeros((8, 32), dtype=int)
    codes[:4, 1] = 7
    codes[:, 31] = 1024
    usage = codec.codebook_usage(snapshot_model("tiny"), codes)
    assert usage.counts.shape == (32, 1024) and usage.counts[0, 0] == 8
    assert usage.counts[1, 7] == usage.counts[1, 0] == 4
    assert usage.absent[31] == 8 and usage.counts[31].sum() == 0 and usage.absent[:31].sum() == 0
    assert usage.used.tolist() == [1, 2] + [1] * 29 + [0]
    np.testing.assert_allclose(usage.entropy_bits[:2], [0, 1])
    narrow = codec.codebook_usage(snapshot_model("tiny"), codes[:, :3])
    assert narrow.absent[3:].tolist() == [8] * 29


def test_energy_is_what_a_codebook_alone_adds():
    model = snapshot_model("tiny")
    energy = codec.codebook_energy(model, CODES[:6])
    only = np.full((6, 32), 1024)
    only[:, 4] = CODES[:6, 4]
    added = model.capture(only, stages=0).latents - model.decoder.quantizer.output_bias
    np.testing.assert_allclose(energy.energy[:, 4], added.square().mean(dim=1), rtol=1e-4)
    assert energy.share.shape == (32,) and abs(energy.share.sum() - 1) < 1e-9
    assert codec.codebook_energy(model, CODES[:6, :5]).energy[:, 5:].max() == 0


def test_a_deeper_prefix_is_compared_with_all_codebooks():
    model = snapshot_model("tiny")
    difference = codec.prefix_difference(model, CODES[:10], depths=(1, 12, 32))
    full = model.codes2speech.infer(CODES[:10]).samples
    part = model.codes2speech.infer(CODES[:10], num_codebooks=12).samples
    np.testing.assert_allclose(difference.relative_rms[1], relative_rms(part, full), rtol=1e-6)
    assert difference.relative_rms[2] == 0 and difference.frame_rms.shape == (3, 10)
    with pytest.raises(codec.CodesError):
        codec.prefix_difference(model, CODES[:1], depths=(33,))
    with pytest.raises(ArgumentError):
        codec.prefix_difference(model, CODES[:1], depths=())


def test_results_have_a_deterministic_repr():
    model = snapshot_model("tiny")
    for make in (codec.codebook_usage, codec.codebook_energy, codec.prefix_difference):
        assert repr(make(model, CODES[:3])) == repr(make(model, CODES[:3]))
        assert "0x" not in repr(make(model, CODES[:3]))
