"""The panel of layers without a browser: every view from a cell, the timeline both ways, the cache, cancel, errors, close."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
from audiollm.widgets import LayerPanel, TimelinePanel
from audiollm.widgets.layer_views import USES, VIEWS
from ipywidgets.widgets.widget import _instances
from looking import hooks, noise

from audiollm import ArgumentError, Request
from audiollm.analysis import cross_similarity, layer_norms, project, self_similarity

VERSE = ([[0.0, 1.0], [1.0, 2.0], [2.0, 4.375]], ["a", "b", "a"])


@pytest.fixture
def batch(session_moss):
    return session_moss.prepare([Request("hello", [noise(70_000), noise(32_000, 1)]), Request("what")])


@pytest.fixture
def panel(session_moss, batch):
    """A panel, whose session must have its own hooks alone once it is closed."""
    before = hooks(session_moss)
    panel = LayerPanel(session_moss, batch)
    panel.wait()
    yield panel
    panel.close()
    assert hooks(session_moss) == before and not session_moss._contexts and not session_moss._running


@pytest.fixture
def held(session_moss):
    """The model waits in its third block until `go`."""
    there, go = threading.Event(), threading.Event()

    def wait(*_) -> None:
        there.set()
        assert go.wait(60)

    handle = session_moss._adapter.blocks()[2].register_forward_pre_hook(wait)
    yield there, go
    go.set()
    handle.remove()


def click(panel: LayerPanel, x: float, y: float | None = None, axes: int = 0) -> None:
    """The browser's message for a click at data coordinates of axes, by default half way up."""
    left, right, bottom, top, x0, x1, y0, y1 = panel.figure.limits[axes]
    y = (y0 + y1) / 2 if y is None else y
    fx = left + (x - x0) / (x1 - x0) * (right - left)
    fy = bottom + (y - y0) / (y1 - y0) * (top - bottom)
    panel.figure._handle_custom_msg({"event": "click", "x": fx, "y": fy}, [])


def alert(panel: LayerPanel) -> str:
    assert 'role="alert"' in panel.message.value, panel.message.value
    return panel.message.value


def test_every_view_shows_what_the_analysis_computes(panel, session_moss, batch):
    states = session_moss.extract_contextual_embeddings(batch, range(session_moss.n_layers + 1))
    one, two = batch.timeline
    panel.source.value, panel.layer.value, panel.other_source.value, panel.other_layer.value = 0, 2, 1, 3
    np.testing.assert_allclose(panel.result.values, layer_norms(session_moss, batch)[0].values, rtol=1e-6)
    panel.view.value, panel.layers.value = "map", (3, 1)
    assert panel.result.layers == (1, 3)
    panel.view.value = "self"
    np.testing.assert_array_equal(panel.result.values, self_similarity(states[0][2], one).values)
    panel.centered.value = False
    np.testing.assert_array_equal(panel.result.values, self_similarity(states[0][2], one, centered=False).values)
    panel.centered.value, panel.view.value = True, "cross"
    expected = cross_similarity(states[0][2], one, states[1][3], two)
    np.testing.assert_array_equal(panel.result.values, expected.values)
    assert panel.result.cka == expected.cka and "source 1 waveform 2 layer 3" in panel.describe()
    panel.view.value = "projection"
    np.testing.assert_array_equal(panel.result.points, project(states[0][2], one).points)
    assert panel.failure is None


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("only", [False, True])
def test_the_code_does_the_same(panel, session_moss, batch, view, only):
    panel.annotations = {"verse": {0: VERSE}}
    panel.view.value, panel.colour.value, panel.selection = view, "verse", (0, 0.5, 2.5)
    panel.only_selection.value = only
    assert panel.failure is None, panel.failure
    names = {"session": session_moss, "batch": batch, "annotations": panel.annotations}
    exec(panel.code(), names)
    field = "points" if view == "projection" else "values"
    np.testing.assert_allclose(getattr(names["result"], field), getattr(panel.result, field), rtol=1e-5, atol=1e-8)
    assert names["figure"].axes
    assert ("nothing else is looked at" in panel.describe()) == only
    panel.code_button.click()
    assert "result = " in panel.code_view.value


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_has_words_a_picture_a_table_and_its_own_controls(panel, view):
    panel.view.value = view
    twin = panel.static()
    assert twin.pictures[0].png.startswith(b"\x89PNG") and twin.pictures[0].alt == panel.figure.alt
    assert VIEWS[view] in panel.describe() and repr(panel) == panel.describe() == repr(twin)
    assert all(len(row) == len(twin.tables[0].head) for row in twin.tables[0].rows)
    assert "MiB of states are kept" in panel.note.value
    for name in ("source", "layer", "other_source", "other_layer", "layers", "colour", "centered"):
        control = getattr(panel, name)
        assert (control.layout.display != "none") == (name in USES[view]) and control.description
    bundle = panel._repr_mimebundle_()
    assert bundle["text/plain"] == panel.describe() and "image/png" in bundle


def test_a_slider_asks_the_small_model_once(panel, session_moss, monkeypatch):
    monkeypatch.setattr(session_moss, "extract_contextual_embeddings", None)
    panel.view.value = "self"
    pictures = set()
    for layer in range(session_moss.n_layers + 1):
        panel.layer.value = layer
        pictures.add(panel.figure.png)
    assert panel.failure is None and len(pictures) == session_moss.n_layers + 1


def test_only_what_is_shown_is_computed_where_all_is_too_much(session_moss, batch, monkeypatch):
    panel = LayerPanel(session_moss, batch)
    panel.wait()
    panel.view.value, panel.layer.value = "self", 0
    panel.states.keeps_all = False
    panel.states.cache.clear()
    asked, extract = [], session_moss.extract_contextual_embeddings
    monkeypatch.setattr(
        session_moss,
        "extract_contextual_embeddings",
        lambda b, layers: (asked.append(list(layers)), extract(b, layers))[1],
    )
    panel.layer.value = 1
    panel.wait()
    panel.layer.value = 2
    assert "layer 2" in panel.describe()
    panel.layer.value = 1
    panel.wait()
    assert asked == [[1], [2]] and panel.states.cache.nbytes == batch.nbytes((1, 2))
    panel.close()
    assert not len(panel.states.cache)


def test_labels_colour_a_projection(panel):
    panel.view.value = "projection"
    panel.annotations = {"verse": VERSE}
    assert panel.colour.options == ("time", "verse")
    panel.colour.value = "verse"
    assert "Coloured by verse" in panel.describe() and "b 1.04 s" in panel.describe()
    assert [row[0] for row in panel.static().tables[0].rows] == ["all tokens", "a", "b"]
    panel.annotations = {"verse": ([[0.0, 4.0]], ["c"])}
    assert "c 4.00 s" in panel.describe(), "new labels under the same name are drawn"
    panel.annotations = {}
    assert panel.colour.value == "time" and "Coloured" not in panel.describe()


def test_the_timeline_moves_it_and_is_moved(panel, batch):
    timeline = TimelinePanel(batch)
    timeline.select(0, 1.0, 2.0).seek(1.5)
    before = panel.figure.png
    assert panel.follow(timeline) is panel
    assert panel.figure.png != before and panel.figure.cursor_s == 1.5
    assert "selected: source 0, 1.000-2.000 s" in panel.describe() and "cursor: source 0, 1.500 s" in panel.describe()
    click(panel, 3.0)
    assert timeline.cursor_s == pytest.approx(3.0) and timeline.source == 0
    timeline.seek(0.25, 1)
    assert panel.source.value == 1 and panel.figure.cursor_s == 0.25
    timeline.close()
    panel.source.value = 0
    assert panel.figure.cursor_s is None, "the cursor is in another source"


def test_the_cursor_runs_along_the_axes_of_its_source(panel, batch):
    timeline = TimelinePanel(batch)
    panel.view.value, panel.source.value, panel.other_source.value = "cross", 0, 1
    panel.follow(timeline)
    timeline.seek(2.0, 0)
    assert [box["along"] for box in panel.figure.boxes] == ["y"] and panel.figure.cursor_s == 2.0
    click(panel, 0.5, 3.0)
    assert (timeline.source, timeline.cursor_s) == (0, pytest.approx(3.0))
    timeline.seek(1.0, 1)
    assert [box["along"] for box in panel.figure.boxes] == ["x"] and panel.source.value == 0, "both are shown already"
    click(panel, 0.5, 3.0)
    assert (timeline.source, timeline.cursor_s) == (1, pytest.approx(0.5))
    panel.other_source.value = 0
    timeline.seek(1.0, 0)
    assert [box["along"] for box in panel.figure.boxes] == ["xy"]
    timeline.close()


def test_clicking_a_point_seeks_its_token(panel, batch):
    timeline = TimelinePanel(batch)
    panel.follow(timeline).view.value = "projection"
    x, y = panel.result.points[7]
    click(panel, x, y)
    assert timeline.cursor_s == pytest.approx(batch.timeline[0].token_to_time(7)[0]) == panel.figure.cursor_s
    assert np.frombuffer(panel.figure.track, "<f4").reshape(-1, 3)[7, 0] == pytest.approx(timeline.cursor_s)
    click(panel, 0.5, 1.0, axes=1)
    assert timeline.cursor_s == pytest.approx(batch.timeline[0].token_to_time(7)[0]), "the scale of colours is no place"
    timeline.close()


def test_it_works_alone(panel):
    click(panel, 2.0)
    assert panel.cursor == (0, pytest.approx(2.0)) and panel.figure.cursor_s == pytest.approx(2.0)
    panel.cursor = ()
    assert panel.figure.cursor_s is None


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda p: setattr(p, "selection", (0, 1000, 2000)), "did you pass milliseconds"),
        (lambda p: setattr(p, "selection", (9, 0.0, 1.0)), "source 9 is not one of the batch's 2"),
        (lambda p: setattr(p, "cursor", (0, 99.0)), "outside"),
        (lambda p: setattr(p, "annotations", {"time": VERSE}), "may not be called 'time'"),
        (lambda p: setattr(p, "annotations", {"x": VERSE[0]}), "must be"),
        (lambda p: setattr(p, "annotations", {"x": ([[0, 1]], ["a", "b"])}), "one label an interval"),
        (lambda p: setattr(p, "annotations", {"x": ([[1000.0, 2000.0]], ["a"])}), "no token of"),
        (lambda p: setattr(p, "annotations", {"x": {5: VERSE}}), "source 5"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_cure(panel, act, said):
    with pytest.raises(ArgumentError, match=said):
        act(panel)
    assert panel.selection == panel.cursor == () and panel.annotations == {}


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_constructor_refuses(session_moss, session_mf, batch):
    gc.collect()
    before = len(_instances)
    with pytest.raises(ArgumentError, match="prepare the requests with this session"):
        LayerPanel(session_mf, batch)
    with pytest.raises(ArgumentError, match="no audio to show"):
        LayerPanel(session_moss, session_moss.prepare([Request("only text")]))
    with pytest.raises(ArgumentError, match="larger limit_bytes"):
        LayerPanel(session_moss, batch, cache_bytes=10)
    gc.collect()
    assert len(_instances) == before
    panel = LayerPanel(session_moss, batch)
    timeline = TimelinePanel(session_moss.prepare([Request("x", [noise(9_000)])]))
    with pytest.raises(ArgumentError, match="of another batch"):
        panel.follow(timeline)
    panel.close()
    timeline.close()


def test_errors_are_shown_in_the_panel(panel):
    before = panel.figure.png
    panel.layers.value = ()
    assert "no layer is chosen" in alert(panel) and panel.figure.png == before
    panel.layers.value = (1,)
    assert panel.failure is None and "alert" not in panel.message.value
    panel.only_selection.value = True
    assert "nothing is selected" in alert(panel)
    panel.selection = (0, 1.01, 1.02)
    assert "no token" in alert(panel)
    panel.selection = (0, 1.0, 2.0)
    assert panel.failure is None
    panel.selection = ()
    assert panel.only_selection.value is False and panel.failure is None


def test_a_busy_session_is_said_and_can_be_asked_again(session_moss, batch):
    session_moss._running.append(object())
    try:
        panel = LayerPanel(session_moss, batch)
        panel.wait()
        assert "in the middle of another call" in alert(panel) and panel.describe().endswith("nothing is shown yet")
        assert panel.static().pictures == ()
    finally:
        session_moss._running.clear()
    panel.anew_button.click()
    assert "norms over time" in panel.describe() and panel.failure is None
    panel.close()


def test_what_is_chosen_while_busy_is_shown_at_last(panel, held):
    there, go = held
    panel.compute_anew()
    assert there.wait(60) and panel.busy and panel.progress.layout.display == ""
    panel.view.value = "self"
    panel.layer.value = 1
    panel.anew_button.click()
    assert "norms" in panel._told(), "the old picture stays"
    go.set()
    assert "self-similarity of a layer, source 0 waveform 1 layer 1" in panel.describe() and not panel.busy


def test_cancel_leaves_the_picture_and_the_model(panel, held, session_moss):
    there, go = held
    before = panel.figure.png
    panel.compute_anew()
    assert there.wait(60)
    panel.view.value = "self"
    panel.cancel_button.click()
    go.set()
    panel.wait()
    assert "cancelled" in panel.message.value and panel.figure.png == before and not panel.busy
    panel.anew_button.click()
    assert "self-similarity" in panel.describe()


def test_dark_draws_again_without_computing(panel, session_moss, monkeypatch):
    monkeypatch.setattr(session_moss, "extract_contextual_embeddings", None)
    panel.states.cache.clear()
    before = panel.figure.png
    panel.skin.dark = True
    assert panel.figure.png != before and panel.failure is None


def test_close_frees_everything_and_lets_go_of_the_timeline(session_moss, batch):
    gc.collect()
    before = len(_instances)
    timeline = TimelinePanel(batch)
    for _ in range(2):
        panel = LayerPanel(session_moss, batch).follow(timeline)
        panel.wait()
        panel.close()
        panel.close()
    gone = weakref.ref(panel)
    del panel
    timeline.seek(1.0)
    timeline.close()
    gc.collect()
    assert len(_instances) == before and gone() is None


def test_closing_while_the_model_runs_takes_its_hooks_off(session_moss, batch, held):
    there, go = held
    clean = hooks(session_moss)
    panel = LayerPanel(session_moss, batch)
    assert there.wait(60)
    threading.Timer(0.2, go.set).start()
    panel.close()
    assert hooks(session_moss) == clean and not session_moss._running
