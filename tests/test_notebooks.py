"""The tutorials: each runs and shows again what it stores, is stored as it should be, and notices a wrong engine."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from tutorials import NOTEBOOKS, ROOT, environment, validate

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


# A wrong number in the engine: its file, what it says, what it says instead, and a tutorial that must notice.
MISTAKES = {
    "mel hop": ("vendor/moss_music/mel.py", "N_FFT)[::HOP_LENGTH]", "N_FFT)[:: HOP_LENGTH // 2]", "02_clocks"),
    "frames of the clock": (
        *("audiollm/families/music_flamingo.py", "samples_per_frame=extractor.hop_length"),
        *("samples_per_frame=extractor.hop_length + 1", "02_clocks"),
    ),
    "layer index": ("audiollm/batch.py", "return int(layer) % (n + 1)", "return int(layer + 1) % (n + 1)", "02_clocks"),
    "time marker": ("vendor/moss_music/prompt.py", "SECONDS_PER_MARKER = 2\n", "SECONDS_PER_MARKER = 3\n", "02_clocks"),
}
SHIPPED = ("audiollm", "vendor", "widgets", "notebooks")


@pytest.fixture
def checkout(tmp_path):
    """A copy of the package that a tutorial's kernel uses, to make mistakes in, and a folder to run in."""
    copy, folder = tmp_path / "checkout", tmp_path / "run"
    for name in SHIPPED:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    folder.mkdir()
    names = ("audiollm", "audiollm.vendor.moss_music")
    code = f"from importlib.util import find_spec; print(*(find_spec(name).origin for name in {names}), sep='\\n')"
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, env=environment(copy), cwd=folder, capture_output=True, text=True, check=True)
    used = [Path(line) for line in found.stdout.splitlines()]
    assert used == [copy / "audiollm" / "__init__.py", copy / "vendor" / "moss_music" / "__init__.py"]
    return copy, folder


def run_in(checkout, name: str):
    """The outcome of a tutorial with the copy's package, up to the first cell that shows something else."""
    copy, folder = checkout
    return validate(shutil.copy(copy / "notebooks" / f"{name}.ipynb", folder), copy, folder, "-x")


@pytest.mark.parametrize("name", sorted({mistake[-1] for mistake in MISTAKES.values()}))
def test_a_tutorial_passes_in_a_copy_without_mistakes(checkout, name):
    run = run_in(checkout, name)
    assert run.returncode == 0, run.stdout[-6000:]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_number_in_the_engine_is_noticed(checkout, mistake):
    file, right, wrong, name = MISTAKES[mistake]
    path = checkout[0] / file
    text = path.read_text(encoding="utf-8")
    assert text.count(right) == 1, f"{file} says {right!r} {text.count(right)} times; write another mistake"
    path.write_text(text.replace(right, wrong), encoding="utf-8")
    run = run_in(checkout, name)
    assert run.returncode == 1, run.stdout[-6000:]
    assert "Cell outputs differ" in run.stdout, f"it fails, but not by what a cell shows:\n{run.stdout[-6000:]}"
