"""What the documents say is what the code does: error codes, docstrings, `inspect` and `doctor`."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import audiollm
from audiollm.cli import main
from audiollm.doctor import REQUIREMENTS, examine
from audiollm.errors import CODES
from audiollm.inspection import inspect as look

ROOT = Path(__file__).parent.parent


def test_the_page_on_refusals_has_every_code_with_its_meaning():
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", (ROOT / "docs" / "refusals.md").read_text(), re.MULTILINE)
    assert dict(rows) == CODES
    assert len(rows) == len(CODES)


# Docstrings: shapes or units where arrays or seconds are handed about, and errors where there are some.

ENGINE = [m.name for m in pkgutil.iter_modules(audiollm.__path__) if not m.ispkg and m.name != "cli"]
PACKAGES = ("analysis", "plots", "families")


def public_functions():
    names = [f"audiollm.{name}" for name in ENGINE]
    for package in PACKAGES:
        module = importlib.import_module(f"audiollm.{package}")
        names += [f"audiollm.{package}.{m.name}" for m in pkgutil.iter_modules(module.__path__)]
    for name in names:
        module = importlib.import_module(name)
        if not name.startswith("audiollm.") or name.count(".") > 2:
            continue
        for what, value in vars(module).items():
            if what.startswith("_") or getattr(value, "__module__", None) != name:
                continue
            if inspect.isfunction(value):
                yield f"{name}.{what}", value
            elif inspect.isclass(value):
                yield f"{name}.{what}", value
                for method, function in vars(value).items():
                    function = getattr(function, "__func__", getattr(function, "fget", function))
                    if not method.startswith("_") and inspect.isfunction(function):
                        yield f"{name}.{what}.{method}", function


FUNCTIONS = dict(public_functions())


def test_the_search_finds_the_engine():
    assert {"audiollm.session.Session.prepare", "audiollm.loading.load_model", "audiollm.audio.decode"} <= set(
        FUNCTIONS
    )


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_public_things_have_a_docstring(name):
    assert inspect.getdoc(FUNCTIONS[name])


ERRORS = re.compile(r"\braise (ArgumentError|AudioError|RequestError|SnapshotError|SessionBusyError|_bad\w*)\b")


def raises(function, seen=frozenset()):
    """Whether a function, or a private helper of its own module or class that it calls, raises one of our errors."""
    source = inspect.getsource(function)
    if ERRORS.search(source):
        return True
    module = inspect.getmodule(function)
    owner = vars(module).get(function.__qualname__.split(".")[0])
    for helper in set(re.findall(r"\b(?:self\.)?(_[a-z]\w*)\(", source)) - seen:
        called = vars(owner).get(helper) if inspect.isclass(owner) else None
        called = vars(module).get(helper) if called is None else called
        if inspect.isfunction(called) and raises(called, seen | {helper}):
            return True
    return False


@pytest.mark.parametrize("name", sorted(n for n, f in FUNCTIONS.items() if inspect.isfunction(f)))
def test_docstrings_name_errors_shapes_and_units(name):
    function = FUNCTIONS[name]
    text = inspect.getdoc(function)
    if raises(function):
        assert re.search(r"[Rr]aises?\b|Refuse", text), f"{name} raises and does not say so"
    returned = str(inspect.signature(function).return_annotation)
    if "ndarray" in returned or returned in ("Tensor", "torch.Tensor"):
        assert re.search(r"\[[\w ,+.*]+\]|array", text), f"{name} returns an array and does not say its shape"
    if re.search(r"_s$", function.__name__):
        assert re.search(r"second", text, re.IGNORECASE), f"{name} gives seconds and does not say so"


# inspect


def test_inspect_reads_no_weight(tiny_mf, monkeypatch):
    monkeypatch.setattr("audiollm.snapshot.opened", lambda path: pytest.fail("a weight was read"))
    report = look(tiny_mf)
    assert (report.family, report.n_blocks, report.width, report.context) == ("music_flamingo", 4, 48, 32_768)
    assert (report.max_audio_s, report.token_s, report.problems) == (1200.0, 0.04, ())
    assert report.nbytes(torch.bfloat16) == 2 * report.n_parameters == 2 * 234_304
    assert "would load" in str(report)


def test_inspect_moss(tiny_moss):
    report = look(tiny_moss)
    assert (report.family, report.n_blocks, report.width, report.audio_layers) == ("moss_music", 5, 32, 6)
    assert report.max_audio_s is None and report.token_s == 0.08


def test_inspect_says_what_would_not_load(mf_copy, capsys):
    config = json.loads((mf_copy / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 5
    config["text_config"]["layer_types"].append("full_attention")
    (mf_copy / "config.json").write_text(json.dumps(config))
    (mf_copy / "vocab.json").write_text("{")
    assert main(["inspect", str(mf_copy)]) == 1
    said = capsys.readouterr().out
    assert "would NOT load" in said and "model.language_model.layers.4" in said and "lacks 12 tensor(s)" in said
    assert "clock not known" in said and "audio not known" in said
    assert said.count("\n  - ") == 2 and "vocab.json cannot be read as JSON" in said


def test_inspect_of_no_model_is_one_line(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 1
    assert "config.json is missing" in capsys.readouterr().err


@pytest.mark.parametrize("family", ("music_flamingo", "moss_music"))
def test_inspect_of_the_real_sizes(family, tmp_path, tiny_mf, tiny_moss):
    """Full-size configurations, without weights: dims and memory are told, and what is missing is one problem."""
    for path in {"music_flamingo": tiny_mf, "moss_music": tiny_moss}[family].iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    real = ROOT / "tests" / "data" / family / "real_config.json"
    (tmp_path / "config.json").write_text(real.read_text())
    report = look(tmp_path)
    wanted = {"music_flamingo": (8_267_215_360, 28, 3584), "moss_music": (9_052_463_488, 36, 4096)}[family]
    assert (report.n_parameters, report.n_blocks, report.width) == wanted
    assert any("holds neither" in problem for problem in report.problems)


# doctor


def test_the_doctor_s_requirements_are_pyproject_s():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {str(Requirement(r)) for r in REQUIREMENTS} == {str(Requirement(r)) for r in project["dependencies"]}


def test_the_doctor_finds_this_installation_well(capsys):
    assert all(finding.ok for finding in examine())
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for word in ("transformers", "device cpu", "FLAC", "not needed"):
        assert word in said


def test_the_doctor_names_the_cure(monkeypatch, capsys):
    monkeypatch.setattr("audiollm.doctor._installed", lambda name: "4.57.0" if name == "transformers" else "9.9")
    assert main(["doctor"]) == 1
    assert "pip install 'transformers<5.25,>=5.16'" in capsys.readouterr().out


@pytest.mark.parametrize("text", ('{"version": "1.0"}', "[]", '{"model": {"type": "BPE", "vocab": 3}}'))
def test_a_tokenizer_that_the_library_cannot_use_is_our_error(mf_copy, text):
    (mf_copy / "tokenizer.json").write_text(text)
    with pytest.raises(audiollm.SnapshotError, match=r"tokenizer"):
        audiollm.load_model(mf_copy, "cpu", torch.float32)
