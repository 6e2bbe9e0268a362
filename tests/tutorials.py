"""What the tests of the tutorials and the tool that stores them share: where they are, and their kernel's environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FIXED = {
    "COLUMNS": "100",
    "HF_HUB_OFFLINE": "1",
    "NO_COLOR": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


def environment(root: Path) -> dict[str, str]:
    """The environment of a kernel that runs a checkout's own package, the same on every machine."""
    ours = {"MPLBACKEND": "module://matplotlib_inline.backend_inline", "PYTHONPATH": str(root)}
    return {**os.environ, **FIXED, **ours}


def validate(path: Path, root: Path, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run a notebook by nbval against what it stores, with the package of the checkout `root`; `more` goes to pytest."""
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--nbval"),
        *("--nbval-current-env", "--nbval-cell-timeout", "120", f"--rootdir={folder}", "-c", os.devnull),
        *("--nbval-sanitize-with", str(ROOT / "tests" / "data" / "nbval_sanitize.cfg"), *more, str(path)),
    ]
    return subprocess.run(command, env=environment(root), cwd=folder, capture_output=True, text=True, check=False)
