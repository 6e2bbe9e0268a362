"""What all panels share: errors shown, one job at a time, cancel, threads, twins, closing, and cells run twice."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import ipywidgets
import pytest
import traitlets
from audiollm.widgets.figure_view import FigureView, SecondsAxis, rendered
from audiollm.widgets.panel import Panel
from audiollm.widgets.static_view import Picture, StaticView, Table
from ipywidgets.widgets.widget import _instances
from looking import hooks, noise

from audiollm import ArgumentError, Request, demo


class Trial(Panel):
    """A panel with a slider and a button, as the tests need one."""

    heading = "Trial"

    def __init__(self) -> None:
        self.go = ipywidgets.Button(description="Run")
        self.layer = ipywidgets.IntSlider(description="layer", max=11)
        self.seen: list[int] = []
        self.result: object = None
        self.pause = threading.Event()
        super().__init__([self.go, self.layer])
        self.on_click(self.go, self.run)
        self.on_change(self.layer, "value", self.moved)

    def moved(self) -> None:
        if self.layer.value == 7:
            raise ArgumentError("layer <7> is not there", code="bad_argument", source="layer")
        if self.layer.value == 8:
            raise ZeroDivisionError("by zero")
        self.seen.append(self.layer.value)

    def run(self) -> bool:
        return self.start(self.work, self.take)

    def work(self, job) -> int:
        for step in range(200):
            job.report(step / 200)
            if self.pause.wait(0.005):
                raise ArgumentError("broke in the work", code="bad_argument", source="work")
        return 42

    def take(self, result: object) -> None:
        self.result = result

    def static(self) -> StaticView:
        return StaticView("Trial <in> words", (Picture(b"\x89PNG", 'a "picture"'),), (Table("t", ("a",), (("<b>",),)),))


@pytest.fixture
def panel():
    panel = Trial()
    yield panel
    panel.close()


def test_an_error_of_the_engine_is_shown_in_its_words(panel, caplog):
    panel.layer.value = 7
    assert 'role="alert"' in panel.message.value and "layer &lt;7&gt; is not there" in panel.message.value
    assert isinstance(panel.failure, ArgumentError) and not caplog.records
    panel.layer.value = 8
    assert "ZeroDivisionError: by zero" in panel.message.value
    assert "in a callback of Trial" in caplog.text, "what is not the engine's own is logged with its trace"


def test_one_job_at_a_time_and_it_ends(panel):
    panel.go.click()
    assert panel.busy and not panel.run(), "a second click does nothing"
    job = panel._job
    panel.go.click()
    assert panel._job is job
    panel.wait()
    assert panel.result == 42 and not panel.busy and "done" in panel.message.value
    assert panel.cancel_button.layout.display == "none" == panel.progress.layout.display
    panel.go.click()
    assert panel._job is not job
    panel.cancel()


def test_cancel_stops_and_says_so(panel):
    panel.go.click()
    time.sleep(0.05)
    started = time.perf_counter()
    panel.cancel_button.click()
    panel.wait()
    assert time.perf_counter() - started < 0.5
    assert "cancelled" in panel.message.value and panel.result is None and not panel.busy


def test_an_error_in_the_work_is_shown(panel):
    panel.pause.set()
    panel.go.click()
    panel.wait()
    assert "broke in the work" in panel.message.value and not panel.busy and panel.result is None


def test_an_interrupt_of_the_waiting_cell_cancels(panel, monkeypatch):
    panel.go.click()

    def interrupted(timeout=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(panel._job, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            panel.wait()
    panel.wait()
    assert "cancelled" in panel.message.value


def test_callbacks_of_several_threads_are_serial(panel):
    inside, overlaps = [], []

    def slow(_: object) -> None:
        inside.append(1)
        overlaps.append(len(inside) > 1)
        time.sleep(0.001)
        inside.pop()

    act = panel.guarded(slow)
    threads = [threading.Thread(target=lambda: [act(None) for _ in range(20)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(overlaps) == 80 and not any(overlaps)


class Followed(traitlets.HasTraits):
    cursor_s = traitlets.Float(0)


def counted(panel: Panel, views: int) -> None:
    state = {"_view_count": views}
    panel._handle_msg({"content": {"data": {"method": "update", "state": state, "buffer_paths": []}}, "buffers": []})


def test_a_panel_that_left_the_page_follows_no_more(panel):
    """A cell run again makes a new panel; the one it replaces must not work any more."""
    other, seen = Followed(), []
    panel.follow_trait(other, "cursor_s", seen.append)
    other.cursor_s = 1.0
    counted(panel, 1)
    other.cursor_s = 2.0
    counted(panel, 0)
    other.cursor_s = 3.0
    assert seen == [1.0, 2.0] and panel.is_away
    counted(panel, 1)
    other.cursor_s = 4.0
    assert seen == [1.0, 2.0, 4.0], "shown again, it follows again"
    panel.close()
    other.cursor_s = 5.0
    assert seen == [1.0, 2.0, 4.0] and not other._trait_notifiers["cursor_s"]["change"]


def test_the_twin_shows_without_a_kernel(panel):
    bundle = panel._repr_mimebundle_()
    assert bundle["text/plain"] == "Trial <in> words" and "application/vnd.jupyter.widget-view+json" in bundle
    html = panel.static()._repr_html_()
    assert "Trial &lt;in&gt; words" in html and 'alt="a &quot;picture&quot;"' in html and "&lt;b&gt;" in html
    assert StaticView("x", tables=(Table("t", ("a",), ()),)).bundle()["text/html"].startswith("<table>")


def test_close_cancels_and_frees_everything():
    gc.collect()
    before = len(_instances)
    panel = Trial()
    panel.layer.value = 3
    panel.go.click()
    gone = weakref.ref(panel)
    panel.close()
    assert not panel.busy
    panel.go.click()
    assert repr(panel) == "Trial(closed)"
    del panel
    gc.collect()
    assert len(_instances) == before and gone() is None


def test_cancel_leaves_the_model_within_its_blocks_without_a_hook():
    session = demo.load("moss_music")
    batch = session.prepare([Request("Listen.", [noise(16_000)])])
    before = hooks(session)
    panel, passed = Trial(), []

    def work(job):
        with job.watching(session):
            assert hooks(session) != before
            job._progress = lambda fraction, text: (passed.append(text), job.stop.set())
            session.forward(batch)

    panel.start(work, panel.take)
    panel.wait()
    assert "cancelled" in panel.message.value and passed == ["block 0"]
    assert hooks(session) == before
    session.forward(batch)
    panel.close()


# Figures in the browser


@pytest.fixture
def figure():
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4, 2))
    left, right = figure.subplots(1, 2)
    left.set_xlim(0, 10)
    left.set_ylim(0, 1)
    right.set_xlim(5, 6)
    right.set_ylim(-1, 1)
    return figure


def clicked(view: FigureView, x: float, y: float) -> None:
    view._handle_custom_msg({"event": "click", "x": x, "y": y}, [])


def test_a_click_is_told_in_data_coordinates(figure):
    view, seen = FigureView(), []
    view.on_point(lambda *place: seen.append(place))
    view.show(figure, "two axes", seconds=[SecondsAxis(figure.axes[0])])
    box = figure.axes[0].get_position()
    clicked(view, box.x0 + 0.25 * box.width, box.y0 + 0.5 * box.height)
    box = figure.axes[1].get_position()
    clicked(view, box.x0 + 0.5 * box.width, box.y0)
    clicked(view, 0.001, 0.001)
    view._handle_custom_msg({"event": "other"}, [])
    assert seen == [(0, pytest.approx(2.5), pytest.approx(0.5)), (1, pytest.approx(5.5), pytest.approx(-1))]
    assert view.alt == "two axes" and view.picture.png.startswith(b"\x89PNG")
    assert view.boxes[0]["x"] == [0, 10]
    view.close()


def test_dark_pictures_differ_and_pictures_are_the_same_every_time(figure):
    light = rendered(figure)
    assert light == rendered(figure)
    assert rendered(figure, dark=True) != light


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_panel_that_its_constructor_refused_is_let_go_in_silence():
    class Refusing(Trial):
        def __init__(self) -> None:
            raise ArgumentError("no", code="bad_argument", source="x")

    with pytest.raises(ArgumentError):
        Refusing()
    gc.collect()


def test_a_cell_that_shows_a_busy_panel_does_not_wait_for_ever(panel, monkeypatch):
    monkeypatch.setattr("audiollm.widgets.panel._FIRST_WAIT_S", 0.05)
    panel.go.click()
    bundle = panel._repr_mimebundle_()
    assert panel.busy and bundle["text/plain"] == "Trial: work is under way"
    assert "application/vnd.jupyter.widget-view+json" in bundle and "image/png" not in bundle
    panel.wait()
    assert "image/png" in panel._repr_mimebundle_()
