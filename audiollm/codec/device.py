"""Where a codec runs: the loom door's words for devices, as torch devices."""

from __future__ import annotations

import platform

import torch

from ..errors import ArgumentError

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def pick_device(device: str | torch.device) -> torch.device:
    """A device that exists, for "" (a GPU where there is one, else the CPU), "cpu", "gpu" or a torch name.

    Raises: ArgumentError `bad_device`; a device that is named is never replaced by another.
    """
    text = str(device).strip().lower()
    if text == "":
        text = "cuda:0" if torch.cuda.is_available() else "cpu"
    elif text == "gpu":
        text = "cuda:0"
    try:
        picked = torch.device(text)
    except RuntimeError as error:
        raise ArgumentError(f"torch knows no device {str(device)!r}", code="bad_device", source="device") from error
    if picked.type == "cuda" and (picked.index or 0) >= torch.cuda.device_count():
        raise ArgumentError(
            f"{picked} is not here: torch sees {torch.cuda.device_count()} CUDA devices; use device='cpu'",
            code="bad_device",
            source="device",
        )
    if picked.type == "mps" and not torch.backends.mps.is_available():
        raise ArgumentError("torch has no mps device here; use device='cpu'", code="bad_device", source="device")
    if picked.type not in ("cpu", "cuda", "mps", "xpu"):
        raise ArgumentError(f"{picked} cannot run the codec; use 'cpu' or 'cuda'", code="bad_device", source="device")
    return picked


def pick_dtype(dtype: torch.dtype) -> torch.dtype:
    """Raises: ArgumentError `bad_argument` for a dtype that is no floating one."""
    if dtype not in DTYPES:
        raise ArgumentError(
            f"dtype is {dtype}; use one of {', '.join(str(d) for d in DTYPES)}", code="bad_argument", source="dtype"
        )
    return dtype


def devices() -> list[dict]:
    """Every device that `Model.from_file(device=...)` accepts here: name, description, is_cpu."""
    found = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] + [torch.device("cpu")]
    return [
        {"name": str(device), "description": device_description(device), "is_cpu": device.type == "cpu"}
        for device in found
    ]


def device_description(device: torch.device) -> str:
    """A device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine() if device.type == "cpu" else str(device)
