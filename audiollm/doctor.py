"""What this installation is and can: versions and ranges, devices, readable audio formats."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass

import torch
from packaging.requirements import Requirement

from .audio import readable_formats

# What the package needs, as pyproject says it; a test compares the two. A checkout may run without being installed.
REQUIREMENTS = (
    "anywidget>=0.9",
    "filelock>=3.12",
    "gguf>=0.19",
    "huggingface-hub>=1.0",
    "ipywidgets>=8.1",
    "jinja2>=3.1",
    "jupyterlab>=4.2",
    "matplotlib>=3.8",
    "numpy>=1.26",
    "packaging>=23",
    "pyarrow>=17",
    "safetensors>=0.4.3",
    "scikit-learn>=1.4",
    "scipy>=1.11",
    "soundfile>=0.12",
    "torch>=2.9",
    "tqdm>=4.66",
    "transformers>=5.16,<5.25",
)


@dataclass(frozen=True)
class Finding:
    """One line of the doctor: `name`, `value` found, `ok`, and the `cure` where it is not."""

    name: str
    value: str
    ok: bool
    cure: str = ""

    def __str__(self) -> str:
        cure = f"  <- {self.cure}" if self.cure else ""
        return f"{'ok ' if self.ok else 'BAD'}  {self.name:<22} {self.value}{cure}"


def examine() -> tuple[Finding, ...]:
    """Everything that matters for running the package here; nothing is changed and no network is reached."""
    return (
        Finding("python", platform.python_version(), True),
        *(_version(Requirement(line)) for line in REQUIREMENTS),
        *_devices(),
        Finding("flash_attn", _installed("flash_attn") or "not installed (optional, CUDA only)", True),
        Finding("audio formats", readable_formats(), True),
        Finding(
            "browser and fonts", "not needed: Chromium is for the browser tests only, fonts come with matplotlib", True
        ),
    )


def _version(requirement: Requirement) -> Finding:
    found = _installed(requirement.name)
    good = found is not None and requirement.specifier.contains(found, prereleases=True)
    cure = "" if good else f"pip install '{requirement}'"
    return Finding(requirement.name, f"{found or 'not installed'} ({requirement.specifier} is supported)", good, cure)


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[Finding]:
    found = [Finding("device cpu", f"{torch.get_num_threads()} threads, dtype=torch.float32 recommended", True)]
    for k in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(k)
        bf16 = "bfloat16" if torch.cuda.is_bf16_supported() else "no bfloat16"
        name = torch.cuda.get_device_name(k)
        found.append(
            Finding(f"device cuda:{k}", f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free, {bf16}", True)
        )
    if not torch.cuda.is_available():
        found.append(Finding("device cuda", 'none; pass device="cpu", dtype=torch.float32', True))
    return found
