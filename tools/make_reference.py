"""Make the API reference: one page a public module, from the docstrings, with pdoc.

    pip install -e '.[docs]' && python tools/make_reference.py site      # opens at site/index.html

A name that does not resolve, or a docstring that pdoc cannot read, ends it with an error.
"""

from __future__ import annotations

import argparse
import importlib
import tomllib
import warnings
from pathlib import Path

import pdoc

ROOT = Path(__file__).resolve().parent.parent


def load() -> list[str]:
    """Import every public module, with its lazily loaded names in place, which pdoc would not find; what to hand to pdoc.

    pdoc looks into a package's folder for the names in `__all__`, for all where there is none; other modules are handed over by
    name. The checkout, where
    `widgets/` lies, is taken off `audiollm.__path__`: in it pdoc would find `audiollm` again without end.
    """
    found = []
    for package, folder in shipped().items():
        public = getattr(importlib.import_module(package), "__all__", None)
        stems = sorted(path.stem for path in folder.glob("*.py") if not path.name.startswith("_"))
        found += [package, *(f"{package}.{stem}" for stem in stems if public is not None and stem not in public)]
        for name in (package, *(f"{package}.{stem}" for stem in stems)):
            module = importlib.import_module(name)
            for each in getattr(module, "__all__", ()):
                setattr(module, each, getattr(module, each))
    audiollm = importlib.import_module("audiollm")
    audiollm.__path__ = [path for path in audiollm.__path__ if Path(path) != ROOT]
    return found


def shipped() -> dict[str, Path]:
    """The packages that pyproject.toml lists, and where they lie, but for models' definitions and tutorials."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    packages = [name for name in settings["packages"] if "vendor" not in name and "notebooks" not in name]
    homes = settings["package-dir"]
    return {name: ROOT / homes.get(name, name.replace(".", "/")) for name in packages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the pages go")
    folder = parser.parse_args().folder
    warnings.simplefilter("error", UserWarning)
    # Names that are imported for type checkers only: the page shows them as they are written.
    warnings.filterwarnings("ignore", "Error parsing type annotation")
    pdoc.render.configure(docformat="markdown", show_source=False, math=False)
    pdoc.pdoc(*load(), output_directory=folder)
    print(f"{sum(1 for _ in folder.rglob('*.html'))} pages in {folder}")


if __name__ == "__main__":
    main()
