"""A folder to work in: the tutorials and the demo clips copied, and JupyterLab started there.

What the user changed is never written over. The folder keeps, in `.audiollm.json`, the SHA-256 of every file as it was
written; a file that differs from that is the user's.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from . import demo
from .errors import ArgumentError

FOLDER = "audiollm-notebooks"
STAMP = ".audiollm.json"
UPLOAD_BYTES = 200 * 2**20  # what a browser may send at once; the server's own limit is 10 MB


@dataclass(frozen=True)
class Copied:
    """What `copy_to` did: files `written`, files `kept` because the user changed them, and what was written `beside` those."""

    folder: Path
    written: tuple[Path, ...]
    kept: tuple[Path, ...]
    beside: tuple[Path, ...]

    def __repr__(self) -> str:
        lines = [f"{self.folder}: {len(self.written)} file(s) written"]
        lines += [f"kept {kept.name}, which you changed; the new one is {new.name}" for kept, new in self._pairs()]
        return "\n".join(lines)

    def _pairs(self) -> Iterator[tuple[Path, Path]]:
        return zip(self.kept, self.beside, strict=True)


def copy_to(folder: str | Path) -> Copied:
    """Copy the tutorials, and the demo clips under `clips/`, to a folder, which is made where it does not exist.

    A file that is there already is replaced only if it is as it was copied; one that the user changed stays, and the new one
    is written beside it as `name.new.ipynb`. Copying twice writes nothing.
    Raises: ArgumentError for a folder that cannot be made or written.
    """
    folder = Path(folder).expanduser().absolute()
    written: list[Path] = []
    kept: list[Path] = []
    beside: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        known = _known(folder)
        for name, content in _shipped():
            path = _mine(folder, name, content, known)
            if path != folder / name:
                kept.append(folder / name)
                beside.append(path)
            if not path.exists() or path.read_bytes() != content:
                _write(path, content)
                written.append(path)
            known[path.relative_to(folder).as_posix()] = _digest(content)
        _write(folder / STAMP, json.dumps(known, indent=1, sort_keys=True).encode())
    except OSError as error:
        raise ArgumentError(
            f"{error.filename or folder} cannot be written: {error.strerror}; pass a folder of yours",
            code="not_found",
            source=str(folder),
        ) from None
    return Copied(folder, tuple(written), tuple(kept), tuple(beside))


def command(folder: Path, extra: Sequence[str] = ()) -> list[str]:
    """The command that starts JupyterLab on a folder with this interpreter, its kernel, and a raised upload limit.

    Raises: ArgumentError where JupyterLab is not installed.
    """
    if find_spec("jupyterlab") is None:
        raise ArgumentError(
            "JupyterLab is not installed here; pip install jupyterlab", code="not_found", source="jupyterlab"
        )
    return [
        *(sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={folder}"),
        f"--ServerApp.tornado_settings={{'websocket_max_message_size': {UPLOAD_BYTES}}}",
        *extra,
    ]


def run(folder: Path, extra: Sequence[str] = ()) -> int:
    """Run JupyterLab on a folder until it ends; its exit status. Raises: as `command`."""
    # A kernelspec named python3 in the user's home would win over this environment's.
    here = {**os.environ, "JUPYTER_PREFER_ENV_PATH": "1"}
    line = command(folder, extra)
    if os.name == "posix":
        sys.stdout.flush()
        os.execve(line[0], line, here)  # the server takes this process's place, so that Ctrl-C reaches it alone
    return subprocess.call(line, env=here)


def _shipped() -> Iterator[tuple[str, bytes]]:
    """Every file of the folder by its relative name."""
    for item in sorted(resources.files(f"{__package__}.notebooks").iterdir(), key=lambda item: item.name):
        if item.name.endswith((".ipynb", ".md")):
            yield item.name, item.read_bytes()
    for path in demo.clips().values():
        yield f"clips/{path.name}", path.read_bytes()


def _known(folder: Path) -> dict[str, str]:
    """What was written earlier; nothing where the stamp is missing or is none."""
    try:
        known = json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _mine(folder: Path, name: str, content: bytes, known: dict[str, str]) -> Path:
    """Where a file may be written: at its name, or at the first of name.new, name.new-2 ... that is not the user's."""
    path, number = folder / name, 1
    while path.exists() and (now := path.read_bytes()) != content:
        if known.get(path.relative_to(folder).as_posix()) == _digest(now):
            break
        first, mark = folder / name, ".new" if number == 1 else f".new-{number}"
        path, number = first.with_name(f"{first.stem}{mark}{first.suffix}"), number + 1
    return path


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content)
    part.replace(path)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
