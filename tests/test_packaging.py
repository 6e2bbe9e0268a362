"""What is shipped, what `import audiollm` costs, and that the papers agree with each other."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import audiollm
from audiollm.errors import CODES, AudioLLMError
from audiollm.loading import TRANSFORMERS

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())
FOLDERS = {
    "audiollm": "audiollm",
    "vendor": "audiollm.vendor",
    "widgets": "audiollm.widgets",
    "notebooks": "audiollm.notebooks",
}
CONDA_NAMES = {"pytorch": "torch", "pysoundfile": "soundfile", "matplotlib-base": "matplotlib", "ray-data": "ray"}


def packages_in_tree() -> set[str]:
    found = set()
    for folder, name in FOLDERS.items():
        for path in (ROOT / folder).rglob("__init__.py"):
            rest = path.parent.relative_to(ROOT / folder).parts
            found.add(".".join((name, *rest)))
    return found


def test_every_package_is_listed():
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages_in_tree()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    if not tracked:
        pytest.skip("needs a git checkout")
    for name in filter(None, tracked.split("\0")):
        if name.startswith("tests/") or not (ROOT / name).is_file():
            continue
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if "No matching distribution found for setuptools" in built.stderr:
        pytest.skip("building needs setuptools from an index")
    assert built.returncode == 0, built.stderr
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_the_wheel_holds_code_and_data(wheel):
    names = set(wheel.namelist())
    for package in packages_in_tree():
        assert package.replace(".", "/") + "/__init__.py" in names
    for folder, name in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            shipped = path.suffix in (".py", ".flac", ".safetensors", ".json", ".jinja", ".txt", ".md", ".typed")
            if path.is_file() and shipped and "__pycache__" not in path.parts and _tracked(path):
                assert f"{name.replace('.', '/')}/{path.relative_to(ROOT / folder).as_posix()}" in names
    assert not [name for name in names if name.startswith(("tests", "tools", "benchmarks", "vendor", "widgets"))]


def _tracked(path: Path) -> bool:
    found = subprocess.run(
        ["git", "ls-files", "--error-unmatch", str(path)], cwd=ROOT, capture_output=True, check=False
    )
    return found.returncode == 0


def test_import_is_light():
    code = (
        "import sys, audiollm; heavy = {'torch', 'transformers', 'matplotlib', 'ipywidgets', 'soundfile', 'scipy'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_engine_never_imports_drawing_or_widgets():
    code = (
        "import sys, audiollm.loading, audiollm.demo, audiollm.analysis;"
        "heavy = {'matplotlib', 'ipywidgets', 'IPython', 'audiollm.plots', 'audiollm.widgets'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_every_public_name_resolves():
    for name in audiollm.__all__:
        assert inspect.getdoc(getattr(audiollm, name)), name
    assert set(audiollm.__all__) <= set(dir(audiollm))
    with pytest.raises(AttributeError, match="nothing_like_it"):
        audiollm.nothing_like_it  # noqa: B018


def test_a_checkout_runs_without_installation(tmp_path):
    code = "import audiollm.vendor, audiollm.widgets, audiollm.notebooks, audiollm; print(audiollm.__version__)"
    subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"], check=True, cwd=tmp_path
    )


def test_the_supported_range_is_the_one_in_pyproject():
    stated = next(r for r in map(Requirement, PROJECT["project"]["dependencies"]) if r.name == "transformers")
    assert stated.specifier == TRANSFORMERS
    assert TRANSFORMERS.contains(importlib.metadata.version("transformers"))


def conda_lines() -> dict[str, SpecifierSet]:
    found = {}
    for line in CONDA["dependencies"]:
        if isinstance(line, str):
            name, spec = re.fullmatch(r"([a-z0-9_-]+?)((?:[<>=].*)?)", line).groups()
            pinned = f"=={spec[1:]}.*" if spec.startswith("=") and not spec.startswith("==") else spec
            found[name] = SpecifierSet(pinned)
    return found


def test_environment_yml_says_what_pyproject_says():
    test = PROJECT["project"]["optional-dependencies"]["test"]
    wanted = {
        canonicalize_name(r.name): r.specifier for r in map(Requirement, PROJECT["project"]["dependencies"] + test)
    }
    from_pypi = [line for line in CONDA["dependencies"] if isinstance(line, dict)]
    names = ("captum", "nnsight", "loom-py-rt")
    assert from_pypi == [{"pip": ["-e .", *(f"{name}{wanted.pop(name)}" for name in names)]}]
    found = {
        canonicalize_name(CONDA_NAMES.get(n, n)): s for n, s in conda_lines().items() if n not in ("python", "pip")
    }
    assert found == wanted
    assert CONDA["channels"] == ["conda-forge", "nodefaults"]
    assert SpecifierSet(PROJECT["project"]["requires-python"]).contains("3.11")


@pytest.mark.parametrize("name", sorted(set(conda_lines()) - {"python", "pip"}))
def test_this_environment_satisfies_it(name):
    version = importlib.metadata.version(CONDA_NAMES.get(name, name)).split("+")[0]
    assert conda_lines()[name].contains(version, prereleases=True)


# Errors and documents.


def test_every_error_code_is_known_and_used():
    code = "\n".join(
        p.read_text() for f in ("audiollm", "vendor") for p in (ROOT / f).rglob("*.py") if p.name != "errors.py"
    )
    used = set(re.findall(r'code="(\w+)"', code))
    assert used <= set(CODES)
    with pytest.raises(ValueError, match="not an error code"):
        AudioLLMError("x", code="misspelt")


def test_errors_survive_pickling():
    import pickle

    error = pickle.loads(pickle.dumps(audiollm.AudioError("what", code="empty", source=Path("a.wav"))))
    assert (str(error), error.code, error.source) == ("what", "empty", "a.wav")


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_readme_example_runs_on_an_mp3(tmp_path, monkeypatch):
    mp3 = ROOT / "tests" / "data" / "odd_inputs" / "audio" / "mp3_stereo_44k1.mp3"
    (tmp_path / "my song.mp3").write_bytes(mp3.read_bytes())
    monkeypatch.chdir(tmp_path)
    block = next(block for block in python_blocks() if "extract_audio_embeddings" in block)
    code = block.replace("time_to_token(1.5)", "time_to_token(0.5)")
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["song"].projected.shape[0] == len(names["song"].intervals) == names["states"][3].shape[0]


def test_no_machine_path_in_what_is_kept():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split(
        "\n"
    )
    pattern = re.compile("/wo" + "rk/|/ro" + "ot/|/tmp/w" + "/")
    for name in tracked:
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".yml", ".json", ".cfg", ".ipynb", "") and path.is_file():
            assert not pattern.search(path.read_text(errors="ignore")), name
