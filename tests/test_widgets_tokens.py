"""The token table without a browser: rows, folding, pages, both directions with the timeline, words, and closing."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
from audiollm.widgets import TimelinePanel, TokenTable
from audiollm.widgets.token_table import PAGE
from ipywidgets.widgets.widget import _instances
from looking import mixed_requests, noise

from audiollm import ArgumentError, Request, demo
from audiollm.batch import ROLES
from audiollm.plots.token_strip import ROLE_COLOURS


@pytest.fixture(scope="module")
def batch():
    return demo.load("moss_music").prepare(mixed_requests())


@pytest.fixture
def table(batch):
    table = TokenTable(batch)
    yield table
    table.close()


@pytest.fixture
def linked(batch, table):
    timeline = TimelinePanel(batch)
    yield timeline, table.follow(timeline)
    timeline.close()


def sent(table: TokenTable, **content) -> None:
    table.view._handle_custom_msg(content, [])


def rows(table: TokenTable) -> list[dict]:
    """All rows of all pages."""
    found = []
    for page in range(1, table.page.max + 1):
        table.page.value = page
        found += table.view.rows
    return found


def marked(table: TokenTable) -> list[str]:
    return [row["place"] for row in table.view.rows if row["selected"]]


def run_of(table: TokenTable, role: str = "audio"):
    return next(run for run in table.runs if run.role == role)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_unfolded_rows_are_the_tokens_of_the_batch(batch, table, which):
    table.request.value = which
    table.unfolded = tuple((which, run.first) for run in table.runs)
    tokens = [row for row in rows(table) if row["open"] is None]
    wanted = [token for token in batch.tokens if token.sample_index == which]
    assert [(int(r["place"]), int(r["id"]), r["role"]) for r in tokens] == [(t.position, t.id, t.role) for t in wanted]
    for row, token in zip(tokens, wanted, strict=True):
        assert row["text"] == token.text.replace("\n", "⏎")
        assert (row["source"] != "") == (token.source is not None)
        if token.marker_s is not None:
            assert row["seconds"] == f"{token.marker_s:g}"


def test_audio_is_one_row_until_it_is_unfolded(table):
    run = run_of(table)
    (head,) = [row for row in table.view.rows if row["first"] == run.first]
    assert head["open"] is False and f"{len(run)} ×" in head["text"] and head["seconds"] == "0.00-2.00"
    before = len(table.view.rows)
    sent(table, event="fold", first=run.first)
    assert table.unfolded == ((0, run.first),) and len(table.view.rows) == before + len(run)
    inner = [row for row in table.view.rows if row["inner"]]
    assert len(inner) == len(run) and inner[1]["seconds"] == "0.08-0.16"
    sent(table, event="fold", first=inner[3]["first"], inner=True)
    assert table.unfolded == () and len(table.view.rows) == before
    table.fold(run.first)
    table.fold_button.click()
    assert table.unfolded == ()
    table.fold(run_of(table, "user").first)
    assert table.unfolded == (), "text is never folded"


def test_a_run_and_a_token_are_chosen_on_the_timeline(linked):
    timeline, table = linked
    run = run_of(table)
    sent(table, event="choose", first=run.first, inner=False)
    assert table.selected == (0, 0, len(run) - 1) == timeline.selected_tokens
    assert timeline.selection == (0, 0.0, 2.0)
    table.fold(run.first)
    sent(table, event="choose", first=run.first + 3, inner=True)
    assert timeline.selected_tokens == (0, 3, 3) and timeline.selection == (0, pytest.approx(0.24), pytest.approx(0.32))
    sent(table, event="choose", first=run.first, inner=False)
    assert timeline.selected_tokens == (0, 0, 0), "an unfolded run's head is its first token's neighbour"
    sent(table, event="clear")
    assert timeline.selection == () and timeline.selected_tokens == ()


def test_a_time_marker_moves_the_cursor(linked, batch):
    timeline, table = linked
    table.request.value = 1
    (marker, *_) = [t for t in batch.tokens if t.sample_index == 1 and t.marker_s is not None]
    sent(table, event="choose", first=marker.position, inner=False)
    assert timeline.source == 1 and timeline.cursor_s == marker.marker_s and table.selected == ()
    sent(table, event="choose", first=run_of(table, "user").first, inner=False)
    assert table.selected == () and table.failure is None, "text has no time"


def test_the_timelines_selection_is_shown_with_its_request_and_page(linked):
    timeline, table = linked
    timeline.select(1, 1.0, 2.0)
    assert table.request.value == 1 and table.selected == (1, 12, 24)
    (head,) = [row for row in table.view.rows if row["selected"]]
    assert "13 selected: positions" in head["text"] and head["open"] is False
    run = next(run for run in table.runs if run.role == "audio" and run.slot == 1)
    table.fold(run.first)
    assert len(marked(table)) == 14, "the head and its 13 tokens"
    timeline.clear()
    assert table.selected == () and marked(table) == []
    timeline.select(2, 0.1, 0.2)
    assert table.request.value == 1 and table.selected[0] == 2


def test_a_selection_that_is_there_already_is_taken_over(batch):
    timeline = TimelinePanel(batch).select(0, 1.0, 1.5)
    table = TokenTable(batch).follow(timeline)
    assert table.selected == timeline.selected_tokens != ()
    told = []
    timeline.observe(lambda change: told.append(change.new), "selected_tokens")
    table.selected = (0, 2, 4)
    assert told == [(0, 2, 4)], "told once, not back and forth"
    table.close()
    timeline.select(0, 0.2, 0.4)
    assert not [h for h in timeline._trait_notifiers["selected_tokens"]["change"] if "follow" in repr(h)]
    timeline.close()


def test_ten_minutes_are_quick_and_paged_and_decodes_one_page_only():
    session = demo.load("music_flamingo")
    batch = session.prepare([Request("x", [noise(16_000 * 600)])])
    decoded = []
    decode = batch.decode_token
    object.__setattr__(batch, "decode_token", lambda token: decoded.append(token) or decode(token))
    started = time.process_time()
    table = TokenTable(batch)
    assert len(decoded) < PAGE
    run = run_of(table)
    assert len(run) == 15_000
    decoded.clear()
    table.fold(run.first)
    assert len(table.view.rows) == PAGE and len(decoded) <= PAGE + 1 and table.page.max == 76
    table.selected = (0, 14_000, 14_010)
    assert table.page.value == 71 and len(marked(table)) == 11
    assert time.process_time() - started < 3
    table.page.value = 76
    table.fold_all()
    assert table.page.max == 1 == table.page.value and table.view.rows
    table.close()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda t: setattr(t, "selected", (0, 1)), r"pass \(source, first, last\)"),
        (lambda t: setattr(t, "selected", (9, 0, 0)), "source 9 is not one of the batch's 3"),
        (lambda t: setattr(t, "selected", (0, 5, 99)), "tokens 5..99 are not in source 0, which has 25"),
        (lambda t: setattr(t, "unfolded", ((7, 0),)), "request 7 is not one of"),
        (lambda t: t.choose(99_999), "position 99999 is not in the prompt"),
        (lambda t: t.fold(-1), "position -1 is not in the prompt"),
    ],
)
def test_wrong_places_are_named(table, act, message):
    with pytest.raises(ArgumentError, match=message):
        act(table)
    assert table.selected == () and table.unfolded == ()


def test_wrong_batches_are_refused(table):
    with pytest.raises(ArgumentError, match=r"session\.prepare"):
        TokenTable("tokens")
    other = TimelinePanel(demo.load("moss_music").prepare([Request("x", [noise(16_000)])]))
    with pytest.raises(ArgumentError, match="another batch"):
        table.follow(other)
    other.close()


def test_an_error_in_a_callback_is_shown(table):
    sent(table, event="fold", first=99_999)
    assert 'role="alert"' in table.message.value and "not in the prompt" in table.message.value
    sent(table, event="what")
    sent(table, event="choose")


def test_words_picture_table_and_code(table, batch):
    table.selected = (0, 3, 5)
    text = table.describe()
    assert f"Tokens of request 0: {batch.width} positions in {len(table.runs)} runs" in text
    assert "audio of source 0, 0.00-2.00 s: 25 ×" in text and "selected: tokens 3-5 of source 0, 0.24-0.48 s" in text
    twin = table.static()
    assert repr(table) == repr(twin) == text and twin.pictures[0].png.startswith(b"\x89PNG")
    assert len(twin.tables[0].rows) == len(table.runs) and "image/png" in table._repr_mimebundle_()
    names = {"batch": batch}
    exec(table.code(), names)
    assert names["runs"] == table.runs
    assert [t.position for t in names["chosen"]] == list(batch.timeline[0].positions[3:6])
    assert set(ROLE_COLOURS) == set(ROLES)


def test_names_for_screen_readers(table):
    assert table.request.description and table.page.description and table.fold_button.tooltip
    assert table.view.label == "tokens of request 0"
    assert all(row["role"] in row["label"] and row["place"] in row["label"] for row in table.view.rows)
    assert "event.stopPropagation()" in table.view._esm and "aria-selected" in table.view._esm


def test_a_batch_without_audio_has_a_table():
    table = TokenTable(demo.load("moss_music").prepare([Request("only text")]))
    assert {row["role"] for row in table.view.rows} <= {"system", "user", "assistant"}
    assert table.static().tables[0].rows
    table.close()


def test_close_frees_everything(batch):
    gc.collect()
    before = len(_instances)
    timeline = TimelinePanel(batch)
    table = TokenTable(batch).follow(timeline)
    table.selected = (0, 1, 2)
    gone, view = weakref.ref(table), weakref.ref(table.view)
    table.close()
    table.close()
    timeline.select(0, 0.5, 1.0)
    timeline.close()
    del table, timeline
    gc.collect()
    assert len(_instances) == before and gone() is None and view() is None
