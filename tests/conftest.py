"""Fixtures that several test files share: small snapshots, golden cases, and no network.

The environment is not told to be offline: the engine must be offline by itself. Instead, every attempt to leave this
machine fails, is remembered, and fails the run.
"""

from __future__ import annotations

import ipaddress
import json
import shutil
import socket
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from looking import FAMILIES, hooks, mixed_batch
from safetensors.numpy import load_file

from audiollm import PreparedBatch, Request, Session, Waveform, load_model

DATA = Path(__file__).parent / "data"
MF = DATA / "music_flamingo"

settings.register_profile("audiollm", deadline=None)
settings.load_profile("audiollm")
torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def no_network() -> Iterator[None]:
    """Refuse every connection and name look-up beyond this machine, and fail the run that tried one."""
    tried: list[object] = []
    connect, look_up = socket.socket.connect, socket.getaddrinfo

    def guarded_connect(self: socket.socket, address: object) -> None:
        if self.family != getattr(socket, "AF_UNIX", None) and not _is_here(address[0]):
            tried.append(address)
            raise OSError(f"tests reach no network: {address}")
        return connect(self, address)

    def guarded_look_up(host: object, *args: object, **kwargs: object) -> list:
        if not _is_here(host):
            tried.append(host)
            raise socket.gaierror(f"tests reach no network: {host}")
        return look_up(host, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded_connect)
        patch.setattr(socket, "getaddrinfo", guarded_look_up)
        yield
    assert not tried, f"the network was asked for: {tried}"


def _is_here(host: object) -> bool:
    host = host.decode() if isinstance(host, bytes) else host
    if host in (None, "", "localhost", socket.gethostname()):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@pytest.fixture(scope="session")
def tiny_mf() -> Path:
    """The small Music Flamingo snapshot that the golden values were made with; read only, see `mf_copy`."""
    return MF / "tiny"


@pytest.fixture
def mf_copy(tiny_mf: Path, tmp_path: Path) -> Path:
    """A copy of `tiny_mf` that a test may damage."""
    return Path(shutil.copytree(tiny_mf, tmp_path / "snapshot"))


@pytest.fixture(scope="session")
def session_mf(tiny_mf: Path) -> Session:
    return load_model(tiny_mf, device="cpu", dtype=torch.float32, attention="sdpa")


@pytest.fixture(scope="session")
def session_mf_eager(tiny_mf: Path) -> Session:
    return load_model(tiny_mf, device="cpu", dtype=torch.float32, attention="eager")


@pytest.fixture(scope="session")
def tiny_moss() -> Path:
    """The small MOSS-Music snapshot that the golden values were made with; read only."""
    return DATA / "moss_music" / "tiny"


@pytest.fixture(scope="session")
def session_moss(tiny_moss: Path) -> Session:
    return load_model(tiny_moss, device="cpu", dtype=torch.float32, attention="sdpa")


@pytest.fixture(scope="session")
def session_moss_eager(tiny_moss: Path) -> Session:
    return load_model(tiny_moss, device="cpu", dtype=torch.float32, attention="eager")


@pytest.fixture(params=FAMILIES)
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    """A session of each family, which must have its own hooks alone, and nothing open, once the test is over."""
    session = request.getfixturevalue(request.param)
    before = hooks(session)
    yield session
    assert hooks(session) == before and not session._contexts and not session._running


@pytest.fixture
def batch(session: Session) -> PreparedBatch:
    """`looking.mixed_requests()`, prepared."""
    return mixed_batch(session)


@pytest.fixture(scope="session")
def mf_wave() -> Callable[..., Waveform]:
    """`mf_wave(name, first=0, last=None)`: samples of a golden waveform, such as "w2s", at 16 kHz."""

    def wave(name: str, first: int = 0, last: int | None = None) -> Waveform:
        return Waveform(_wave(name)[first:last], 16_000)

    return wave


@pytest.fixture(scope="session")
def mf_case() -> Callable[[str], tuple[dict, dict[str, np.ndarray]]]:
    """`mf_case(name)`: a golden case's JSON and tensors."""

    def case(name: str) -> tuple[dict, dict[str, np.ndarray]]:
        folder = MF / "cases"
        return json.loads((folder / f"{name}.json").read_text()), load_file(folder / f"{name}.safetensors")

    return case


@pytest.fixture(scope="session")
def mf_requests(mf_wave: Callable[..., Waveform]) -> Callable[[dict], list[Request]]:
    """`mf_requests(case_json)`: the Requests of a golden case, as `content_fed` spells them."""

    def requests(case: dict) -> list[Request]:
        return [
            Request(r["content_fed"], [mf_wave(Path(a["file"]).stem, *a["slice"]) for a in r["audios"]])
            for r in case["requests"]
        ]

    return requests


@lru_cache
def _wave(name: str) -> np.ndarray:
    return load_file(MF / "cases" / "waves" / f"{name}.safetensors")["q8"].astype(np.float32) / 128
