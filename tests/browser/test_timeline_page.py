"""The timeline in a real JupyterLab: seek, play, select, loop, zoom, keys that stay in it."""

from __future__ import annotations

import itertools
import json
import re

import numpy as np
import pytest
from audiollm.widgets.skin import asset
from audiollm.widgets.track import track

from audiollm import Request, Waveform, demo

SETUP = """from audiollm import Request, demo
from audiollm.widgets import TimelinePanel
session = demo.load("moss_music")
clips = demo.clips()
batch = session.prepare([Request("Compare.", [clips["long_mix"], clips["bass"]])])
panel = TimelinePanel(batch)
panel"""
STATE = """import json
print(json.dumps(dict(source=panel.source, cursor_s=panel.cursor_s, selection=panel.selection,
    tokens=panel.selected_tokens, view=panel.view.view, playing=panel.view.playing, loop=panel.view.loop)))"""


@pytest.fixture
def opened(lab, page, request):
    name = lab.write(f"{request.node.name}.ipynb", SETUP, STATE)
    lab.open(page, name)
    lab.run_cell(page, 0)
    page.locator(".audiollm-stage").wait_for()
    page.locator(".audiollm-stage[aria-valuenow]").wait_for()
    page.locator(".audiollm-stage").scroll_into_view_if_needed()
    return page


def state(lab, page) -> dict:
    return json.loads(lab.run_cell(page, 1))


def second_to_x(page, second: float, shown=(0.0, 36.0)) -> float:
    box = page.locator(".audiollm-stage").bounding_box()
    return box["x"] + (second - shown[0]) / (shown[1] - shown[0]) * box["width"]


def row_y(page, source: int) -> float:
    return page.locator(".audiollm-stage").bounding_box()["y"] + 20 + 184 * source + 60


def test_click_seeks_and_drag_selects_in_seconds_and_tokens(lab, opened):
    page = opened
    page.mouse.click(second_to_x(page, 10), row_y(page, 0))
    seen = state(lab, page)
    assert seen["cursor_s"] == pytest.approx(10, abs=0.05) and seen["source"] == 0
    page.mouse.move(second_to_x(page, 2), row_y(page, 1))
    page.mouse.down()
    page.mouse.move(second_to_x(page, 4), row_y(page, 1), steps=5)
    page.mouse.up()
    seen = state(lab, page)
    assert seen["source"] == 1 and seen["selection"][0] == 1
    assert seen["selection"][1:] == pytest.approx([2, 4], abs=0.06)
    first, last = seen["tokens"][1:]
    assert abs(first * 0.08 - 2) < 0.13 and abs((last + 1) * 0.08 - 4) < 0.13
    assert seen["cursor_s"] == pytest.approx(2, abs=0.06)
    lab.shoot(page, "timeline", ".audiollm-panel")
    page.locator(".audiollm-stage").press("Escape")
    assert state(lab, page)["selection"] == []
    assert page.js_errors == []


def test_it_plays_smoothly_from_slices_and_loops(lab, opened):
    page = opened
    stage = page.locator(".audiollm-stage")
    stage.focus()
    page.mouse.click(second_to_x(page, 9.5), row_y(page, 0))
    # Every picture's cursor over a slice's border at 10 s: it must run, never jump.
    page.evaluate(
        """() => { window.seen = []; const stage = document.querySelector('.audiollm-stage');
        new MutationObserver(() => window.seen.push([performance.now(), +stage.getAttribute('aria-valuenow')]))
            .observe(stage, {attributes: true, attributeFilter: ['aria-valuenow']}); }"""
    )
    stage.press(" ")
    page.wait_for_function("() => +document.querySelector('.audiollm-stage').getAttribute('aria-valuenow') > 11")
    stage.press(" ")
    page.get_by_role("button", name="Play", exact=True).wait_for()
    seen = page.evaluate("() => window.seen")
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(seen)]
    assert len(seen) > 25, "the cursor is drawn picture by picture"
    assert min(step for _, step in steps) >= -0.02, "it never runs backwards"
    elapsed, moved = seen[-1][0] - seen[0][0], seen[-1][1] - seen[0][1]
    assert moved == pytest.approx(elapsed / 1000, abs=0.35), "a second of audio takes a second"
    now = state(lab, page)
    assert 11 <= now["cursor_s"] < 13 and not now["playing"]
    # A loop comes back to its start, and stays within the selection.
    page.mouse.move(second_to_x(page, 5), row_y(page, 0))
    page.mouse.down()
    page.mouse.move(second_to_x(page, 5.6), row_y(page, 0), steps=4)
    page.mouse.up()
    stage.press("l")
    page.evaluate("() => { window.seen.length = 0; }")
    stage.press(" ")
    page.wait_for_timeout(2500)
    stage.press(" ")
    values = [value for _, value in page.evaluate("() => window.seen")]
    wraps = sum(b < a - 0.2 for a, b in itertools.pairwise(values))
    assert wraps >= 2
    assert min(values) >= 4.9 and max(values) <= 5.75
    assert state(lab, page)["loop"]
    assert page.js_errors == []


def test_keys_move_and_zoom_and_do_not_reach_the_notebook(lab, opened):
    page = opened
    stage = page.locator(".audiollm-stage")
    cells = page.locator(".jp-Notebook .jp-Cell").count()
    page.mouse.click(second_to_x(page, 10), row_y(page, 0))
    for key in ("b", "b", "a", "x", "d", "d", "Enter", "z"):
        stage.press(key)
    assert page.locator(".jp-Notebook .jp-Cell").count() == cells
    stage.press("ArrowRight")
    stage.press("Shift+ArrowRight")
    stage.press("ArrowLeft")
    assert state(lab, page)["cursor_s"] == pytest.approx(15, abs=0.05)
    stage.press("+")
    stage.press("+")
    view = state(lab, page)["view"]
    assert view[1] - view[0] == pytest.approx(9, abs=0.01) and view[0] < 15 < view[1]
    stage.press("-")
    stage.press("0")
    assert state(lab, page)["view"] == [0, 36]
    stage.press("End")
    assert state(lab, page)["cursor_s"] == pytest.approx(36)
    stage.press("ArrowDown")
    now = state(lab, page)
    assert now["source"] == 1 and now["cursor_s"] == pytest.approx(12), "the shorter source's end"
    stage.press("Home")
    assert state(lab, page)["cursor_s"] == 0
    page.keyboard.down("Control")
    page.mouse.move(second_to_x(page, 6), row_y(page, 0))
    page.mouse.wheel(0, -120)
    page.keyboard.up("Control")
    page.wait_for_timeout(300)
    view = state(lab, page)["view"]
    assert view[1] - view[0] < 36
    assert page.js_errors == []


def test_the_pointer_tells_where_it_is_and_zooming_draws_finer(lab, opened):
    page = opened
    stage = page.locator(".audiollm-stage")
    for _ in range(5):
        stage.press("+")
    page.wait_for_timeout(800)
    start, end = state(lab, page)["view"]
    assert end - start == pytest.approx(36 / 32, abs=0.02)
    x = second_to_x(page, start + 0.7, (start, end))
    page.mouse.move(x, row_y(page, 0))
    said = page.locator(".audiollm-bar output").inner_text()
    assert re.fullmatch(r"0: [\d.]+ s · mel frame \d+ · window \d+ · token \d+ · position \d+", said.strip()), said
    assert float(said.split()[1]) == pytest.approx(start + 0.7, abs=0.01)
    lab.shoot(page, "timeline_zoomed", ".audiollm-panel")
    assert page.js_errors == []


@pytest.mark.parametrize("family", demo.SNAPSHOTS)
def test_the_browser_counts_as_the_engine_does(browser, family):
    """Every unit of a second, edges of tokens, frames and windows among them, for sources of odd lengths."""
    if not hasattr(browser, "new_page"):
        pytest.skip("no browser")
    session = demo.load(family)
    lengths = [480_000, 480_005, 79_999, 16_001]
    batch = session.prepare([Request("Hm.", [Waveform(np.zeros(n, np.float32) + 0.01, 16_000) for n in lengths])])
    page = browser.new_page()
    page.goto("about:blank")
    page.evaluate(
        """async source => { const url = URL.createObjectURL(new Blob([source], {type: 'text/javascript'}));
        window.moment = (await import(url)).moment; }""",
        asset("timeline.js") + "\nexport { moment };",
    )
    drawn = np.random.default_rng(0)
    for number, timeline in enumerate(batch.timeline):
        sent = {key: value for key, value in track(batch, number).items() if not isinstance(value, bytes)}
        edges = [k * timeline.clock.token_s for k in range(0, timeline.n_tokens, 7)]
        grid = [k / 16_000 for k in drawn.integers(0, timeline.n_samples + 1, 200)]
        seconds = [*edges, *grid, *drawn.uniform(0, timeline.used_s, 200), 0.0, timeline.used_s]
        seconds = [float(second) for second in seconds if second <= timeline.used_s]
        told = page.evaluate(
            "([track, seconds]) => seconds.map(s => { const m = moment(track, s); "
            "return [m.frame, m.window, m.token, m.position]; })",
            [{**sent, "where": timeline.positions.tolist()}, seconds],
        )
        assert [tuple(each) for each in told] == [tuple(timeline.at(second))[1:] for second in seconds]
    page.close()
