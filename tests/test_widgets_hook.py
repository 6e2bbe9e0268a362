"""The panel of hooks without a browser: attach, run, see, remove; refusals in words; and no hook left however it ends."""

from __future__ import annotations

import gc
import threading
import weakref

import ipywidgets
import numpy as np
import pytest
import torch
from audiollm.widgets import HookPanel, TimelinePanel
from ipywidgets.widgets.widget import _instances
from looking import hooks, noise

from audiollm import ArgumentError, Request, edits
from audiollm.analysis import edit_effect
from audiollm.attachments import Attachment, Firings


@pytest.fixture
def batch(session_moss):
    return session_moss.prepare([Request("hello", [noise(32_000), noise(70_000, 1)]), Request("what")])


@pytest.fixture
def panel(session_moss, batch):
    """A panel, whose session must have its own hooks alone once it is closed."""
    before = hooks(session_moss)
    panel = HookPanel(session_moss, batch)
    panel.new_tokens.value = 0
    yield panel
    panel.close()
    assert hooks(session_moss) == before and not session_moss._contexts and not session_moss._running


def chosen(panel: HookPanel, **values) -> HookPanel:
    for name, value in values.items():
        getattr(panel, name).value = value
    return panel


def alert(panel: HookPanel) -> str:
    assert 'role="alert"' in panel.message.value, panel.message.value
    return panel.message.value


class Held:
    """A hook of the test's own that holds the model in its third block until `go`, and says when it is there."""

    def __init__(self, session) -> None:
        self.there, self.go = threading.Event(), threading.Event()
        self.handle = session._adapter.blocks()[2].register_forward_pre_hook(self.wait)

    def wait(self, *_) -> None:
        self.there.set()
        assert self.go.wait(20)


@pytest.fixture
def held(session_moss):
    held = Held(session_moss)
    yield held
    held.go.set()
    held.handle.remove()


# Choosing a place


def test_the_tree_is_listed_and_filtered(panel, session_moss):
    names = [name for _, name in panel.place.options]
    assert names[0] == session_moss.points()[0].name
    assert set(names) >= {path for path, _ in session_moss.model.named_modules() if path}
    labels = {name: label for label, name in panel.place.options}
    deep = next(path for path, _ in session_moss.model.named_modules() if path.endswith("q_proj"))
    assert labels[deep].startswith("\u00a0\u00a0" * deep.count(".") + "q_proj: Linear (weight [")
    panel.place.value = "resid[2]"
    chosen(panel, filter="RESID", kind="points")
    assert [name for _, name in panel.place.options] == [f"resid[{k}]" for k in range(session_moss.n_layers + 1)]
    assert panel.place.value == "resid[2]" and panel.place_note.value == "resid[2]: [R, 32] float32, layer 2"
    panel.kind.value = "modules"
    assert panel.place.value is None and panel.place_note.value == "no place is called so"
    panel.attach_button.click()
    assert "no place is chosen" in alert(panel)
    chosen(panel, filter="q_proj")
    assert {name: label for label, name in panel.place.options}[deep].startswith(deep), (
        "whole names where it is no tree"
    )


def test_controls_follow_the_act(panel):
    def shown() -> set[str]:
        names = ("factor", "vector", "donor", "other", "steps")
        return {name for name in names if getattr(panel, name).layout.display != "none"}

    wanted = {
        "observe": set(),
        "zero": {"steps"},
        "mean": set(),
        "scale": {"factor", "steps"},
        "add": {"factor", "vector", "steps"},
        "replace": {"donor"},
        "swap": {"other"},
    }
    assert list(panel.act.options) == list(wanted)
    for act, controls in wanted.items():
        panel.act.value = act
        assert shown() == controls, act


def test_every_control_has_a_name(panel):
    def controls(widget):
        for child in getattr(widget, "children", ()):
            yield from controls(child)
        if isinstance(widget, (ipywidgets.ValueWidget, ipywidgets.Button)) and not isinstance(widget, ipywidgets.HTML):
            yield widget

    found = list(controls(panel))
    assert len(found) > 20 and all(control.description for control in found)
    assert len({control.description for control in found}) == len(found), "no two of one name"


# What is attached


def test_controls_become_attachments(panel, batch):
    direction = np.ones(32, np.float32)
    panel.vectors, panel.batches = {"ones": direction}, {"again": batch}
    chosen(panel, place="resid[2]", act="add", factor=2.0, tokens="text", steps=True).attach_button.click()
    chosen(panel, act="swap", tokens="all", source=1).attach_button.click()
    chosen(panel, place="final", act="observe", tokens="last", source="all").attach_button.click()
    assert not panel.message.value
    add, swap, observe = panel.attachments
    assert (add.point, add.act, add.factor, add.vector is direction, add.tokens, add.steps) == (
        ("resid[2]", "add", 2.0, True, "text", "all")
    )
    assert (swap.other is batch, swap.source, swap.steps, swap.factor) == (True, 1, None, 1.0)
    assert (observe.point, observe.tokens, observe.source) == ("final", "last", None)
    assert [label for label, _ in panel.listed.options] == [
        "0. resid[2]: add 2 x ones, text tokens and generated ones (not run yet)",
        "1. resid[2]: swap with again, all tokens of source 1 (not run yet)",
        "2. final: observe, last tokens (not run yet)",
    ]


def test_remove_one_and_all(panel):
    for point in ("resid[1]", "resid[2]", "final"):
        chosen(panel, place=point).attach()
    panel.listed.value = 1
    panel.remove_button.click()
    assert [a.point for a in panel.attachments] == ["resid[1]", "final"] and panel.listed.value == 1
    panel.remove_button.click()
    panel.clear_button.click()
    assert panel.attachments == () and panel.listed.options == () and "nothing is attached" in panel.describe()
    panel.remove_button.click()
    assert "attachment -1 is not one of the 0" in alert(panel)
    panel.run_button.click()
    assert "nothing is attached" in alert(panel) and not panel.busy


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"act": "replace", "source": 0, "donor": 1}, r"values is \[55, 32\]; it must be \[25, 32\]"),
        ({"act": "replace"}, "replace needs source="),
        ({"act": "add"}, "vector is NoneType; add needs an array"),
        (
            {"act": "add", "vector": "short"},
            r"vector is \[3\]; it must be \[\d+, 32\], one for each chosen row, or \[32\]",
        ),
        ({"act": "swap"}, "swap needs another batch"),
        ({"act": "swap", "other": "text"}, "has not the same rows at resid"),
        ({"act": "scale", "factor": float("inf")}, "factor is inf; pass a finite number"),
        ({"act": "zero", "tokens": "selection"}, "nothing is selected; drag over the timeline"),
        ({"act": "zero", "place": "projected", "tokens": "text"}, "choose no row of projected"),
        ({"act": "zero", "tokens": "text", "source": 0}, "choose no row of resid"),
    ],
)
def test_what_does_not_fit_is_shown_before_the_model_runs(panel, session_moss, monkeypatch, how, message):
    panel.vectors = {"short": [1.0, 2.0, 3.0]}
    panel.batches = {"text": session_moss.prepare([Request("only text")])}
    if "vector" not in how:
        panel.vectors = {}
    if "other" not in how:
        panel.batches = {}
    monkeypatch.setattr(session_moss.model, "forward", None)
    chosen(panel, place="resid[2]")
    chosen(panel, **how)
    with pytest.raises(ArgumentError, match=message):
        panel.attach()
    panel.attach_button.click()
    with pytest.raises(ArgumentError, match=message):
        raise panel.failure
    assert alert(panel) and panel.attachments == () and panel.effect is None


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_traits_from_a_cell_are_checked(panel, session_moss):
    panel.attachments = (Attachment("resid*", "scale", factor=2.0),)
    with pytest.raises(ArgumentError, match="'nowhere' is neither a point nor a module"):
        panel.attach(Attachment("nowhere"))
    with pytest.raises(ArgumentError, match=r"'resid\[2\]' is no audiollm.attachments.Attachment"):
        panel.attachments = ("resid[2]",)
    with pytest.raises(ArgumentError, match="did you pass milliseconds"):
        panel.selection = (0, 1000, 2000)
    with pytest.raises(ArgumentError, match=r"pass \(source, start_s, end_s\)"):
        panel.selection = (0, 1)
    assert len(panel.attachments) == 1 and panel.selection == ()
    with pytest.raises(ArgumentError, match=r"pass what session\.prepare"):
        HookPanel(session_moss, [Request("x")])
    gc.collect()


# Running


def test_a_run_is_the_effect_of_the_blocks(panel, session_moss, batch):
    chosen(panel, place="resid[2]", act="scale", factor=3.0, source=0, new_tokens=3).attach()
    chosen(panel, place="resid[3]", act="observe", source="all").attach()
    panel.run_button.click()
    panel.run_button.click()  # while it is busy nothing
    panel.wait()
    assert panel.failure is None and "done" in panel.message.value and panel.results.layout.display == ""
    wanted = edit_effect(
        session_moss, batch, session_moss.edit({"resid[2]": edits.scale(3.0)}, source=0), max_new_tokens=3
    )
    np.testing.assert_array_equal(panel.effect.norms_after, wanted.norms_after)
    assert panel.effect.describe() == wanted.describe()
    assert panel.firings() == (Firings(1, 0), Firings(1, 2))
    assert "fired 1 in the prompt, 2 in generated tokens" in panel.listed.options[1][0]
    assert panel.seen[0] is None and panel.seen[1]["resid[3]"].values.shape[1] == 32
    assert wanted.answers_after[0].text in panel.static().tables[2].rows[0]


def test_nothing_is_registered_but_during_a_run(panel, session_moss, held):
    before = hooks(session_moss)
    chosen(panel, place="resid[2]", act="zero").attach()
    assert hooks(session_moss) == before
    panel.run()
    held.there.wait(20)
    assert hooks(session_moss) != before
    held.go.set()
    panel.wait()
    assert hooks(session_moss) == before and panel.effect is not None


def test_an_error_inside_the_run_is_shown_and_leaves_nothing(panel, session_moss, monkeypatch):
    before = hooks(session_moss)
    chosen(panel, place="resid[2]", act="zero").attach()
    panel.layers = (99,)
    panel.run().wait()
    assert "layer" in alert(panel) and hooks(session_moss) == before and not session_moss._contexts
    panel.layers = ()

    def broken(*_) -> None:
        raise ZeroDivisionError("in the model")

    handle = session_moss._adapter.blocks()[3].register_forward_hook(broken)
    panel.run().wait()
    handle.remove()
    assert "ZeroDivisionError: in the model" in alert(panel) and panel.effect is None
    assert hooks(session_moss) == before and not session_moss._contexts
    panel.run().wait()
    assert panel.effect is not None and panel.failure is None


def test_cancel_stops_within_the_model_and_leaves_nothing(panel, session_moss, held):
    before, passed = hooks(session_moss), []
    handle = session_moss._adapter.blocks()[-1].register_forward_pre_hook(lambda *_: passed.append(1))
    chosen(panel, place="resid[2]", act="zero").attach()
    panel.run()
    held.there.wait(20)
    panel.cancel_button.click()
    held.go.set()
    panel.wait()
    handle.remove()
    assert not passed, "it does not go on to the last block"
    assert "cancelled" in panel.message.value and panel.effect is None
    assert hooks(session_moss) == before and not session_moss._contexts


def test_close_while_it_runs_leaves_nothing(session_moss, batch):
    before = hooks(session_moss)
    there = threading.Event()
    panel = HookPanel(session_moss, batch)
    handle = session_moss._adapter.blocks()[2].register_forward_pre_hook(
        lambda *_: there.set() if any(type(c).__name__ == "EditingHere" for c in session_moss._contexts) else None
    )
    with_mine = hooks(session_moss)
    chosen(panel, place="resid[1]", act="zero", new_tokens=400).attach()
    panel.run()
    assert there.wait(20), "the edit is open"
    assert hooks(session_moss) != with_mine
    panel.close()
    assert not panel.busy and hooks(session_moss) == with_mine and not session_moss._contexts
    handle.remove()
    assert hooks(session_moss) == before


def test_close_takes_the_hooks_of_a_run_that_does_not_end(session_moss, batch, held, monkeypatch):
    """A job that hangs in the model is not waited for without end; its edits are off all the same."""
    panel = HookPanel(session_moss, batch)
    chosen(panel, place="resid[1]", act="zero", new_tokens=0).attach()
    held.go.set()
    panel.run().wait()
    attached, waits = panel._attached, type(panel).wait
    monkeypatch.setattr(HookPanel, "wait", lambda self, timeout=None: waits(self, 0.01))
    attached.__enter__()
    panel.close()
    assert not attached.is_open and not session_moss._contexts


def test_an_interrupt_of_the_waiting_cell_leaves_nothing(panel, session_moss, held, monkeypatch):
    before = hooks(session_moss)
    chosen(panel, place="resid[2]", act="zero").attach()
    panel.run()
    held.there.wait(20)

    def interrupted(timeout=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(panel._job, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            panel.wait()
    held.go.set()
    panel.wait()
    assert "cancelled" in panel.message.value and panel.effect is None
    assert hooks(session_moss) == before and not session_moss._contexts


def test_a_busy_session_is_told(panel, session_moss, held, batch):
    chosen(panel, place="resid[2]", act="zero").attach()
    thread = threading.Thread(target=lambda: session_moss.forward(batch))
    thread.start()
    held.there.wait(20)
    panel.run().wait()
    assert "in the middle of another call" in alert(panel)
    held.go.set()
    thread.join()


# Other panels


def test_it_follows_the_selection_and_the_cursor_of_a_timeline(panel, batch, session_moss):
    timeline = TimelinePanel(batch)
    timeline.select(1, 1.0, 2.0)
    panel.follow(timeline)
    assert panel.selection == (1, 1.0, 2.0) and "source 1, 1.000-2.000 s" in panel.selection_note.value
    chosen(panel, place="resid[2]", act="zero", tokens="selection").attach()
    timeline.select_tokens(0, 3, 4)
    panel.attach()
    assert panel.attachments[0].source == 1 and panel.attachments[0].seconds == (1.0, 2.0)
    panel.run().wait()
    cosine = panel.effect.source(0).cosine[2]
    assert np.flatnonzero(np.isnan(cosine)).tolist() == [3, 4], "just the tokens that are selected"
    timeline.seek(0.5)
    assert panel.map.cursor_s == 0.5
    panel.shown.value = 1
    assert panel.map.cursor_s is None, "it is in another source"
    first = panel.map.limits[0]
    panel.map._handle_custom_msg({"event": "click", "x": (first[0] + first[1]) / 2, "y": (first[2] + first[3]) / 2}, [])
    assert timeline.source == 1 and timeline.cursor_s == pytest.approx(70_000 / 16_000 / 2, abs=0.1)
    assert panel.map.cursor_s == timeline.cursor_s
    timeline.clear()
    assert panel.selection == ()
    timeline.select(0, 0.001, 0.002)
    assert panel.selection == (), "less than a token"
    other = TimelinePanel(session_moss.prepare([Request("x", [noise(16_000)])]))
    with pytest.raises(ArgumentError, match="the timeline is of another batch"):
        panel.follow(other)
    panel.close()
    timeline.select(1, 1.0, 2.0)
    assert not timeline._trait_notifiers["selection"]["change"][1:], "the panel no longer listens"
    other.close()
    timeline.close()


# Words, pictures, code


def test_words_pictures_and_tables(panel):
    assert panel.describe() == "Hooks and edits: nothing is attached\nno run yet" == repr(panel)
    assert panel.static().pictures == ()
    chosen(panel, place="resid[2]", act="zero", source=0, new_tokens=2).attach()
    chosen(panel, place="final", act="observe", source="all", tokens="steps").attach()
    panel.run().wait()
    text = panel.describe()
    assert "  resid[2]: zero, all tokens of source 0 (fired 1 in the prompt, 0 in generated tokens)" in text
    assert panel.effect.describe() in text and "  seen: final: [" in text
    twin = panel.static()
    assert (
        all(picture.png.startswith(b"\x89PNG") and picture.alt for picture in twin.pictures) and len(twin.pictures) == 2
    )
    assert [table.caption for table in twin.tables] == ["Attached", "Next token of request 0", "Generated text"]
    assert "image/png" in panel._repr_mimebundle_()
    light, alt = panel.map.png, panel.bars.alt
    panel.skin.dark = True
    assert panel.map.png != light and alt.startswith("Probability of the next token, before -> after: ")
    panel.shown.value = 2
    assert panel.map.boxes == [] and panel.static().tables[1].caption == "Next token of request 1"
    panel.remove(1)
    assert "what follows is of a run with other attachments" in panel.describe()


def test_code_does_the_same(panel, session_moss, batch):
    panel.vectors = {"ones": np.ones(32, np.float32)}
    other = session_moss.prepare([Request("hello", [noise(32_000, 8), noise(70_000, 9)]), Request("what")])
    chosen(panel, place="resid[2]", act="add", factor=2.5, steps=True).attach()
    chosen(panel, act="scale", factor=0.5, tokens="last").attach()
    chosen(panel, act="mean", tokens="audio").attach()
    panel.attach(Attachment("projected", "swap", source=1, other=other))
    panel.attach(Attachment("resid[3]", "replace", source=0, donor=1, seconds=(0.4, 1.2)))
    panel.attach(Attachment("resid[1]", "add", vector=torch.full((32,), 0.5)))
    panel.attach(Attachment("final"))
    panel.layers, panel.new_tokens.value = (0, -1), 2
    panel.run().wait()
    names = {"session": session_moss, "batch": batch, "vectors": panel.vectors, "batches": panel.batches}
    exec(panel.code(), names)
    assert names["effect"].describe() == panel.effect.describe()
    np.testing.assert_array_equal(names["effect"].norms_after, panel.effect.norms_after)
    assert torch.equal(names["seen"][0]["final"].values, panel.seen[-1]["final"].values)
    assert set(panel.vectors) == {"ones", "vector 1"} and panel.batches == {"batch 1": other}
    assert "edits.add(vectors['ones'], 2.5)" in panel.code() and "layers=(0, -1)" in panel.code()
    panel.code_button.click()
    assert "edit_effect" in panel.code_view.value


def test_code_of_nothing_runs(panel, session_moss, batch):
    exec(panel.code(), names := {"session": session_moss, "batch": batch})
    assert names["blocks"] == [] and not names["effect"].divergence.any()


def test_close_frees_everything(session_moss, batch):
    gc.collect()
    before = len(_instances)
    panel = HookPanel(session_moss, batch)
    chosen(panel, place="resid[2]", act="zero", new_tokens=0).attach()
    panel.run().wait()
    gone = weakref.ref(panel)
    panel.close()
    panel.close()
    assert repr(panel) == "HookPanel(closed)"
    del panel
    gc.collect()
    assert len(_instances) == before and gone() is None
