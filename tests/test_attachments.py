"""Attachments: each does what the session's own block does, counts its firings, and leaves no hook however it ends."""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest
import torch
from looking import hooks, mixed_requests, noise

from audiollm import ArgumentError, Request, edits
from audiollm.attachments import ACTS, Attached, Attachment, Firings


def computed(session, batch, block):
    with block:
        return session.capture(batch, ["resid[3]", "final"])["final"].values


def width(session):
    return batch_width(session, "resid[2]")


def batch_width(session, point):
    return session.points(point)[0].width[0]


def every_act(session, batch):
    """One attachment of each act, with the block that the session makes of the same."""
    direction = np.linspace(-1, 1, width(session)).astype(np.float32)
    others = session.prepare(
        [Request(r.prompt, [noise(len(a.samples), 9) for a in r.audios]) for r in mixed_requests()]
    )
    equal = session.prepare([Request("a", [noise(32_000, 3), noise(32_000, 4)])])
    donors = session.capture(equal, "resid[2]", source=1)["resid[2]"].values
    where = {"source": 1, "seconds": (1.0, 2.0)}
    return {
        "zero": (batch, Attachment("resid[2]", "zero", **where), session.edit({"resid[2]": edits.zero()}, **where)),
        "mean": (batch, Attachment("projected", "mean", **where), session.edit({"projected": edits.mean()}, **where)),
        "scale": (
            batch,
            Attachment("resid[2]", "scale", factor=3, tokens="text"),
            session.edit({"resid[2]": edits.scale(3.0)}, "text"),
        ),
        "add": (
            batch,
            Attachment("resid[2]", "add", factor=2, vector=direction, tokens="last"),
            session.edit({"resid[2]": edits.add(direction, 2.0)}, "last"),
        ),
        "swap": (
            batch,
            Attachment("resid[2]", "swap", other=others),
            session.edit({"resid[2]": edits.swap(others)}),
        ),
        "replace": (
            equal,
            Attachment("resid[2]", "replace", source=0, donor=1),
            session.edit({"resid[2]": edits.replace(donors)}, source=0),
        ),
    }


def test_each_act_is_the_sessions_own_edit(session, batch):
    assert {*every_act(session, batch), "observe"} == set(ACTS)
    for act, (mine, attachment, block) in every_act(session, batch).items():
        plain = session.capture(mine, "final")["final"].values
        wanted = computed(session, mine, block)
        assert torch.equal(computed(session, mine, Attached(session, mine, [attachment])), wanted), act
        assert not torch.allclose(wanted, plain), act


def test_code_makes_the_same_block(session, batch):
    for act, (mine, attachment, block) in every_act(session, batch).items():
        names = {"session": session, "batch": mine, "edits": edits, "v": attachment.vector, "o": attachment.other}
        made = eval(attachment.code(session, "v", "o"), names)
        assert torch.equal(computed(session, mine, made), computed(session, mine, block)), act
    seeing = Attachment("resid[-1]", "observe", source=1, steps="all")
    with eval(seeing.code(session), {"session": session}) as seen:
        session.forward(batch)
    assert set(seen) == {f"resid[{session.n_layers}]"}
    negative = Attachment("resid[-1]", "replace", source=1, donor=1)
    with eval(negative.code(session), {"session": session, "batch": batch, "edits": edits}):
        session.forward(batch)


def test_a_steering_vector_is_added_as_its_array(session, batch):
    class Steering:
        vector = torch.linspace(-1, 1, width(session))

    attachment = Attachment("resid[2]", "add", vector=Steering(), factor=2)
    wanted = computed(session, batch, session.edit({"resid[2]": edits.add(Steering.vector, 2.0)}))
    assert torch.equal(computed(session, batch, Attached(session, batch, [attachment])), wanted)
    made = eval(attachment.code(session, "v"), {"session": session, "edits": edits, "v": attachment.vector})
    assert torch.equal(computed(session, batch, made), wanted)


def test_attachments_apply_in_order_and_observers_see_what_was_done_before(session, batch):
    doing = [Attachment("resid[2]", "zero", source=0), Attachment("resid[2]", "add", vector=np.ones(width(session)))]
    attached = Attached(session, batch, [*doing, Attachment("resid[2]")])
    with attached:
        session.forward(batch)
    assert attached.seen[:2] == (None, None)
    seen = attached.seen[2]["resid[2]"].source(0).values
    assert torch.equal(seen, torch.ones_like(seen))
    with Attached(session, batch, doing[::-1]) as turned, session.observe("resid[2]", source=0) as seen:
        session.forward(batch)
    assert not seen["resid[2]"].values.any() and turned.firings == (Firings(1), Firings(1))


def test_firings_by_hand(session):
    request = Request("hello there", [noise(32_000)])
    batch = session.prepare([request])
    attached = Attached(
        session,
        batch,
        [
            Attachment("resid[1]", "scale", factor=1.0),
            Attachment("resid[1]", "scale", factor=1.0, steps="all"),
            Attachment("resid[2]"),
            Attachment("resid[2]", tokens="audio"),
            Attachment("projected"),
            Attachment("resid[2]", tokens="steps"),
        ],
    )
    assert attached.firings == (Firings(),) * 6
    with attached:
        (answer,) = session.generations([request], max_new_tokens=4)
    steps = len(answer.token_ids) - 1  # the last one is never fed back
    assert steps == 3
    prompt, both, none = Firings(1, 0), Firings(1, steps), Firings(0, steps)
    assert attached.firings == (prompt, both, both, prompt, prompt, none)
    assert repr(both) == "1 in the prompt, 3 in generated tokens"


def test_a_call_of_the_encoder_without_chosen_rows_is_no_firing(session_moss):
    """MOSS-Music encodes chunk width by chunk width, and a short source is in one of these calls alone."""
    batch = session_moss.prepare(mixed_requests())
    point = session_moss.points("encoder.block[0]")[0]
    layouts = [layout for layout in point.layouts(batch) if len(layout.rows)]
    assert len(layouts) > 1
    first_of_last = sum(timeline.n_tokens for timeline in batch.timeline[:2])
    mine = sum(bool((layout.rows >= first_of_last).any()) for layout in layouts)
    assert mine < len(layouts)
    doing = [Attachment("encoder.block[0]", act, source=source) for act in ("observe", "zero") for source in (None, 2)]
    with Attached(session_moss, batch, doing) as attached:
        session_moss.forward(batch)
    assert [firings.prompt for firings in attached.firings] == [len(layouts), mine, len(layouts), mine]


def test_donors_are_of_a_run_without_the_other_edits(session):
    batch = session.prepare([Request("a", [noise(32_000, 3), noise(32_000, 4)])])
    plain = session.capture(batch, "resid[2]", source=1)["resid[2]"].values
    doing = [Attachment("resid[1]", "scale", factor=5), Attachment("resid[2]", "replace", source=0, donor=1)]
    with Attached(session, batch, doing), session.observe("resid[2]") as seen:
        session.forward(batch)
    assert torch.equal(seen["resid[2]"].source(0).values, plain)
    assert not torch.allclose(seen["resid[2]"].source(1).values, plain)


def test_calls_of_other_threads_pass_it_by(session, batch):
    plain = session.forward(batch).logits
    found = []
    with Attached(session, batch, [Attachment("resid[2]", "zero"), Attachment("resid[2]")]) as attached:
        thread = threading.Thread(target=lambda: found.append(session.forward(batch).logits))
        thread.start()
        thread.join()
        assert attached.firings == (Firings(), Firings()) and torch.equal(found[0], plain)
        assert not torch.equal(session.forward(batch).logits, plain)
    assert attached.firings == (Firings(1), Firings(1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda w: Attachment("resid[2]", "erase"), "act is 'erase'; pass one of 'observe', 'zero'"),
        (lambda w: Attachment("residue"), "'residue' is neither a point nor a module"),
        (lambda w: Attachment("resid[2]", tokens="music"), "tokens is 'music'"),
        (lambda w: Attachment("resid[2]", "zero", source=7), r"source 7 is not one of the batch's 3"),
        (lambda w: Attachment("resid[2]", "zero", seconds=(1000, 2000)), "did you pass milliseconds"),
        (lambda w: Attachment("projected", "zero", tokens="text"), "choose no row of projected"),
        (lambda w: Attachment("resid[2]", "scale", factor=float("nan")), "factor is nan; pass a finite number"),
        (lambda w: Attachment("resid[2]", "scale", factor=True), "factor is True"),
        (lambda w: Attachment("resid[2]", "add"), "vector is NoneType; add needs an array"),
        (lambda w: Attachment("resid[2]", "add", vector=np.ones(w + 1)), r"vector is \[\d+\]; it must be"),
        (lambda w: Attachment("resid[2]", "replace", source=0), "replace needs source=, .* and donor="),
        (lambda w: Attachment("resid[2]", "replace", source=0, donor=1), r"values is \[\d+, \d+\]; it must be"),
        (lambda w: Attachment("resid*", "replace", source=0, donor=1), "replace is of one place"),
        (
            lambda w: Attachment("resid[2]", "replace", source=0, donor=0, steps="all"),
            "leave steps out, or give one row",
        ),
        (
            lambda w: Attachment("resid[2]", "add", vector=np.ones((1, w)), tokens="steps"),
            "leave steps out, or give one",
        ),
        (lambda w: Attachment("resid[2]", "swap"), "swap needs another batch"),
        (lambda w: Attachment("resid[2]", "mean", steps="all"), "leave steps out"),
        (lambda w: Attachment("resid[2]", "zero", steps="some"), "steps is 'some'"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_model_runs(session, batch, monkeypatch, make, message):
    monkeypatch.setattr(session.model, "forward", None)
    with pytest.raises(ArgumentError, match=message):
        make(width(session)).check(session, batch)
    with pytest.raises(ArgumentError, match=message), Attached(session, batch, [make(width(session))]):
        pass


def test_edits_of_modules_and_swaps_of_other_rows_are_refused(session, batch, monkeypatch):
    monkeypatch.setattr(session.model, "forward", None)
    path = next(path for path, _ in session.model.named_modules() if path.endswith("q_proj"))
    assert Attachment(path).check(session, batch).point == path
    with pytest.raises(ArgumentError, match="is a module path, whose rows are not known"):
        Attachment(path, "zero").check(session, batch)
    shorter = session.prepare([Request("hello there", [noise(16_000)])])
    for point in ("resid[2]", "projected"):
        with pytest.raises(ArgumentError, match=f"of swap has not the same rows at {re.escape(point)}"):
            Attachment(point, "swap", other=shorter).check(session, batch)
    with pytest.raises(ArgumentError, match=r"pass what session\.prepare"):
        Attachment("resid[2]", "swap", other="batch").check(session, batch)


def test_no_hook_is_left_however_it_ends(session, batch):
    before = hooks(session)
    doing = [Attachment("resid[2]", "zero"), Attachment("final")]
    attached = Attached(session, batch, doing)
    with attached:
        assert hooks(session) != before
        with pytest.raises(ArgumentError, match="open already"):
            attached.__enter__()
    assert hooks(session) == before and not session._contexts
    with pytest.raises(KeyboardInterrupt), attached:
        raise KeyboardInterrupt
    assert hooks(session) == before
    with pytest.raises(ArgumentError), Attached(session, batch, [*doing, Attachment("nowhere")]):
        pass
    assert hooks(session) == before and not session._contexts
    attached.__enter__()
    thread = threading.Thread(target=attached.close)
    thread.start()
    thread.join()
    assert hooks(session) == before, "closed from another thread"
    with attached:
        session.forward(batch)
    assert attached.firings == (Firings(1), Firings(1)), "entered again, it counts anew"


def test_an_interrupt_while_it_opens_leaves_nothing(session, batch, monkeypatch):
    before = hooks(session)
    attached = Attached(session, batch, [Attachment("resid[2]", "zero"), Attachment("final")])
    made = Attachment.block

    def interrupted(self, *given):
        if self.point == "final":
            raise KeyboardInterrupt
        return made(self, *given)

    monkeypatch.setattr(Attachment, "block", interrupted)
    with pytest.raises(KeyboardInterrupt), attached:
        pass
    assert hooks(session) == before and not session._contexts and not attached.is_open


@pytest.mark.parametrize(
    ("attachment", "words"),
    [
        (Attachment("final"), "final: observe, all tokens"),
        (
            Attachment("resid[2]", "scale", factor=0.5, source=0, seconds=(1, 2), steps="all"),
            "resid[2]: scale by 0.5, all tokens of source 0 in 1.00-2.00 s and generated ones",
        ),
        (Attachment("embed", "add", factor=2, tokens="last"), "embed: add 2 x vector, last tokens"),
        (Attachment("embed", "replace", source=0, donor=1), "embed: replace from source 1, all tokens of source 0"),
        (Attachment("embed", "zero", tokens=(3, -1)), "embed: zero, columns 3, -1"),
    ],
)
def test_words(attachment, words):
    assert attachment.describe() == words and repr(attachment) == f"Attachment({words})"
