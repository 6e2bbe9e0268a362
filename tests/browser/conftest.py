"""One JupyterLab server and one Chromium for all browser tests, a page a test. Without Chromium they are skipped.

With AUDIOLLM_NEED_BROWSER=1 a missing browser fails instead. Screenshots go to AUDIOLLM_SCREENSHOTS where that is set.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = os.environ.get("AUDIOLLM_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome") or ""
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--mute-audio", "--autoplay-policy=no-user-gesture-required"),
]
SETTINGS = {
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
    "@jupyterlab/docmanager-extension:plugin": {"autosave": False},
}
FIRST_ERROR = """[...window.jupyterapp.shell.currentWidget.content.model.cells]
    .flatMap(c => c.type === 'code' ? c.sharedModel.outputs : []).find(o => o.output_type === 'error')"""
KERNEL = "window.jupyterapp?.shell?.currentWidget?.sessionContext?.session?.kernel"
PROMPTS = "[...document.querySelectorAll('.jp-Notebook .jp-CodeCell .jp-InputPrompt')].map(x => x.innerText.trim())"


class Lab:
    """A running server, and what a test does with a notebook on a page."""

    def __init__(self, base: str, token: str, root: Path) -> None:
        self.base, self.token, self.root = base, token, root

    def write(self, name: str, *cells: str) -> str:
        book = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(cell, id=f"c{i}") for i, cell in enumerate(cells)]
        )
        book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(book, self.root / name)
        return name

    def open(self, page, name: str) -> None:
        page.goto(f"{self.base}/lab/tree/{name}?token={self.token}&reset", wait_until="domcontentloaded")
        page.wait_for_function(f"() => {KERNEL}?.status === 'idle' && document.querySelector('.jp-Notebook')")
        page.wait_for_selector("#jupyterlab-splash", state="detached")

    def run_all(self, page) -> None:
        """Run every cell; a cell that raises fails the test with its error, at once."""
        page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')")
        told = page.wait_for_function(
            f"""() => {{ const e = {FIRST_ERROR}; if (e) return e.ename + ': ' + e.evalue;
            const p = {PROMPTS};
            return p.length && p.every(x => /^\\[\\d+\\]:$/.test(x)) && {KERNEL}.status === 'idle'; }}""",
            timeout=90_000,
        ).json_value()
        assert told is True, told

    def run_cell(self, page, i: int) -> str:
        """Run one code cell, and its text when its prompt number has changed."""
        cell = page.locator(".jp-Notebook .jp-CodeCell").nth(i)
        before = cell.locator(".jp-InputPrompt").inner_text().strip()
        page.evaluate(
            """async i => { const nb = window.jupyterapp.shell.currentWidget.content; nb.deselectAll();
            nb.activeCellIndex = i; await window.jupyterapp.commands.execute('notebook:run-cell'); }""",
            i,
        )
        page.wait_for_function(
            f"([i, before]) => {{ const t = {PROMPTS}[i]; return t !== before && /^\\[\\d+\\]:$/.test(t) }}",
            arg=[i, before],
        )
        return "\n".join(cell.locator(".jp-OutputArea-output").all_inner_texts())

    def shoot(self, page, name: str, within: str | None = None) -> None:
        """A screenshot of the page, or of one element, where AUDIOLLM_SCREENSHOTS names a folder."""
        folder = os.environ.get("AUDIOLLM_SCREENSHOTS")
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            target = page if within is None else page.locator(within).first
            target.screenshot(path=str(Path(folder) / f"{name}.png"))


def missing(what: str) -> None:
    if os.environ.get("AUDIOLLM_NEED_BROWSER"):
        pytest.fail(f"{what} is missing, and AUDIOLLM_NEED_BROWSER is set")
    pytest.skip(f"no {what}: browser tests are left out")


def environment(folder: Path) -> dict[str, str]:
    """Jupyter's folders away from the user's, the package importable, one thread."""
    away = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "run",
        "IPYTHONDIR": "ipython",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
    }
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    fixed = {"JUPYTER_PREFER_ENV_PATH": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **{name: str(folder / sub) for name, sub in away.items()}, **fixed}


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    if not CHROMIUM:
        missing("Chromium")
    folder = tmp_path_factory.mktemp("jupyter")
    root, settings = folder / "root", folder / "config" / "labconfig"
    root.mkdir()
    settings.mkdir(parents=True)
    (settings / "default_setting_overrides.json").write_text(json.dumps(SETTINGS))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"),
        *("--ServerApp.port_retries=0", f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={root}"),
        "--LabApp.expose_app_in_browser=True",
    ]
    log = folder / "lab.log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            command, env=environment(folder), stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    base = f"http://127.0.0.1:{port}"
    for _ in range(600):
        if server.poll() is not None:
            pytest.fail(log.read_text()[-3000:])
        try:
            urllib.request.urlopen(f"{base}/api/status?token={token}", timeout=1).read()
            break
        except OSError:
            time.sleep(0.1)
    yield Lab(base, token, root)
    with contextlib.suppress(OSError):
        shutdown = urllib.request.Request(f"{base}/api/shutdown?token={token}", method="POST")
        urllib.request.urlopen(shutdown, timeout=5)
    try:
        server.wait(15)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: browser tests are left out")
    if not CHROMIUM:
        missing("Chromium")
    with playwright.sync_playwright() as running:
        context = running.chromium.launch_persistent_context(
            str(tmp_path_factory.mktemp("profile")),
            executable_path=CHROMIUM,
            headless=True,
            args=FLAGS,
            viewport={"width": 1280, "height": 1000},
        )
        yield context
        context.close()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    setattr(item, f"report_{report.when}", report)


@pytest.fixture
def page(lab, browser, request, tmp_path):
    page = browser.new_page()
    page.set_default_timeout(60_000)
    page.js_errors = []
    page.on("dialog", lambda dialog: dialog.accept())
    page.on("pageerror", lambda error: page.js_errors.append(str(error)))
    yield page
    report = getattr(request.node, "report_call", None)
    if report is not None and report.failed:
        with contextlib.suppress(Exception):
            page.screenshot(path=str(tmp_path / "failure.png"))
            print("screenshot:", tmp_path / "failure.png", "JavaScript errors:", page.js_errors[:10])
    page.close()
