"""Every example in a docstring runs as it is written."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import runpy
from pathlib import Path

import pytest

import audiollm

PACKAGES = ("audiollm", "audiollm.analysis", "audiollm.plots")


def examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    for package in PACKAGES:
        path = importlib.import_module(package).__path__
        for found in pkgutil.iter_modules([path[0]]):
            if not found.ispkg:
                module = importlib.import_module(f"{package}.{found.name}")
                yield from (test for test in finder.find(module) if test.examples)


EXAMPLES = {test.name: test for test in examples()}


def test_there_are_examples():
    methods = {f"audiollm.session.Session.{name}" for name in ("observe", "capture", "edit")}
    assert {"audiollm.analysis.lens.logit_lens", "audiollm.analysis.attention.attention_over_time", *methods} <= set(
        EXAMPLES
    )


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_example(name):
    said = []
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(EXAMPLES[name], out=said.append)
    assert results.failed == 0, "".join(said)


def test_every_instrument_has_an_example():
    """A function of `audiollm.analysis` that takes a Session shows how."""
    for name in audiollm.analysis.__all__:
        value = getattr(audiollm.analysis, name)
        if callable(value) and not isinstance(value, type):
            assert f"{value.__module__}.{name}" in EXAMPLES, f"{name} has no example"


def test_the_readme_example_of_looking_inside_runs(tmp_path, monkeypatch):
    text = (Path(__file__).parent.parent / "README.md").read_text()
    blocks = re.findall(r"<!-- looking-example -->\s*```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 1
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(blocks[0], "README", "exec"), names)
    assert names["seen"]["resid[3]"].source(0).rows.start_s[0] == pytest.approx(0.96)


CLIENTS = re.findall(
    r"```python\n(.*?)```", (Path(__file__).parent.parent / "docs" / "clients.md").read_text(), re.DOTALL
)


@pytest.mark.parametrize("block", CLIENTS, ids=lambda block: re.findall(r"captum|nnsight|sklearn", block)[0])
def test_the_examples_of_other_tools_run(block, tmp_path):
    path = tmp_path / "example.py"  # nnsight reads the source of what it traces
    path.write_text(block)
    runpy.run_path(str(path))
