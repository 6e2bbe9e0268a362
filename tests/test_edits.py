"""Edits: each does to the chosen rows what it says, to no other, for as long as its block, and is undone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from looking import hooks, mixed_requests, noise, positions

from audiollm import ArgumentError, Request, Waveform, edits, load_model

POINTS = (
    "encoder.block[1]",
    "encoder.out",
    "projected",
    "embed",
    "resid[2]",
    "attn_out[1]",
    "mlp_out[1]",
    "final",
    "logits",
)


def edited(session, batch, point, edit, **where):
    with session.edit({point: edit}, **where):
        return session.capture(batch, point)[point]


@pytest.mark.parametrize("point", POINTS)
def test_only_the_chosen_rows_change(session, batch, point):
    plain = session.capture(batch, point)[point]
    where = {"tokens": "last"} if point == "logits" else {"source": 1, "seconds": (0.5, 2.0)}
    seen = edited(session, batch, point, edits.scale(2.0), **where)
    rows = plain.rows
    if point == "logits":
        chosen = torch.from_numpy(rows.position == batch.width - 1)
    else:
        centre = (rows.start_s + rows.end_s) / 2
        chosen = torch.from_numpy((rows.source == 1) & (centre >= 0.5) & (centre < 2.0))
    assert chosen.any() and not chosen.all()
    assert torch.allclose(seen.values[chosen], 2 * plain.values[chosen], atol=1e-6)
    assert torch.equal(seen.values[~chosen], plain.values[~chosen])


def test_what_follows_is_computed_from_the_edit(session, batch):
    """By hand: replace the input of block 2 with zeros and run the rest with torch hooks alone."""
    block = session._adapter.blocks()[2]

    def zeroed(module, args):
        return (torch.zeros_like(args[0]), *args[1:])

    handle = block.register_forward_pre_hook(zeroed)
    with torch.no_grad():
        wanted = session.model(**batch.inputs, position_ids=positions(batch)).logits[:, -1]
    handle.remove()
    with session.edit({"resid[2]": edits.zero()}):
        assert torch.allclose(session.forward(batch).logits[:, 0], wanted, atol=1e-5)
    assert not torch.allclose(session.forward(batch).logits[:, 0], wanted, atol=1e-3)


def test_each_edit(session, batch):
    plain = session.capture(batch, "resid[1]", source=0)["resid[1]"].values

    def under(edit):
        with session.edit({"resid[1]": edit}, source=0):
            return session.capture(batch, "resid[1]", source=0)["resid[1]"].values

    vector = torch.arange(plain.shape[1], dtype=torch.float64)
    assert torch.equal(under(edits.zero()), torch.zeros_like(plain))
    assert torch.allclose(under(edits.mean()), plain.mean(0).expand_as(plain), atol=1e-6)
    assert torch.equal(under(edits.add(vector, 0.5)), plain + 0.5 * vector.float())
    assert torch.equal(under(edits.replace(plain.flip(0))), plain.flip(0))
    assert torch.equal(under(lambda values, rows: values * float(rows.end_s.max())), plain * 2)


def test_the_mean_is_of_the_whole_source_even_for_a_few_rows(session, batch):
    plain = session.capture(batch, "resid[1]", source=1)["resid[1]"].values
    seen = edited(session, batch, "resid[1]", edits.mean(), source=1, seconds=(0, 0.2)).source(1).values
    assert torch.allclose(seen[0], plain.mean(0), atol=1e-6) and torch.equal(seen[10], plain[10])


def test_swap_puts_another_batch_s_rows_in(session):
    mine = session.prepare([Request("what is it", [noise(32_000, 1)])])
    other = session.prepare([Request("what is it", [noise(32_000, 2)])])
    deep = "resid[3]"  # past DeepStack, which would add the audio of `mine` once more
    with session.edit({deep: edits.swap(other)}):
        seen = session.capture(mine, deep)[deep].values
        logits = session.forward(mine).logits
    assert torch.equal(seen, session.capture(other, deep)[deep].values)
    assert torch.allclose(logits, session.forward(other).logits, atol=1e-5)
    shorter = session.prepare([Request("what is it", [noise(20_000, 2)])])
    with pytest.raises(ArgumentError, match="has not the same rows"), session.edit({"resid[2]": edits.swap(shorter)}):
        session.forward(mine)


def test_edits_apply_to_the_prompt_unless_told(session):
    requests = mixed_requests()[:1]
    for steps, wanted in ((None, set()), ("all", {1, 2, 3}), ([2], {2})):
        edit = session.edit({"resid[1]": edits.zero()}, tokens="text", steps=steps)
        with edit, session.observe("resid[1]", tokens="steps") as seen:
            session.generations(requests, max_new_tokens=4)
        rows, values = seen["resid[1]"].rows, seen["resid[1]"].values
        assert {int(s) for s, v in zip(rows.step, values, strict=True) if not v.any()} == wanted & set(
            rows.step.tolist()
        )
    for wrong in (0, [0], "some", [1.5], ["all"]):
        with pytest.raises(ArgumentError, match="steps"):
            session.edit({"resid[1]": edits.zero()}, steps=wrong)


def test_blocks_nest_in_order_and_are_undone(session, batch):
    plain = session.capture(batch, "resid[1]")["resid[1]"].values
    with session.edit({"resid[1]": lambda v, r: v + 1}):
        with session.edit({"resid[1]": edits.scale(2)}):
            assert torch.allclose(session.capture(batch, "resid[1]")["resid[1]"].values, 2 * (plain + 1), atol=1e-5)
        assert torch.equal(session.capture(batch, "resid[1]")["resid[1]"].values, plain + 1)
    assert torch.equal(session.capture(batch, "resid[1]")["resid[1]"].values, plain)


def test_the_user_s_own_hooks_stay_and_act(session, batch):
    calls = []
    handle = session._adapter.blocks()[1].register_forward_pre_hook(lambda m, a: calls.append(a[0].clone()))
    before = hooks(session)
    with session.edit({"resid[1]": edits.zero()}):
        session.forward(batch)
    assert hooks(session) == before and len(calls) == 1
    handle.remove()


def test_gradients_flow_through_an_edit(session):
    batch = session.prepare(mixed_requests()[:1])
    leaf = session.capture(batch, "projected", device=None)["projected"].values.requires_grad_()
    with session.edit({"projected": edits.replace(leaf)}):
        loss = session.forward(batch, grad=True).logits.float().log_softmax(-1).max()
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize(
    "edit",
    (edits.zero, torch.zeros(3), 0, None, torch.nn.Identity),
)
def test_what_is_no_edit_is_refused(session, edit):
    with pytest.raises(ArgumentError, match="edit of resid"):
        session.edit({"resid[0]": edit})


@pytest.mark.parametrize(
    "edit",
    (
        lambda v, r: v[:1],
        lambda v, r: None,
        lambda v, r: v.sum(),
        edits.add(torch.zeros(5)),
        edits.replace(torch.zeros(2, 5)),
    ),
)
def test_an_edit_of_another_shape_is_refused(session, batch, edit):
    with pytest.raises(ArgumentError), session.edit({"resid[0]": edit}):
        session.forward(batch)


def test_refusals(session, batch):
    with pytest.raises(ArgumentError, match="empty"):
        session.edit({})
    with pytest.raises(ArgumentError, match="module path"):
        session.edit({next(n for n, _ in session.model.named_modules() if n): edits.zero()})
    with pytest.raises(ArgumentError, match="never fired"), session.edit({"projected": edits.zero()}):
        session.generate([Request("text")], max_new_tokens=1)
    with pytest.raises(ArgumentError, match="pass batch="), session.edit({"projected": edits.zero()}), torch.no_grad():
        session.model(**batch.inputs)


# What a breaker and a reviewer found.


@pytest.mark.parametrize("names", (("resid[*]", "resid[1]"), ("resid[-1]", "resid[{n}]"), ("embed", "resid[0]")))
def test_one_place_under_two_names_is_refused(session, names):
    names = [name.format(n=session.n_layers) for name in names]
    with pytest.raises(ArgumentError, match="edited twice"):
        session.edit({name: edits.scale(2.0) for name in names})


def test_swap_takes_the_same_rows_or_none(session):
    requests = [Request("hello there aaa bbb ccc"), Request("x")]
    one, other = session.prepare(requests), session.prepare(requests[::-1])
    with pytest.raises(ArgumentError, match="has not the same rows"), session.edit({"resid[1]": edits.swap(other)}):
        session.forward(one)


def test_swap_and_replace_at_an_encoder_that_runs_once_a_chunk_width(session):
    """Three chunk widths for MOSS; with itself nothing changes, with another the other's values are there."""
    requests = [
        Request("a", [noise(8_000)]),
        Request("b", [noise(70_000, 1), noise(5_000, 2)]),
        Request("c", [noise(24_000, 3)]),
    ]
    louder = [Request(r.prompt, [Waveform(2 * a.samples, 16_000) for a in r.audios]) for r in requests]
    one, other = session.prepare(requests), session.prepare(louder)
    for point in ("encoder.block[1]", "projected"):
        wanted = session.capture(other, point)[point].values
        for edit in (edits.swap(other), edits.replace(wanted)):
            with session.edit({point: edit}):
                assert torch.equal(session.capture(one, point)[point].values, wanted)
        for chosen in ({"source": 2}, {"seconds": (0, 0.2)}):
            with session.edit({point: edits.swap(other)}, **chosen):
                seen = session.capture(one, point)[point]
            mine = session.capture(one, point, **chosen)[point].rows
            changed = [
                (s, t)
                for s, t, v, w in zip(seen.rows.source, seen.rows.token, seen.values, wanted, strict=True)
                if torch.equal(v, w)
            ]
            assert set(zip(mine.source, mine.token, strict=True)) == set(changed)


def test_the_other_batch_of_a_swap_runs_once_and_undisturbed(session, batch):
    runs = []
    handle = session._adapter.decoder().register_forward_pre_hook(lambda *_: runs.append(None))
    other = session.prepare(mixed_requests())
    plain = session.capture(other, "resid[2]")["resid[2]"].values
    runs.clear()
    swap = session.edit({"resid[2]": edits.swap(other), "mlp_out[2]": edits.swap(other)})
    with session.observe("resid[2]") as outer, session.edit({"resid[1]": edits.zero()}), swap:
        assert len(runs) == 1 and not outer.calls
        session.forward(batch)
    handle.remove()
    assert len(runs) == 2 and torch.equal(outer["resid[2]"].values, plain)


def test_steps_of_other_requests_are_left_alone(session):
    with (
        session.edit({"resid[1]": edits.zero()}, source=1, steps="all"),
        session.observe("resid[1]", tokens="steps") as seen,
    ):
        session.generations(mixed_requests(), max_new_tokens=3)
    assert not seen["resid[1]"].request(1).values.any()
    for other in (0, 2):
        assert seen["resid[1]"].request(other).values.any(1).all()


def test_steps_alone_are_edited_where_they_are_what_is_chosen(session):
    with session.edit({"resid[1]": edits.zero()}, tokens="steps"), session.observe("resid[1]") as seen:
        session.generations(mixed_requests()[:1], max_new_tokens=3)
    assert not seen["resid[1]"].generated.values.any() and seen["resid[1]"].prompt.values.any(1).all()


def test_what_edits_cannot_be(session, batch):
    with pytest.raises(ArgumentError, match="leave steps out"):
        session.edit({"resid[1]": edits.mean()}, steps="all")
    for steps in ([True], "al", 3):
        with pytest.raises(ArgumentError, match="steps is"):
            session.edit({"resid[1]": edits.zero()}, steps=steps)
    assert session.edit({"resid[1]": edits.zero()}, steps=np.arange(1, 3)).steps == {1, 2}
    with pytest.raises(ArgumentError, match=r"pass \{point: edit\}"):
        session.edit("resid[1]")
    with pytest.raises(ArgumentError, match="must return real"), session.edit({"resid[1]": lambda v, r: v * 1j}):
        session.forward(batch)


def test_what_is_added_is_rounded_once(tiny_moss):
    session = load_model(tiny_moss, "cpu", torch.bfloat16)
    batch = session.prepare([Request("x")])
    plain = session.capture(batch, "resid[1]")["resid[1]"].values
    vector = torch.linspace(0.001, 1.003, plain.shape[1])
    with session.edit({"resid[1]": edits.add(vector, 7.0)}):
        seen = session.capture(batch, "resid[1]")["resid[1]"].values
    assert torch.equal(seen, plain + (7.0 * vector).bfloat16())
