"""The panels together in a real JupyterLab: from the picker to an answer, cancel, errors, restart, themes and names."""

from __future__ import annotations

import json
import re

import pytest

SETUP = """from audiollm.widgets import explore
explorer = explore("moss_music")
explorer"""
STATE = """import json
print(json.dumps(dict(
    audios=[getattr(a, "name", str(a)) for a in explorer.picker.audios],
    names=None if explorer.batch is None else [slot.name for slot in explorer.batch.slots],
    selection=explorer.timeline.selection if explorer.timeline else None,
    marked=explorer._layers.selection if explorer._layers else None,
    cursor=explorer.timeline.cursor_s if explorer.timeline else None,
    effect=bool(explorer._hooks and explorer._hooks.effect),
    hooks=sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in explorer.session.model.modules()),
    answer=explorer.generator.answer.text if explorer.generator.answer else None,
    said=explorer.generator.text)))"""
CONTROLS = (
    r"^\s*- '?(button|slider|textbox|combobox|listbox|checkbox|spinbutton|img|tab|progressbar|group|table)\b(?! \")"
)


@pytest.fixture
def opened(lab, page, request):
    name = lab.write(f"{request.node.name}.ipynb", SETUP, STATE)
    page.set_viewport_size({"width": 1280, "height": 1500})
    lab.open(page, name)
    lab.run_cell(page, 0)
    page.get_by_text("Prepared: mix.flac, bass.flac").wait_for()
    return page


def state(lab, page) -> dict:
    return json.loads(lab.run_cell(page, 1))


def tab(page, name: str) -> None:
    page.get_by_role("tab", name=name, exact=True).click()


def drag(page, start_s: float, end_s: float, longest_s: float = 12.0) -> None:
    """Select seconds of the first source on the timeline."""
    stage = page.locator(".audiollm-stage")
    stage.locator("xpath=self::*[@aria-valuenow]").wait_for()
    stage.scroll_into_view_if_needed()
    box = stage.bounding_box()
    x = [box["x"] + second / longest_s * box["width"] for second in (start_s, end_s)]
    page.mouse.move(x[0], box["y"] + 80)
    page.mouse.down()
    page.mouse.move(x[1], box["y"] + 80, steps=6)
    page.mouse.up()


def there_is_one_and_it_works(lab, page) -> None:
    """One Explorer is on the page, and the kernel hears what the mouse selects in it."""
    page.get_by_text("Prepared: mix.flac, bass.flac").wait_for()
    assert page.locator(".audiollm-panel .widget-tab").count() == 1
    tab(page, "Timeline")
    drag(page, 1.0, 2.0)
    assert state(lab, page)["selection"][1:] == pytest.approx([1, 2], abs=0.06)


def test_from_the_picker_to_an_answer(lab, opened):
    page = opened
    lab.shoot(page, "explorer_audio", ".audiollm-panel")
    # Another clip, and prepare anew.
    page.get_by_role("combobox", name="demo clip").select_option("drums")
    page.get_by_role("button", name="Add clip").click()
    page.get_by_text("Sources or prompt have changed").wait_for()
    page.get_by_role("button", name="Prepare", exact=True).click()
    page.get_by_text("Prepared: mix.flac, bass.flac, drums.flac").wait_for()
    # Select with the mouse; every panel follows.
    tab(page, "Timeline")
    drag(page, 2.0, 4.0)
    lab.shoot(page, "explorer_timeline", ".audiollm-panel")
    tab(page, "Layers")
    picture = page.get_by_role("img", name=re.compile("source 0")).last
    picture.wait_for()
    seen = state(lab, page)
    assert seen["selection"][0] == 0 and seen["selection"][1:] == pytest.approx([2, 4], abs=0.06)
    assert seen["marked"] == seen["selection"], "the layer view marks what was dragged"
    lab.shoot(page, "explorer_layers", ".audiollm-panel")
    # Click a column of the picture: the timeline seeks there.
    box = picture.bounding_box()
    page.mouse.click(box["x"] + 0.5 * box["width"], box["y"] + 0.5 * box["height"])
    page.wait_for_timeout(300)
    moved = state(lab, page)["cursor"]
    assert 3 < moved < 9 and moved != seen["cursor"]
    # Edit the selection, and see what changes.
    tab(page, "Hooks")
    page.get_by_role("textbox", name="filter").last.fill("resid[2]")
    page.get_by_role("listbox", name="place").select_option(index=0)
    page.get_by_role("combobox", name="do", exact=True).select_option("zero")
    page.get_by_role("combobox", name="tokens", exact=True).select_option(label="the selection")
    page.get_by_role("button", name="Attach", exact=True).click()
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_role("img", name=re.compile("Effect")).first.wait_for()
    lab.shoot(page, "explorer_hooks", ".audiollm-panel")
    # Ask.
    tab(page, "Generate")
    page.get_by_role("spinbutton", name="budget").fill("12")
    page.get_by_role("spinbutton", name="budget").press("Enter")
    page.get_by_role("button", name="Generate", exact=True).click()
    page.get_by_text(re.compile(r"tokens; (the model|the budget) ended it")).wait_for()
    lab.shoot(page, "explorer_generate", ".audiollm-panel")
    seen = state(lab, page)
    assert seen["effect"] and seen["hooks"] == 0, "nothing stays on the model"
    assert seen["answer"] == seen["said"] is not None
    assert seen["names"] == ["mix.flac", "bass.flac", "drums.flac"]
    assert page.js_errors == []


def test_tokens_and_timeline_choose_each_other_by_keys(lab, opened):
    page = opened
    tab(page, "Timeline")
    table = page.get_by_role("treegrid")
    table.wait_for()
    cells = page.locator(".jp-Notebook .jp-Cell").count()
    run = table.get_by_role("row", name=re.compile("audio of source 1")).first
    run.click()
    for key in ("b", "b", "a", "d", "d", "x"):
        page.keyboard.press(key)
    assert page.locator(".jp-Notebook .jp-Cell").count() == cells, "keys stay in the table"
    page.keyboard.press("Enter")
    chosen = state(lab, page)["selection"]
    assert chosen[0] == 1 and chosen[1] < chosen[2], "an audio run selects its seconds"
    run.click()
    before = table.get_by_role("row").count()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("n => document.querySelectorAll('[role=treegrid] [role=row]').length > n", arg=before)
    page.keyboard.press("ArrowLeft")
    page.wait_for_function("n => document.querySelectorAll('[role=treegrid] [role=row]').length === n", arg=before)
    drag(page, 4.1, 5.0)
    page.wait_for_function("() => document.querySelector('[role=treegrid] [role=row][aria-selected=true]')")
    assert page.js_errors == []


def test_an_error_is_shown_and_the_panel_goes_on(lab, opened):
    page = opened
    tab(page, "Hooks")
    page.get_by_role("listbox", name="place").wait_for()
    page.get_by_role("combobox", name="tokens", exact=True).select_option(label="the selection")
    page.get_by_role("button", name="Attach", exact=True).click()
    page.get_by_role("alert").get_by_text("nothing is selected").wait_for()
    lab.shoot(page, "error", ".audiollm-panel")
    page.get_by_role("combobox", name="tokens", exact=True).select_option(label="all")
    page.get_by_role("button", name="Attach", exact=True).click()
    page.wait_for_function("() => !document.querySelector('[role=alert]')?.innerText?.includes('nothing is selected')")
    assert page.js_errors == []


def test_cancel_stops_work_between_blocks(lab, page, request):
    """A model whose second block waits for the test, which cancels meanwhile."""
    slow = """import threading
from audiollm import Request, demo
from audiollm.widgets import LayerPanel
session = demo.load("moss_music")
batch = session.prepare([Request("Listen.", [demo.clips()["bass"]])])
point = next(point for point in session.points() if point.name == "resid[1]")
gate = threading.Event()
handle = point.module.register_forward_pre_hook(lambda *_: gate.wait(60) and None)
panel = LayerPanel(session, batch)
panel"""
    after = """gate.set(); panel.wait(); handle.remove()
print(panel.result, panel.failure, panel.busy, sum(len(m._forward_pre_hooks) for m in session.model.modules()))"""
    lab.open(page, lab.write(f"{request.node.name}.ipynb", slow, after))
    lab.run_cell(page, 0)
    page.get_by_role("button", name="Cancel", exact=True).click()
    assert lab.run_cell(page, 1).split() == ["None", "None", "False", "0"]
    page.get_by_role("status").get_by_text("cancelled").wait_for()
    assert page.js_errors == []


def test_a_restarted_kernel_leaves_no_ghost(lab, opened):
    page = opened
    lab.run_cell(page, 0)  # [2], so that [1] after the restart is another number
    page.evaluate("async () => { await window.jupyterapp.shell.currentWidget.sessionContext.restartKernel(); }")
    lab.run_cell(page, 0)
    there_is_one_and_it_works(lab, page)


def test_a_cell_that_is_run_again_has_one_panel_that_works(lab, opened):
    page = opened
    lab.run_cell(page, 0)
    there_is_one_and_it_works(lab, page)
    assert page.js_errors == []


def test_every_control_has_a_name_in_both_themes(lab, opened):
    page = opened
    for theme in ("JupyterLab Light", "JupyterLab Dark"):
        page.evaluate("theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})", theme)
        page.wait_for_function("theme => document.body.dataset.jpThemeName === theme", arg=theme)
        for name in ("Audio", "Timeline", "Layers", "Hooks", "Generate"):
            tab(page, name)
            page.wait_for_timeout(1200)  # names are given, and pictures drawn, after what is new has been shown
            told = page.locator(".audiollm-panel").first.aria_snapshot()
            assert page.get_by_text("javascript error").count() == 0, (name, "a widget that cannot be drawn")
            bare = [line.strip() for line in told.splitlines() if re.match(CONTROLS, line)]
            assert not bare, (theme, name, bare)
            lab.shoot(page, f"{name.lower()}_{theme.split()[-1].lower()}", ".audiollm-panel")
    assert page.evaluate(DIM) == [], "text that can hardly be read on the dark ground"
    assert page.js_errors == []


# Text of the panel whose contrast with what lies behind it is under 4.5 (WCAG 2.1, AA).
DIM = """() => {
  const light = c => { const [r, g, b] = c.slice(0, 3).map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const ground = el => { for (; el; el = el.parentElement) { const c = parse(getComputedStyle(el).backgroundColor);
    if (c.length === 3 || c[3] > 0.5) return c; } return [255, 255, 255]; };
  const found = new Set();
  const walk = document.createTreeWalker(document.querySelector('.audiollm-panel'), NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const el = walk.currentNode.parentElement, text = walk.currentNode.data.trim();
    if (!text || !el.offsetParent || el.closest(':disabled, svg, script, style, option')) continue;
    const [a, b] = [light(parse(getComputedStyle(el).color)), light(ground(el))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) found.add(text.slice(0, 40));
  }
  return [...found];
}"""
