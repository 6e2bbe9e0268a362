"""Run the tutorials from top to bottom and store them as they are committed: fresh outputs, fixed ids, no widget state.

    python tools/refresh_notebooks.py                  # all of notebooks/
    python tools/refresh_notebooks.py 02_clocks        # one, by the beginning of its name

The kernel gets the environment of `tests/tutorials.py`, so that what is stored is what the tests see again.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from tutorials import environment  # noqa: E402  the tests' own, found by the line above

METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def refresh(path: Path) -> None:
    book = nbformat.read(path, 4)
    resources = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(
        book, timeout=300, kernel_name="python3", resources=resources, store_widget_state=False, record_timing=False
    )
    client.execute()
    book.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(book.cells):
        cell["id"] = f"cell-{number:02d}"
        cell.metadata.pop("execution", None)
    nbformat.validate(book)
    nbformat.write(book, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    names = parser.parse_args().names
    os.environ.update(environment(ROOT))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        if not names or path.stem.startswith(tuple(names)):
            start = time.monotonic()
            refresh(path)
            print(f"{path.name}: {time.monotonic() - start:.1f} s, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
