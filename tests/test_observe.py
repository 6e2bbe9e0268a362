"""Points, observing and capturing: values equal a manual forward, rows say what they are, and nothing stays behind."""

from __future__ import annotations

import json
import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from looking import mixed_batch, mixed_requests, noise, positions

from audiollm import ArgumentError, Request, SessionBusyError, SnapshotError, edits
from audiollm.rows import Selection, audio_rows, prompt_rows
from audiollm.storage import load_observation


def manual(session, batch, module, of_input):
    """What a module receives or gives in a plain forward, by a torch hook of one's own."""
    found = []

    def take(module, args, kwargs, output):
        value = (args[0] if args else kwargs["hidden_states"]) if of_input else output
        found.append(value[0] if isinstance(value, tuple) else value)

    handle = module.register_forward_hook(take, with_kwargs=True)
    with torch.no_grad():
        out = session.model(**batch.inputs, position_ids=positions(batch), use_cache=False)
    handle.remove()
    return found, out


# Values.


def test_prompt_points_equal_a_manual_forward(session, batch):
    blocks, norm = session._adapter.blocks(), session._adapter.final_norm()
    n = session.n_layers
    places = {"embed": (blocks[0], True), "resid[2]": (blocks[2], True), f"resid[{n}]": (norm, True)}
    places |= {
        "attn_out[1]": (blocks[1].self_attn, False),
        "mlp_out[0]": (blocks[0].mlp, False),
        "final": (norm, False),
    }
    for name, (module, of_input) in places.items():
        seen = session.capture(batch, name)[name]
        (tensor,), _ = manual(session, batch, module, of_input)
        assert torch.equal(seen.values, tensor[seen.rows.sample_index, seen.rows.position]), name
        assert len(seen.rows) == int(batch.inputs["attention_mask"].sum())


def test_logits_of_every_row_and_of_chosen_ones(session, batch):
    _, out = manual(session, batch, session._adapter.head(), False)
    for chosen in ({}, {"tokens": "last"}, {"source": 1, "seconds": (1.0, 2.0)}):
        seen = session.capture(batch, "logits", **chosen)["logits"]
        assert torch.allclose(seen.values, out.logits[seen.rows.sample_index, seen.rows.position], atol=1e-6)
        assert len(seen.rows) in (int(batch.inputs["attention_mask"].sum()), 3, 25, 12, 13)


def test_audio_points_equal_the_embeddings(session, batch):
    audio = session.extract_audio_embeddings(batch)
    seen = session.capture(batch, ["encoder.out", "projected", "encoder.block[0]"])
    for k, source in enumerate(audio):
        assert torch.equal(seen["encoder.out"].source(k).values, source.raw)
        assert torch.equal(seen["projected"].source(k).values, source.projected)
        assert np.array_equal(seen["projected"].source(k).rows.intervals, source.intervals)
        for j, stream in enumerate(source.deepstack_projected):
            assert torch.equal(session.capture(batch, f"deepstack[{j}]")[f"deepstack[{j}]"].source(k).values, stream)
    assert len(seen["encoder.block[0]"].values) == len(seen["projected"].values)


@pytest.mark.parametrize("block", (0, 2))
def test_encoder_blocks_are_the_same_alone_and_in_a_batch(session, batch, block):
    """MOSS runs its encoder once a chunk width, so rows must find their way back; a lone request has one width."""
    name = f"encoder.block[{block}]"
    together = session.capture(batch, name)[name]
    first = 0
    for request in mixed_requests()[:2]:
        alone = session.capture(session.prepare([request]), name)[name]
        for k in range(len(request.audios)):
            assert torch.allclose(together.source(first + k).values, alone.source(k).values, atol=2e-5)
        first += len(request.audios)


def test_music_flamingo_blocks_hold_two_positions_a_token(session_mf):
    """The pool averages them: by hand from the last block to `raw`."""
    batch = mixed_batch(session_mf)
    tower = session_mf.model.model.audio_tower
    seen = session_mf.capture(batch, [f"encoder.block[{len(tower.layers) - 1}]", "encoder.out"])
    pairs = seen[f"encoder.block[{len(tower.layers) - 1}]"].values
    with torch.no_grad():
        assert torch.allclose(tower.layer_norm(pairs.mean(1)), seen["encoder.out"].values, atol=1e-5)


def test_timed_is_what_the_projector_receives(session_mf):
    batch = mixed_batch(session_mf)
    seen = session_mf.capture(batch, ["timed", "projected", "encoder.out"])
    with torch.no_grad():
        projected = session_mf.model.model.multi_modal_projector(seen["timed"].values)
    assert torch.allclose(projected, seen["projected"].values, atol=1e-5)
    assert not torch.allclose(seen["timed"].values, seen["encoder.out"].values, atol=1e-2)


def test_layers_and_points_agree(session, batch):
    n = session.n_layers
    layers = session.extract_contextual_embeddings(batch, tuple(range(n + 1)))
    names = [*(f"resid[{k}]" for k in range(n)), "final"]
    seen = session.capture(batch, names, tokens="audio")
    for point in session.points("*"):
        if point.layer is not None and point.name != "embed":
            for k in range(len(batch.slots)):
                assert torch.equal(seen[point.name].source(k).values, layers[k][point.layer])


def test_raw_module_paths(session, batch):
    path = next(name for name, m in session.model.named_modules() if m is session._adapter.blocks()[1])
    seen = session.capture(batch, [path, "resid[2]"])
    if session.family == "music_flamingo":  # MOSS adds DeepStack after the block
        assert torch.equal(seen[path].values, seen["resid[2]"].values)
    assert len(seen[path].rows) == len(seen["resid[2]"].rows)
    encoder = next(name for name, m in session.model.named_modules() if name.endswith("conv1"))
    assert session.capture(batch, encoder)[encoder].rows is None


# What the next computation receives, whatever was registered first.


@pytest.mark.parametrize("late", (False, True))
@pytest.mark.parametrize("point", ("resid[2]", "attn_out[1]", "projected"))
def test_a_user_s_hook_before_or_after_is_seen(session, batch, point, late):
    place = session._adapter.points()[point]

    def double_out(module, args, output):
        return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output

    def double_in(module, args):
        return (2 * args[0], *args[1:])

    def register():
        if place.side == "in":
            return place.module.register_forward_pre_hook(double_in)
        return place.module.register_forward_hook(double_out)

    plain = session.capture(batch, point)[point].values
    handle = None if late else register()
    with session.observe(point) as seen:
        handle = register() if late else handle
        session.forward(batch)
    handle.remove()
    assert torch.equal(seen[point].values, 2 * plain)


@pytest.mark.parametrize("inside", (False, True))
def test_edits_are_seen(session, batch, inside):
    plain = session.capture(batch, "resid[1]")["resid[1]"].values
    if inside:
        with session.observe("resid[1]") as seen, session.edit({"resid[1]": edits.scale(3)}):
            session.forward(batch)
    else:
        with session.edit({"resid[1]": edits.scale(3)}), session.observe("resid[1]") as seen:
            session.forward(batch)
    assert torch.equal(seen["resid[1]"].values, 3 * plain)


# Around any call.


def test_generation_prompt_and_steps(session):
    requests, batch = mixed_requests(), mixed_batch(session)
    with session.observe(["resid[1]", "logits", "projected"]) as seen:
        answers = session.generations(requests, max_new_tokens=4)
    states = seen["resid[1]"]
    assert torch.allclose(states.prompt.values, session.capture(batch, "resid[1]")["resid[1]"].values, atol=1e-5)
    assert set(states.generated.rows.step) <= {1, 2, 3}
    for b, answer in enumerate(answers):
        mine = states.generated.request(b)
        fed = [t for t in answer.token_ids[:3] if t != session._adapter.end_id]
        assert mine.rows.step.tolist() == list(range(1, len(fed) + 1))
        assert mine.rows.position.tolist() == [batch.width + k for k in range(len(fed))]
    # Each step's state is that of one prefill over prompt and answer.
    from audiollm.analysis.answers import answered

    longer = answered(session, batch, [answer.token_ids for answer in answers])
    whole = session.capture(longer, "resid[1]")["resid[1]"]
    for b, answer in enumerate(answers):
        mine = states.generated.request(b)
        expected = whole.request(b)
        expected = expected.values[-len(answer.token_ids) :][: len(mine.values)]
        assert torch.allclose(mine.values, expected, atol=1e-4)
    # The logits that chose each token, at the last prompt position and at each step.
    chosen = seen["logits"]
    for b, answer in enumerate(answers):
        assert chosen.request(b).values.argmax(-1).tolist() == list(answer.token_ids)[: len(chosen.request(b).values)]


def test_rows_of_a_request_that_has_ended_are_left_out(session, monkeypatch):
    """One request ends with its first token; what it is fed afterwards is padding."""
    requests = mixed_requests()
    first = session.generations(requests, max_new_tokens=1)
    monkeypatch.setattr(type(session._adapter), "end_id", property(lambda self: first[0].token_ids[0]))
    with session.observe("resid[1]", tokens="steps") as seen:
        session.generations(requests, max_new_tokens=3)
    assert 0 not in seen["resid[1]"].rows.sample_index and len(seen["resid[1]"].values)


def test_steps_alone_and_last(session):
    requests = mixed_requests()
    with session.observe("resid[1]", tokens="steps") as steps, session.observe("resid[1]", tokens="last") as last:
        session.generations(requests, max_new_tokens=3)
    assert set(steps["resid[1]"].rows.step) == {1, 2}
    assert last["resid[1]"].rows.step.tolist()[:3] == [0, 0, 0] and len(last["resid[1]"].rows) == 3 + len(
        steps["resid[1]"].rows
    )


def test_choosing_seconds_leaves_generated_tokens_out(session):
    with session.observe("resid[1]", seconds=(0, 1)) as seen:
        session.generate(mixed_requests()[:1], max_new_tokens=3)
    assert (seen["resid[1]"].rows.source == 0).all() and (seen["resid[1]"].rows.step == 0).all()


def test_audio_embeddings_and_several_calls(session, batch):
    with session.observe("projected", source=1) as seen:
        audio = session.extract_audio_embeddings(batch)
        session.forward(session.prepare([Request("x", [noise(9_000, 5), noise(20_000, 6)])]))
    assert len(seen.calls) == 2
    assert torch.equal(seen.calls[0]["projected"].values, audio[1].projected)
    assert len(seen["projected"].values) == len(seen.calls[1]["projected"].values) != len(audio[1].projected)


def test_direct_calls_of_the_model(session, batch):
    with session.observe(["resid[1]", "logits"]) as plain, torch.no_grad():
        session.model(**batch.inputs, position_ids=positions(batch))
    assert torch.equal(plain["resid[1]"].values, session.capture(batch, "resid[1]")["resid[1]"].values)
    assert np.isnan(plain["resid[1]"].rows.start_s).all()
    with session.observe("projected", source=1, batch=batch) as known, torch.no_grad():
        session.model(**batch.inputs)
    assert torch.equal(known["projected"].values, session.capture(batch, "projected", source=1)["projected"].values)
    with pytest.raises(ArgumentError, match="pass batch="), session.observe("resid[1]", source=0), torch.no_grad():
        session.model(**batch.inputs)
    other = session.prepare(mixed_requests()[:1])
    with (
        pytest.raises(ArgumentError, match="pass the batch whose inputs are run"),
        session.observe("resid[1]", source=0, batch=other),
        torch.no_grad(),
    ):
        session.model(**batch.inputs)


def test_a_model_called_inside_a_hook_is_not_seen(session, batch):
    """A user's hook that runs the model again, or its head, is another pass."""
    inner = session.prepare([Request("other words")])

    def nosy(module, args):
        handle.remove()
        with torch.no_grad():
            session.model(**inner.inputs)
            session._adapter.head()(torch.zeros(3, batch.width, session._adapter.model_shape().width))

    handle = session._adapter.blocks()[1].register_forward_pre_hook(nosy)
    with session.observe(["resid[0]", "logits"]) as seen:
        session.forward(batch)
    assert len(seen.calls) == 1 and len(seen["logits"].values) == 3
    assert len(seen["resid[0]"].values) == int(batch.inputs["attention_mask"].sum())


def test_capture_stops_after_the_deepest_point(session, batch):
    ran = []
    handles = [
        block.register_forward_hook(lambda *_, k=k: ran.append(k)) for k, block in enumerate(session._adapter.blocks())
    ]
    session.capture(batch, ["resid[1]", "projected"])
    for handle in handles:
        handle.remove()
    assert max(ran) == 1


def test_grad_reaches_what_was_captured(session):
    batch = session.prepare(mixed_requests()[:1])
    seen = session.capture(batch, "resid[2]", device=None, grad=True)
    (gradient,) = torch.autograd.grad(
        seen["resid[2]"].values.sum(), next(iter(session._adapter.blocks()[0].parameters()))
    )
    assert gradient.abs().sum() > 0
    assert not session.capture(batch, "resid[2]")["resid[2]"].values.requires_grad


def test_dtype_device_and_only_the_chosen_rows(session, batch):
    seen = session.capture(batch, "resid[1]", source=2, dtype=torch.bfloat16)["resid[1]"]
    assert seen.values.dtype == torch.bfloat16 and len(seen.values) == len(batch.slots[2].token_positions)
    assert seen.values.untyped_storage().nbytes() == seen.values.numel() * 2


# Refusals.


def test_an_unknown_name_comes_with_the_closest_three(session):
    with pytest.raises(ArgumentError, match=r"closest are resid\[\d\], resid\[\d\], resid\[\d\]"):
        session.observe("resid[77]")
    with pytest.raises(ArgumentError, match="projected"):
        session.observe("project")
    for wrong in ([], 3, [3], ""):
        with pytest.raises(ArgumentError):
            session.observe(wrong)


def test_patterns_and_negative_numbers(session):
    n = session.n_layers
    assert [p.name for p in session.points("resid*")] == [f"resid[{k}]" for k in range(n + 1)]
    assert [p.name for p in session.observe(["resid[-1]", "mlp_out[-1]"]).points] == [
        f"resid[{n}]",
        f"mlp_out[{n - 1}]",
    ]
    assert all(p.shape for p in session.points()) and "[R, " in repr(session.points("embed")[0])
    assert [p.layer for p in session.points() if p.layer is not None] == [0, *range(n + 1)]


def test_a_point_that_never_fired_is_told(session):
    text = [Request("no audio at all")]
    with pytest.raises(ArgumentError, match="projected never fired"), session.observe(["projected", "resid[0]"]):
        session.generate(text, max_new_tokens=1)
    with session.observe("projected", must_fire=False) as seen:
        session.generate(text, max_new_tokens=1)
    assert "projected" not in seen
    with pytest.raises(KeyError, match="was not seen"):
        seen["projected"]
    with pytest.raises(ZeroDivisionError), session.observe("projected"):  # the error of the block comes first
        _ = 1 / 0


def test_too_many_bytes_are_refused_before_the_model_runs(session, batch, monkeypatch):
    monkeypatch.setattr(session._adapter.decoder(), "forward", lambda *a, **k: pytest.fail("the model ran"))
    wanted = session.observe("resid*").nbytes(batch)
    for call in (
        lambda: session.capture(batch, "resid*", limit_bytes=wanted - 1),
        lambda: _observed(session, batch, limit_bytes=wanted - 1),
    ):
        with pytest.raises(ArgumentError, match="limit") as caught:
            call()
        assert caught.value.code == "too_large"
    monkeypatch.undo()
    assert session.capture(batch, "resid*", limit_bytes=wanted).nbytes == wanted


def _observed(session, batch, **how):
    with session.observe("resid*", **how) as seen:
        session.forward(batch)
    return seen


@pytest.mark.parametrize(
    "wrong",
    (
        {"tokens": "words"},
        {"tokens": []},
        {"tokens": [1.5]},
        {"seconds": (2, 1)},
        {"seconds": 3},
        {"seconds": (-1, 1)},
        {"seconds": (float("nan"), 1)},
        {"source": "first"},
        {"source": True},
    ),
)
def test_wrong_selections_are_refused_at_once(session, wrong):
    with pytest.raises(ArgumentError):
        session.observe("resid[0]", **wrong)


@pytest.mark.parametrize("wrong", ({"source": 3}, {"seconds": (2000, 3000)}, {"tokens": [100_000]}))
def test_selections_that_fit_nothing_are_refused_before_the_model_runs(session, batch, wrong):
    with pytest.raises(ArgumentError):
        session.capture(batch, "resid[0]", **wrong)


# Rows.


@given(start=st.floats(0, 4), length=st.floats(0.05, 4), source=st.integers(0, 2))
def test_rows_in_seconds_are_the_tokens_whose_centre_is_there(session_moss, start, length, source):
    batch = mixed_batch(session_moss)
    rows = prompt_rows(batch)
    try:
        mask = Selection.of(seconds=(start, start + length), source=source).mask(rows, batch)
    except ArgumentError:
        return
    timeline = batch.timeline[source]
    wanted = [
        timeline.token_to_position(k)
        for k in range(timeline.n_tokens)
        if start <= sum(timeline.token_to_time(k)) / 2 < start + length
    ]
    assert rows.position[mask].tolist() == wanted


def test_rows_know_the_prompt(session, batch):
    rows = prompt_rows(batch)
    tokens = [row for row in batch.tokens if row.role != "padding"]
    assert [(r.sample_index, r.position) for r in tokens] == list(zip(rows.sample_index, rows.position, strict=True))
    assert [r.role == "audio" for r in tokens] == (rows.source >= 0).tolist()
    audio = audio_rows(batch)
    assert audio.position.tolist() == np.concatenate([t.positions for t in batch.timeline]).tolist()


# Interrupts and nesting.


@pytest.mark.parametrize("error", (RuntimeError, KeyboardInterrupt))
def test_nothing_stays_after_an_error_in_the_middle(session, batch, error):
    def fail(*_):
        raise error("stop")

    handle = session._adapter.blocks()[2].register_forward_pre_hook(fail)
    for run in (
        lambda: session.capture(batch, ["resid*", "projected", "mlp_out*"]),
        lambda: _observed(session, batch),
        lambda: _edited(session, batch),
    ):
        with pytest.raises(error):
            run()
    handle.remove()
    clean = session.capture(batch, "resid[3]")["resid[3]"].values
    assert torch.equal(clean, session.capture(batch, "resid[3]")["resid[3]"].values)


def _edited(session, batch):
    with session.edit({"resid[1]": edits.zero(), "mlp_out[0]": edits.mean()}):
        session.forward(batch)


def test_blocks_may_end_in_another_order(session, batch):
    first, second = session.observe("resid[1]"), session.observe("resid[1]")
    first.__enter__()
    second.__enter__()
    session.forward(batch)
    first.__exit__(None, None, None)
    session.forward(batch)
    second.__exit__(None, None, None)
    assert (len(first.calls), len(second.calls)) == (1, 2)


def test_a_capture_inside_a_call_is_refused(session, batch):
    def nosy(module, args):
        session.capture(batch, "resid[0]")

    handle = session._adapter.blocks()[1].register_forward_pre_hook(nosy)
    with pytest.raises(SessionBusyError):
        session.forward(batch)
    handle.remove()


# On disk.


def test_save_and_load(session, batch, tmp_path):
    seen = session.capture(batch, ["resid[1]", "projected"], source=1)
    path = seen.save(tmp_path / "seen.safetensors")
    back = load_observation(path, session)
    for name in seen:
        assert torch.equal(back[name].values, seen[name].values)
        assert np.array_equal(back[name].rows.intervals, seen[name].rows.intervals)
        assert np.array_equal(back[name].rows.position, seen[name].rows.position)
    said = json.loads((tmp_path / "seen.json").read_text())
    assert said["model"]["identity"] == session.identity and said["requests"][0]["prompt"] == "hello there"
    assert [t["used_s"] for t in said["timeline"]] == [t.used_s for t in batch.timeline]
    assert set(said["versions"]) == {"audiollm", "torch", "transformers"}
    (tmp_path / "seen.json").write_text(json.dumps(said | {"versions": {**said["versions"], "torch": "1.0"}}))
    with pytest.warns(UserWarning, match=r"made with torch 1\.0"):
        load_observation(path)


def test_what_was_changed_or_comes_from_another_model_is_refused(session_mf, session_moss, tmp_path):
    batch = mixed_batch(session_mf)
    path = session_mf.capture(batch, "resid[1]").save(tmp_path / "seen.safetensors")
    with pytest.raises(SnapshotError, match="another model"):
        load_observation(path, session_moss)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArgumentError, match="not the file"):
        load_observation(path)
    (tmp_path / "seen.json").write_text("[")
    with pytest.raises(ArgumentError, match="cannot be read"):
        load_observation(path)
    with pytest.raises(ArgumentError, match="cannot be read"):
        load_observation(tmp_path / "none.safetensors")


def test_saving_what_is_not_known_is_refused(session, batch, tmp_path):
    with session.observe("resid[1]") as seen, torch.no_grad():
        session.model(**batch.inputs)
    with pytest.raises(ArgumentError, match="nothing to save"):
        seen.save(tmp_path / "seen.safetensors")
    with pytest.raises(ArgumentError, match="must end in"):
        session.capture(batch, "resid[1]").save(tmp_path / "seen.npz")


# A plot of it.


def test_an_activation_is_drawn_over_its_seconds(session, batch):
    from audiollm.plots import activation

    seen = session.capture(batch, ["resid[1]", "encoder.block[0]"])
    for name in seen:
        figure = activation(seen[name].source(1))
        norm, states, _ = figure.axes
        assert states.get_xlabel() == "seconds of the source"
        assert states.get_xlim()[1] == pytest.approx(batch.timeline[1].token_intervals()[-1, 1])
        values = seen[name].source(1).values.flatten(1)
        assert np.allclose(norm.patches[0].get_data().values, values.norm(dim=1), rtol=1e-5)
        assert states.get_yticklabels()[0].get_text() == str(int(values.var(0).argmax()))
    with pytest.raises(ArgumentError, match="several sources"):
        activation(seen["resid[1]"])


# What a breaker and a reviewer found.


@pytest.mark.parametrize("direct", (False, True))
def test_a_call_nested_in_a_hook_does_not_take_the_outer_one_s_place(session, batch, direct):
    inner = session.prepare([Request("other words")])

    def nosy(module, args):
        handle.remove()
        with torch.no_grad():
            session.model(**inner.inputs)

    handle = session._adapter.blocks()[1].register_forward_pre_hook(nosy)
    with session.observe(["resid[0]", "resid[2]"]) as seen, torch.no_grad():
        if direct:
            session.model(**batch.inputs, position_ids=positions(batch))
        else:
            session.forward(batch)
    assert len(seen.calls) == 1
    for name in seen:
        assert torch.equal(seen[name].values, session.capture(batch, name)[name].values)


def test_a_direct_call_after_an_interrupted_one_is_seen_whole(session, batch):
    def fail(*_):
        raise KeyboardInterrupt

    with session.observe("resid[1]") as seen, torch.no_grad():
        handle = session._adapter.blocks()[2].register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            session.model(**batch.inputs, position_ids=positions(batch))
        handle.remove()
        session.model(**batch.inputs, position_ids=positions(batch))
    assert len(seen.calls) == 2
    assert torch.equal(seen["resid[1]"].values, session.capture(batch, "resid[1]")["resid[1]"].values)


def test_a_generated_padding_token_does_not_end_a_request(session):
    """The library ends on the end token alone, so a padding token that the model chooses is one like others."""
    adapter, calls = session._adapter, []
    assert adapter.pad_id != adapter.end_id

    def force(module, args, output):
        calls.append(None)
        output = output.clone()
        output[:, -1, adapter.end_id] = -1e4  # nobody ends
        if len(calls) == 2:
            output[0, -1, adapter.pad_id] = 1e4
        return output

    handle = adapter.head().register_forward_hook(force)
    with session.observe("resid[1]", tokens="steps") as seen:
        (answer, *_) = session.generations(mixed_requests(), max_new_tokens=5)
    handle.remove()
    assert answer.token_ids[1] == adapter.pad_id
    assert seen["resid[1]"].request(0).rows.step.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("where", ({"tokens": "text", "source": 0}, {"tokens": "text", "seconds": (0, 1)}))
def test_a_selection_that_contradicts_itself_is_refused(session, batch, where):
    for run in (
        lambda: session.capture(batch, "resid[1]", **where),
        lambda: _edit_of(session, batch, "resid[1]", **where),
        lambda: _edit_of(session, batch, "projected", tokens="last"),
    ):
        with pytest.raises(ArgumentError, match="choose no row of"):
            run()
    with pytest.raises(ArgumentError, match="observe a generation instead"):
        session.capture(batch, "resid[1]", tokens="steps")


def _edit_of(session, batch, point, **where):
    with session.edit({point: edits.zero()}, **where):
        session.forward(batch)


def test_another_batch_of_the_same_shape_is_refused(session):
    one = session.prepare([Request("aaa", [noise(9_000)]), Request("bbbb bbb", [noise(9_000, 1)])])
    other = session.prepare(one.requests[::-1])
    assert one.inputs["input_ids"].shape == other.inputs["input_ids"].shape
    with pytest.raises(ArgumentError, match="not those of batch="), session.observe("resid[1]", batch=one):
        session.model(**other.inputs)


def test_the_encoder_by_itself_is_seen_and_edited(session, batch):
    def encode():
        names = {"music_flamingo": ("input_features", "input_features_mask", "input_ids")}
        names["moss_music"] = ("audio_data", "audio_data_seqlens", "audio_group_sizes")
        with torch.no_grad():
            found = session.model.get_audio_features(*(batch.inputs[name] for name in names[session.family]))
        return found.pooler_output if session.family == "music_flamingo" else torch.cat([s.projected for s in found])

    plain = encode()
    with session.observe("projected", batch=batch) as seen:
        encode()
        encode()
    assert len(seen.calls) == 2 and torch.equal(seen["projected"].values, plain)
    with session.edit({"projected": edits.zero()}, batch=batch), torch.no_grad():
        session.model(**batch.inputs)
        assert not encode()[: len(plain)].any()
    with pytest.raises(ArgumentError, match="pass batch="), session.observe("projected"):
        encode()


def test_a_block_opened_meanwhile_in_another_thread_leaves_a_call_alone(session, batch):
    inside, opened = threading.Event(), threading.Event()

    def wait(*_):
        inside.set()
        assert opened.wait(20)

    handle = session._adapter.points()["projected"].module.register_forward_pre_hook(wait)
    found: list = []
    worker = threading.Thread(target=lambda: found.append(session.forward(batch).logits))
    worker.start()
    assert inside.wait(20)
    with session.observe(["resid[1]", "projected"], source=0, must_fire=False) as seen:
        opened.set()
        worker.join(30)
        handle.remove()
        assert len(found) == 1 and not seen.calls
        session.extract_contextual_embeddings(batch)
    assert len(seen.calls) == 1 and "resid[1]" in seen


def test_logits_are_counted_as_the_call_keeps_them(session, batch):
    size = session._adapter.points()["logits"].width[0] * 4
    with session.observe("logits", limit_bytes=3 * size) as seen:
        session.forward(batch)
        with pytest.raises(ArgumentError, match="limit"):  # what an earlier call of the block kept is counted
            session.forward(batch)
    assert seen.result().nbytes == 3 * size
    with pytest.raises(ArgumentError, match="limit"):
        session.capture(batch, "logits", limit_bytes=3 * size)


def test_an_observation_does_not_hold_the_model(session, batch):
    assert session not in session.capture(batch, "resid[1]").context.values()
    back = pickle.loads(pickle.dumps(session.capture(batch, "resid[1]")))
    assert len(back["resid[1]"].values)


def test_a_block_is_entered_once(session):
    with session.observe("resid[1]", must_fire=False) as seen, pytest.raises(ArgumentError, match="open already"):
        seen.__enter__()


def test_a_dtype_that_is_none_is_refused(session):
    with pytest.raises(ArgumentError, match=r"torch\.dtype"):
        session.observe("resid[1]", dtype="float16")
    with pytest.raises(ArgumentError, match="start_s, end_s"):
        session.observe("resid[1]", seconds="12")


def test_models_without_a_folder_cannot_be_told_apart(session, batch, tmp_path, monkeypatch):
    from audiollm import Session

    nameless = Session(session.model, session.processor, session._adapter)
    path = nameless.capture(batch, "resid[1]").save(tmp_path / "seen.safetensors")
    with pytest.raises(SnapshotError, match="cannot be compared"):
        load_observation(path, nameless)
    assert len(load_observation(path)["resid[1]"].values)


def test_storage_refuses_in_its_own_words(session, batch, tmp_path):
    seen = session.capture(batch, "resid[1]")
    with pytest.raises(ArgumentError, match="no folder"):
        seen.save(tmp_path / "none" / "seen.safetensors")
    path = seen.save(tmp_path / "seen.safetensors")
    again = load_observation(load_observation(path).save(tmp_path / "again.safetensors"), session)
    assert torch.equal(again["resid[1]"].values, seen["resid[1]"].values)
    said = json.loads((tmp_path / "seen.json").read_text())
    for damage in ({"points": ["nowhere"]}, {"versions": 3}, {"model": None}):
        (tmp_path / "seen.json").write_text(json.dumps({**said, **damage}))
        with pytest.raises(ArgumentError, match="cannot be read"):
            load_observation(path, session)
