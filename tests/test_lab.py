"""The folder of tutorials: copied whole, never over the user's edits; JupyterLab on it, with this interpreter."""

from __future__ import annotations

import json
import sys

import pytest

from audiollm import ArgumentError, demo, lab
from audiollm.cli import main


@pytest.fixture
def shipped(monkeypatch):
    """Two files that a release ships; a test may change them for the next one."""
    files = {"01_first.ipynb": b"{}", "clips/bass.flac": b"sound"}
    monkeypatch.setattr(lab, "_shipped", lambda: iter(files.items()))
    return files


def test_everything_that_is_shipped_is_copied(tmp_path):
    copied = lab.copy_to(tmp_path / "new" / "folder")
    names = {path.relative_to(copied.folder).as_posix() for path in copied.written}
    assert {f"clips/{path.name}" for path in demo.clips().values()} <= names and "README.md" in names
    assert (copied.folder / "clips" / "bass.flac").read_bytes() == demo.clips()["bass"].read_bytes()
    assert not lab.copy_to(copied.folder).written, "a second time writes nothing"
    assert not list(copied.folder.rglob("*.part"))


def test_a_release_replaces_what_was_not_touched(shipped, tmp_path):
    lab.copy_to(tmp_path)
    shipped["01_first.ipynb"] = b'{"new": 1}'
    assert lab.copy_to(tmp_path).written == (tmp_path / "01_first.ipynb",)
    assert (tmp_path / "01_first.ipynb").read_bytes() == b'{"new": 1}'


def test_the_user_s_edits_are_never_written_over(shipped, tmp_path):
    lab.copy_to(tmp_path)
    mine, beside = tmp_path / "01_first.ipynb", tmp_path / "01_first.new.ipynb"
    mine.write_bytes(b"mine")
    copied = lab.copy_to(tmp_path)
    assert mine.read_bytes() == b"mine" and beside.read_bytes() == b"{}"
    assert copied.kept == (mine,) and copied.beside == (beside,) and "01_first.new.ipynb" in repr(copied)
    shipped["01_first.ipynb"] = b"second"
    assert lab.copy_to(tmp_path).written == (beside,), "what lies beside is ours until it is changed"
    beside.write_bytes(b"mine too")
    shipped["01_first.ipynb"] = b"third"
    lab.copy_to(tmp_path)
    assert [path.read_bytes() for path in (mine, beside)] == [b"mine", b"mine too"]
    assert (tmp_path / "01_first.new-2.ipynb").read_bytes() == b"third"


@pytest.mark.parametrize("stamp", ["", "[]", "{"])
def test_without_a_stamp_what_differs_is_the_user_s(shipped, tmp_path, stamp):
    (tmp_path / "01_first.ipynb").write_bytes(b"something")
    (tmp_path / lab.STAMP).write_text(stamp)
    lab.copy_to(tmp_path)
    assert (tmp_path / "01_first.ipynb").read_bytes() == b"something"
    assert (tmp_path / "01_first.new.ipynb").read_bytes() == b"{}"
    assert "01_first.new.ipynb" in json.loads((tmp_path / lab.STAMP).read_text())


def test_a_folder_that_cannot_be_is_named_with_a_cure(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArgumentError, match=r"file.* cannot be written.*pass a folder"):
        lab.copy_to(tmp_path / "file")
    assert main(["lab", str(tmp_path / "file" / "below"), "--copy-only"]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_the_command_line(monkeypatch, tmp_path, capsys):
    started = []
    monkeypatch.setattr("os.execve", lambda path, line, env: started.append((line, env)))
    monkeypatch.setattr("os.name", "posix")
    assert main(["lab", str(tmp_path / "a"), "--copy-only"]) == 0 and not started
    assert f"{tmp_path / 'a'}:" in capsys.readouterr().out
    monkeypatch.setattr("subprocess.call", lambda line, env: 0)
    main(["lab", str(tmp_path / "b"), "--", "--no-browser", "--port=9"])
    ((line, env),) = started
    assert line[:3] == [sys.executable, "-m", "jupyterlab"] and line[-2:] == ["--no-browser", "--port=9"]
    assert f"--ServerApp.root_dir={tmp_path / 'b'}" in line and env["JUPYTER_PREFER_ENV_PATH"] == "1"
    limit = next(each for each in line if "tornado_settings" in each)
    assert eval(limit.split("=", 1)[1])["websocket_max_message_size"] == lab.UPLOAD_BYTES


def test_options_of_jupyter_alone_leave_the_folder_at_its_default(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    started = []
    monkeypatch.setattr("audiollm.cli.run", lambda folder, extra: started.append((folder, extra)) or 0)
    assert main(["lab", "--", "--no-browser"]) == 0
    assert started == [(tmp_path / lab.FOLDER, ["--no-browser"])]


def test_without_jupyterlab_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(lab, "find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match="pip install jupyterlab"):
        lab.command(tmp_path)
