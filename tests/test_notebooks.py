"""The tutorials: each runs and shows again what it stores, is stored as it should be, and notices a wrong engine."""

from __future__ import annotations

import re
import shutil

import nbformat
import pytest
from tutorials import NOTEBOOKS, ROOT, validate

# What nbval never compares.
UNSEEN = {"application/vnd.jupyter.widget-view+json", "image/png", "image/jpeg", "application/javascript"}
IGNORED = re.compile(r"^\s*#+\s*(NBVAL_IGNORE_OUTPUT|NBVAL_SKIP|PYTEST_VALIDATE_IGNORE_OUTPUT)\s*$", re.M)
NAMES = [path.stem for path in NOTEBOOKS]


@pytest.fixture(params=NOTEBOOKS, ids=NAMES)
def stored(request):
    return nbformat.read(request.param, 4), request.param


def code_of(book) -> list:
    return [cell for cell in book.cells if cell.cell_type == "code"]


def is_ignored(cell) -> bool:
    tags = {"nbval-ignore-output", "nbval-skip"} & set(cell.metadata.get("tags", []))
    return bool(IGNORED.search(cell.source) or tags)


def is_compared(output) -> bool:
    """Whether nbval would notice another value here."""
    if output.output_type in ("stream", "error"):
        return True
    text = output.get("data", {}).get("text/plain", "")
    return bool(set(output.get("data", {})) - UNSEEN) and not text.startswith(("<Figure", "<IPython", "<module"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_it_runs_and_shows_what_it_stores(path, tmp_path):
    copy = shutil.copy(path, tmp_path)
    run = validate(copy, ROOT, tmp_path)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]


def test_it_was_run_in_order_and_whole(stored):
    book, _ = stored
    counts = [cell.execution_count for cell in code_of(book)]
    assert counts == list(range(1, len(counts) + 1)), "nbval compares nothing in a cell that was not run"
    assert sum(map(is_ignored, code_of(book))) <= 1
    assert not any(output.output_type == "error" for cell in code_of(book) for output in cell.outputs)


def test_what_it_shows_can_be_checked(stored):
    book, _ = stored
    cells = code_of(book)
    checked = [cell for cell in cells if any(map(is_compared, cell.outputs))]
    assert len(checked) >= 0.4 * len(cells)
    for cell in cells:
        pictures = [o for o in cell.outputs if "image/png" in o.get("data", {}) and o.output_type == "display_data"]
        if pictures:
            assert any(o.output_type == "stream" and "Figure" in o.text for o in cell.outputs), (
                f"a figure without its description:\n{cell.source}"
            )


def test_it_is_stored_small_and_of_no_machine(stored):
    book, path = stored
    text = path.read_text(encoding="utf-8")
    assert path.stat().st_size < 400_000
    assert "widgets" not in book.metadata and book.metadata.kernelspec.name == "python3"
    assert not re.search(r"/(root|home|tmp|Users|work)/", text), "a path of this machine"
    assert not re.search(r" at 0x[0-9a-f]{6,}", text), "an address in memory"
    for cell in code_of(book):
        assert not any(o.output_type == "stream" and o.name == "stderr" for o in cell.outputs), cell.source


def test_it_says_what_one_learns_and_what_comes_next(stored):
    book, _ = stored
    prose = [cell.source for cell in book.cells if cell.cell_type == "markdown"]
    assert prose[0].startswith("# ") and "you will learn" in prose[0].lower()
    assert "next" in prose[-1].lower()
    assert re.search(r"GPU", "\n".join(prose)) and re.search(r"\bGiB\b", "\n".join(prose))


def test_every_tutorial_is_listed_in_the_readme():
    listed = (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")
    for path in NOTEBOOKS:
        assert f"({path.name})" in listed


# A wrong number in the engine: file, what it says, what it says instead, and which tutorial must notice.
MISTAKES = {
    "mel hop": ("audiollm/timeline.py", "HOP", "", "02_clocks"),
}
