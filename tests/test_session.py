"""A Session's promises: a batch equals its single requests, order changes nothing, what is read is what is computed."""

from __future__ import annotations

import gc
import itertools

import numpy as np
import pytest
import torch

from audiollm import ArgumentError, Request, Waveform, load_model
from audiollm.hooks import Reading, read_layers


def noise(n_samples: int, seed: int) -> Waveform:
    return Waveform(np.random.default_rng(seed).normal(0, 0.1, n_samples).astype(np.float32), 16_000)


REQUESTS = (
    Request("Name the key.", [noise(24_000, 0)]),
    Request("Text alone, and rather long so that the others are padded on the left."),
    Request("A <audio> B <audio>", [noise(480_320, 1), noise(9_000, 2)]),
    Request("", [noise(480_001, 3)]),
    Request("Five.", [noise(700 + 900 * k, 4 + k) for k in range(5)]),
)
TEXT = Request("Say something.")
LAYERS = (0, 2, -1)


@pytest.fixture(scope="module", params=("mf", "moss"))
def family(request):
    return request.param


@pytest.fixture(scope="module")
def tiny(family, tiny_mf, tiny_moss):
    return {"mf": tiny_mf, "moss": tiny_moss}[family]


@pytest.fixture(scope="module")
def session(family, session_mf, session_moss):
    return {"mf": session_mf, "moss": session_moss}[family]


def mel_name(batch) -> str:
    return next(name for name in ("input_features", "audio_data") if name in batch.inputs)


@pytest.fixture(scope="module")
def together(session):
    return session.prepare(REQUESTS)


@pytest.fixture(scope="module")
def few(session):
    """A small batch, for what does not depend on its size."""
    return session.prepare([*REQUESTS[:2], Request("<audio><audio>", [noise(9_000, 2), noise(2_000, 3)])])


@pytest.fixture(scope="module")
def singles(session):
    return [session.prepare([request]) for request in REQUESTS]


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 2e-5) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= tolerance)


# A request's result does not depend on its neighbours.


def test_prepare_in_a_batch_equals_alone(together, singles):
    for b, alone in enumerate(singles):
        left = together.width - alone.width
        row = together.inputs["input_ids"][b]
        assert torch.equal(row[left:], alone.inputs["input_ids"][0])
        assert not together.inputs["attention_mask"][b, :left].any()
    name = mel_name(together)
    mels = [row for alone in singles if name in alone.inputs for row in alone.inputs[name]]
    for mine, want in zip(together.inputs[name], mels, strict=True):
        assert torch.equal(mine[:, : want.shape[1]], want)


def test_slots_and_timeline_in_a_batch_equal_alone(together, singles):
    slots = iter(zip(together.slots, together.timeline, strict=True))
    for b, alone in enumerate(singles):
        for slot, timeline in zip(alone.slots, alone.timeline, strict=True):
            mine, clock = next(slots)
            assert (mine.sample_index, mine.audio_index) == (b, slot.audio_index)
            assert torch.equal(mine.token_positions - (together.width - alone.width), slot.token_positions)
            assert torch.equal(mine.waveform, slot.waveform)
            assert np.array_equal(clock.token_intervals(), timeline.token_intervals())
    assert next(slots, None) is None


def test_audio_embeddings_in_a_batch_equal_alone(session, together, singles):
    found = session.extract_audio_embeddings(together)
    alone = itertools.chain.from_iterable(session.extract_audio_embeddings(batch) for batch in singles)
    for mine, want in zip(found, alone, strict=True):
        assert close(mine.raw, want.raw) and close(mine.projected, want.projected)
        assert all(map(close, mine.deepstack_raw, want.deepstack_raw))
        assert all(map(close, mine.deepstack_projected, want.deepstack_projected))


def test_contextual_embeddings_in_a_batch_equal_alone(session, together, singles):
    found = session.extract_contextual_embeddings(together, LAYERS)
    alone = itertools.chain.from_iterable(session.extract_contextual_embeddings(batch, LAYERS) for batch in singles)
    for mine, want in zip(found, alone, strict=True):
        assert all(close(mine[k], want[k], 5e-5) for k in LAYERS)


def test_logits_in_a_batch_equal_alone(session, together, singles):
    found = session.forward(together).logits
    for b, batch in enumerate(singles):
        assert close(found[b], session.forward(batch).logits[0], 5e-5)


def test_direct_logits_in_a_batch_equal_alone(session, together, singles):
    with torch.no_grad():
        found = session.model(**together.inputs).logits
        for b, batch in enumerate(singles):
            assert close(found[b, -batch.width :], session.model(**batch.inputs).logits[0], 1e-4)


def test_positions_count_from_each_row_s_first_token(session, few):
    """Left padding must not turn the rotary angles of a row: in bfloat16 that alone would change its values."""
    seen = []
    block = session._adapter.blocks()[0]
    handle = block.register_forward_pre_hook(lambda m, a, kw: seen.append(kw["position_ids"]), with_kwargs=True)
    session.forward(few)
    session.extract_contextual_embeddings(few, (1,))
    handle.remove()
    for positions in seen:
        for row, mask in zip(positions, few.inputs["attention_mask"].bool(), strict=True):
            assert row[mask].tolist() == list(range(int(mask.sum())))


def test_greedy_text_in_a_batch_equals_alone(session):
    requests = REQUESTS[:4]
    found = session.generate(requests, max_new_tokens=8)
    assert found == [session.generate([request], max_new_tokens=8)[0] for request in requests]


def test_order_of_requests_changes_nothing_but_order(session, together):
    order = (3, 0, 4, 2, 1)
    batch = session.prepare([REQUESTS[b] for b in order])
    logits, mixed = session.forward(together).logits, session.forward(batch).logits
    assert all(close(mixed[i], logits[b], 5e-5) for i, b in enumerate(order))


# Values do not depend on what was called before, or hooked before.


def test_order_of_calls_changes_nothing(tiny, session, few):
    fresh = load_model(tiny, "cpu", torch.float32)
    want = fresh.extract_contextual_embeddings(few, LAYERS)
    fresh.model(**few.inputs, output_hidden_states=True)
    fresh.generate(REQUESTS[:2], max_new_tokens=2)
    fresh.forward(few, output_hidden_states=True)
    again = fresh.extract_contextual_embeddings(few, LAYERS)
    for a, b in zip(want, again, strict=True):
        assert all(torch.equal(a[k], b[k]) for k in LAYERS)


def doubled(module, args, output):
    return 2 * output


@pytest.mark.parametrize("recorded_before", (False, True))
def test_an_edit_shows_in_what_is_read_whenever_it_was_registered(tiny, few, recorded_before):
    model = load_model(tiny, "cpu", torch.float32)
    plain = model.extract_contextual_embeddings(few, (2, 3))
    if recorded_before:  # installs the library's own recorder hooks for good
        model.model(**few.inputs, output_hidden_states=True)
    handle = model._adapter.blocks()[1].register_forward_hook(doubled)
    edited = model.extract_contextual_embeddings(few, (2, 3))
    states = model.forward(few, output_hidden_states=True).hidden_states
    handle.remove()
    for slot, was, now in zip(few.slots, plain, edited, strict=True):
        assert close(now[2], 2 * was[2], 1e-4)
        assert not close(now[3], was[3], 1e-3)
        assert torch.equal(states[2][slot.sample_index, slot.token_positions], now[2])


def test_what_is_read_is_what_the_next_block_receives(session, few):
    """An edit at a block's own door, where no output of the block before shows it."""
    plain = session.extract_contextual_embeddings(few, (2,))
    handle = session._adapter.blocks()[2].register_forward_pre_hook(lambda module, args: (args[0] + 1, *args[1:]))
    edited = session.extract_contextual_embeddings(few, (2,))
    states = session.forward(few, output_hidden_states=True).hidden_states[2]
    handle.remove()
    for slot, was, now in zip(few.slots, plain, edited, strict=True):
        assert close(now[2], was[2] + 1)
        assert torch.equal(states[slot.sample_index, slot.token_positions], now[2])


def test_an_edit_of_what_the_head_receives_shows_in_the_last_layer(session, few):
    handle = session.model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    plain_last = session.extract_contextual_embeddings(few, (-1,))
    last = session.forward(few, output_hidden_states=True).hidden_states[-1]
    handle.remove()
    slot = few.slots[0]
    assert torch.equal(last[slot.sample_index, slot.token_positions], plain_last[0][-1])
    assert close(plain_last[0][-1] - 1, session.extract_contextual_embeddings(few, (-1,))[0][-1], 1e-5)


def hooks_of(model: torch.nn.Module) -> list:
    return [
        (name, kind, len(getattr(module, kind)))
        for name, module in model.named_modules()
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
        if len(getattr(module, kind))
    ]


def test_every_call_leaves_no_hook(session, few):
    before = hooks_of(session.model)
    session.extract_audio_embeddings(few)
    session.extract_contextual_embeddings(few, LAYERS)
    session.forward(few, output_hidden_states=True)
    session.generate(REQUESTS[:1], max_new_tokens=2)
    assert hooks_of(session.model) == before


@pytest.mark.parametrize("error", (RuntimeError, KeyboardInterrupt))
@pytest.mark.parametrize("call", ("extract_contextual_embeddings", "forward"))
def test_an_exception_inside_leaves_no_hook(session, few, error, call):
    def fail(module, args):
        raise error("inside")

    before = hooks_of(session.model)
    handle = session._adapter.blocks()[1].register_forward_pre_hook(fail)
    with pytest.raises(error):
        arguments = {"layers": LAYERS} if call.startswith("extract") else {"output_hidden_states": True}
        getattr(session, call)(few, **arguments)
    handle.remove()
    assert hooks_of(session.model) == before


def test_reading_removes_hooks_when_a_layer_does_not_exist(session):
    before = hooks_of(session.model)
    adapter = session._adapter
    reading = Reading(adapter.blocks(), adapter.decoder(), adapter.head(), [0, 99], lambda *a: None)
    with pytest.raises(IndexError):
        read_layers(lambda: None, reading)
    assert hooks_of(session.model) == before


def test_hooks_are_gone_though_their_removal_is_interrupted(session, few, monkeypatch):
    before, wanted = hooks_of(session.model), session.forward(few).logits
    detach, calls = Reading.detach, []

    def interrupted(self):
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        detach(self)

    monkeypatch.setattr(Reading, "detach", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.extract_contextual_embeddings(few, (0, 2))
    monkeypatch.undo()
    assert hooks_of(session.model) == before
    assert torch.equal(session.forward(few).logits, wanted)  # and the session is free


def test_a_lens_in_a_hook_does_not_disturb_what_is_read(session, few):
    """A user's hook may call the head, the decoder's end or the whole model; none of it is the state asked for."""
    layers = (0, 3, -1)
    wanted = session.extract_contextual_embeddings(few, layers)
    states = session.forward(few, output_hidden_states=True).hidden_states
    other, busy, lens = session.prepare([TEXT]), [], []

    def look(module, args, output):
        lens.append(session.model.lm_head(output[0] if isinstance(output, tuple) else output).shape)
        if not busy:
            busy.append(1)
            session.model(**other.inputs)

    handle = session._adapter.blocks()[1].register_forward_hook(look)
    found = session.extract_contextual_embeddings(few, layers)
    busy.clear()
    again = session.forward(few, output_hidden_states=True)
    handle.remove()
    for a, b in zip(found, wanted, strict=True):
        assert all(torch.equal(a[k], b[k]) for k in layers)
    assert all(torch.equal(a, b) for a, b in zip(again.hidden_states, states, strict=True))
    assert {shape[:2] for shape in lens} == {few.inputs["input_ids"].shape, other.inputs["input_ids"].shape}


def test_a_direct_call_in_another_thread_is_left_alone(session, few):
    import threading

    other = session.prepare([TEXT])
    with torch.no_grad():
        wanted = session.model(**other.inputs).logits
    found, started = [], threading.Event()

    def elsewhere(module, args):
        if threading.current_thread() is threading.main_thread() and not started.is_set():
            started.set()
            thread = threading.Thread(target=direct)
            thread.start()
            thread.join()

    def direct():
        with torch.no_grad():
            found.append(session.model(**other.inputs).logits)

    handle = session._adapter.blocks()[0].register_forward_pre_hook(elsewhere)
    session.extract_contextual_embeddings(few, (0, -1))
    handle.remove()
    assert torch.equal(found[0], wanted)


def test_random_state_is_untouched(session, few):
    before = torch.get_rng_state()
    session.extract_contextual_embeddings(few, LAYERS)
    session.generate(REQUESTS[:1], max_new_tokens=2)
    assert torch.equal(before, torch.get_rng_state())


# What is run and what is kept.


def test_blocks_above_the_deepest_layer_and_the_head_do_not_run(session, few):
    ran = []
    blocks = session._adapter.blocks()
    handles = [
        m.register_forward_hook(lambda *_, k=k: ran.append(k)) for k, m in enumerate([*blocks, session.model.lm_head])
    ]
    session.extract_contextual_embeddings(few, (0, 2))
    upto = list(ran)
    session.extract_contextual_embeddings(few, (-1,))
    for handle in handles:
        handle.remove()
    assert upto == [0, 1]
    assert ran[2:] == list(range(session.n_layers))


def test_audio_embeddings_do_not_run_the_language_model(session, few):
    ran = []
    handle = session._adapter.blocks()[0].register_forward_pre_hook(lambda *_: ran.append(1))
    session.extract_audio_embeddings(few)
    handle.remove()
    assert not ran


def test_only_the_asked_rows_are_kept(session, few):
    found = session.extract_contextual_embeddings(few, LAYERS)
    stored = sum(t.untyped_storage().nbytes() for states in found for t in states.values())
    assert stored == few.nbytes(LAYERS) == sum(t.nbytes for states in found for t in states.values())


def test_layers_asked_by_two_names_come_under_both(session, singles):
    n = session.n_layers
    states = session.extract_contextual_embeddings(singles[0], (-1, n, -n - 1, 0))[0]
    assert tuple(states) == (-1, n, -n - 1, 0)
    assert torch.equal(states[-1], states[n]) and torch.equal(states[-n - 1], states[0])


@pytest.mark.parametrize("layer", (6, -7, 1.0, True, "1", None))
def test_a_layer_out_of_range_names_the_range(session, few, layer):
    named = rf"0\.\.{session.n_layers} "
    with pytest.raises(ArgumentError, match=named):
        session.extract_contextual_embeddings(few, (0, layer))
    with pytest.raises(ArgumentError, match=named):
        few.nbytes((layer,))


@pytest.mark.parametrize("layers", (1, "12", None))
def test_layers_must_be_a_sequence(session, few, layers):
    with pytest.raises(ArgumentError, match="sequence"):
        session.extract_contextual_embeddings(few, layers)


def test_text_alone_has_no_embeddings(session):
    batch = session.prepare([REQUESTS[1]])
    assert session.extract_audio_embeddings(batch) == []
    assert session.extract_contextual_embeddings(batch) == []
    assert session.forward(batch).logits.shape == (1, 1, session.model.config.get_text_config().vocab_size)


def test_forward_gives_one_row_of_logits_and_every_layer(session, few):
    out = session.forward(few, output_hidden_states=True)
    text = session.model.config.get_text_config()
    assert out.logits.shape == (3, 1, text.vocab_size)
    shape = (3, few.width, text.hidden_size)
    assert [tuple(h.shape) for h in out.hidden_states] == [shape] * (session.n_layers + 1)
    assert session.forward(few).hidden_states is None
    assert torch.equal(session.forward(few).logits, out.logits)


# Gradients.


def test_without_grad_results_can_still_be_trained_on(session, singles):
    embedding = session.extract_audio_embeddings(singles[0])[0].projected
    states = session.extract_contextual_embeddings(singles[0], (2,))[0][2]
    for x in (embedding, states):
        assert not x.requires_grad
        torch.nn.Linear(x.shape[1], 1)(x).sum().backward()  # inference tensors would refuse


@pytest.mark.parametrize("what", ("audio", "contextual", "forward"))
def test_grad_keeps_the_graph_from_mel_on(session, what):
    batch = session.prepare([REQUESTS[0]])
    mel = batch.inputs[mel_name(batch)].requires_grad_(True)
    result = {
        "audio": lambda: session.extract_audio_embeddings(batch, grad=True)[0].projected,
        "contextual": lambda: session.extract_contextual_embeddings(batch, (2,), grad=True)[0][2],
        "forward": lambda: session.forward(batch, output_hidden_states=True, grad=True).logits,
    }[what]()
    result.sum().backward()
    assert float(mel.grad[:, :, :150].abs().min()) > 0
    session.model.zero_grad(set_to_none=True)


def test_grad_is_kept_also_where_gradients_are_switched_off(session):
    batch = session.prepare([REQUESTS[0]])
    with torch.no_grad():
        assert session.extract_contextual_embeddings(batch, (2,), grad=True)[0][2].requires_grad
        assert not torch.is_grad_enabled()


# Shapes, dtypes, the rest.


def test_bfloat16_runs_everything(tiny, family):
    session = load_model(tiny, "cpu", torch.bfloat16)
    batch = session.prepare(REQUESTS[:2])
    assert batch.inputs[mel_name(batch)].dtype == {"mf": torch.bfloat16, "moss": torch.float32}[family]
    embedding = session.extract_audio_embeddings(batch)[0]
    assert embedding.projected.dtype == torch.bfloat16
    states = session.extract_contextual_embeddings(batch, LAYERS)
    assert states[0][2].dtype == torch.bfloat16
    assert session.forward(batch, output_hidden_states=True).logits.dtype == torch.bfloat16
    assert len(session.generate(REQUESTS[:2], max_new_tokens=2)) == 2


def test_intervals_travel_with_the_embedding(session, together):
    for embedding, timeline in zip(session.extract_audio_embeddings(together), together.timeline, strict=True):
        assert embedding.intervals.shape == (len(embedding.raw), 2)
        assert np.array_equal(embedding.intervals, timeline.token_intervals())
        deep = {"music_flamingo": 0, "moss_music": 3}[session.family]
        assert len(embedding.deepstack_raw) == len(embedding.deepstack_projected) == deep


def test_the_slot_plays_what_the_model_heard(together):
    slot = together.slots[0]
    assert slot.waveform.dtype == torch.float32 and slot.waveform.device.type == "cpu"
    assert np.array_equal(slot.waveform.numpy(), REQUESTS[0].audios[0].samples)
    assert slot.path is None and slot.duration_s == slot.used_s == 1.5


def test_reprs_are_deterministic_and_escaped(session):
    request = Request("<b>bold</b>", [noise(400, 0)])
    a, b = (session.prepare([request]) for _ in range(2))
    assert repr(a) == repr(b) and a._repr_html_() == b._repr_html_()
    assert "&lt;b&gt;bold" in a._repr_html_() and "0x" not in repr(a)
    assert repr(a).splitlines()[0] == f"PreparedBatch(1 request(s), 1 source(s), prompt width {a.width})"
    assert f"1 x {a.timeline[0].clock.token_s:g} s" in repr(a)


@pytest.mark.parametrize("requests", ([], Request("x"), ["x"], None))
def test_requests_must_be_a_list_of_requests(session, requests):
    with pytest.raises(ArgumentError):
        session.prepare(requests)


def test_a_session_is_freed_with_its_last_name(tiny):
    import weakref

    session = load_model(tiny, "cpu", torch.float32)
    batch = session.prepare(REQUESTS[:1])
    session.extract_contextual_embeddings(batch, (1,))
    seen = weakref.ref(session.model)
    del session, batch
    gc.collect()
    assert seen() is None


def test_a_batch_of_another_family_is_refused(session_mf, session_moss):
    mf, moss = (s.prepare([REQUESTS[0]]) for s in (session_mf, session_moss))
    for session, batch in ((session_mf, moss), (session_moss, mf), (session_mf, REQUESTS)):
        for call in (session.forward, session.extract_audio_embeddings, session.extract_contextual_embeddings):
            with pytest.raises(ArgumentError):
                call(batch)


def test_tables_stay_float32_through_moves_of_the_model(tiny):
    """`.to(bfloat16)` and `.half()` must equal loading in that dtype."""
    for dtype in (torch.bfloat16, torch.float16):
        moved, loaded = load_model(tiny, "cpu", torch.float32), load_model(tiny, "cpu", dtype)
        moved.model.to(dtype)
        assert {b.dtype for b in moved.model.buffers()} == {torch.float32}
        for a, b in zip(moved.model.buffers(), loaded.model.buffers(), strict=True):
            assert torch.equal(a, b)
        found, wanted = (s.extract_audio_embeddings(s.prepare([REQUESTS[0]]))[0] for s in (moved, loaded))
        assert torch.equal(found.projected, wanted.projected)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float64))
def test_torch_s_default_dtype_changes_nothing(session, dtype):
    request = Request("x", [noise(490_000, 0)])
    batch = session.prepare([request])
    wanted = session.extract_audio_embeddings(batch)[0].projected
    try:
        torch.set_default_dtype(dtype)
        again = session.prepare([request])
        found = session.extract_audio_embeddings(again)[0].projected
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(again.inputs[mel_name(again)], batch.inputs[mel_name(batch)])
    assert torch.equal(found, wanted)


def test_prepare_under_autocast_changes_nothing(session):
    batch = session.prepare([REQUESTS[0]])
    with torch.autocast("cpu", torch.bfloat16):
        again = session.prepare([REQUESTS[0]])
    assert torch.equal(again.inputs[mel_name(again)], batch.inputs[mel_name(batch)])


def test_a_stored_batch_takes_no_model_along(session, few):
    import pickle

    stored = pickle.dumps(few)
    weights = sum(p.nbytes for p in session.model.parameters())
    inputs = sum(t.nbytes for t in few.inputs.values()) + sum(s.waveform.nbytes for s in few.slots)
    assert len(stored) < inputs + weights / 2
    assert repr(pickle.loads(stored)) == repr(few)
    assert pickle.loads(stored).tokens == few.tokens
