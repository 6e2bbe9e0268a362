"""What a snapshot folder holds and whether it would load, found out from configuration and headers alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from .errors import SnapshotError
from .loading import checked_processor, empty_model, family_of
from .snapshot import Snapshot


@dataclass(frozen=True)
class SnapshotReport:
    """A look at a snapshot.

    `family`, `model_type`; `n_parameters`; `n_blocks`, `width` of the language model, `audio_layers`, `audio_width` of the
    tower; `context` in tokens; `max_audio_s` or None where only the context bounds audio; `token_s`, seconds of one audio
    token, 0.0 where the processor that says both cannot be read; `files`, weight files with their bytes; `stored`,
    parameters by stored dtype; `problems`, what would keep it from loading, each as the error says it. Whether weights
    are finite is known only once they are read.
    """

    folder: Path
    family: str
    model_type: str
    n_parameters: int
    n_blocks: int
    width: int
    audio_layers: int
    audio_width: int
    context: int
    max_audio_s: float | None
    token_s: float
    files: tuple[tuple[str, int], ...]
    stored: tuple[tuple[str, int], ...]
    problems: tuple[str, ...]

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of the weights in a dtype; activations come on top."""
        return self.n_parameters * dtype.itemsize

    def __str__(self) -> str:
        gib = 2**30
        cap = "bounded by the context" if self.max_audio_s is None else f"{self.max_audio_s:g} s a source"
        token = f"one token for {1000 * self.token_s:g} ms"
        if not self.token_s:
            cap, token = "not known", "clock not known"
        lines = [
            f"{self.folder}",
            f"  family       {self.family} (model_type {self.model_type})",
            f"  parameters   {self.n_parameters:,}",
            f"  tower        {self.audio_layers} layers of width {self.audio_width}, {token}",
            f"  language     {self.n_blocks} blocks of width {self.width}, layers 0..{self.n_blocks}",
            f"  context      {self.context:,} tokens; audio {cap}",
            f"  weights take {self.nbytes(torch.bfloat16) / gib:.2f} GiB in bfloat16, "
            f"{self.nbytes(torch.float32) / gib:.2f} GiB in float32",
            f"  files        {len(self.files)}: " + ", ".join(f"{name} ({size / gib:.2f} GiB)" for name, size in self.files[:4])
            + (" ..." if len(self.files) > 4 else ""),
            "  stored as    " + (", ".join(f"{dtype}: {n:,}" for dtype, n in self.stored) or "nothing that can be read"),
        ]  # fmt: skip
        if self.problems:
            return "\n".join([*lines, "would NOT load:", *(f"  - {problem}" for problem in self.problems)])
        return "\n".join([*lines, "would load (whether every weight is finite is seen when it is read)"])


def inspect(folder: str | Path) -> SnapshotReport:
    """Look at a snapshot without reading a weight.

    Raises: SnapshotError where the folder, its configuration or its model type is not known at all; whatever else would
    keep it from loading is a line in `problems`.
    """
    snapshot = Snapshot.open(folder)
    family = family_of(snapshot)
    model = empty_model(family, snapshot)
    problems: list[str] = []
    files: tuple[tuple[str, int], ...] = ()
    stored: dict[str, int] = {}
    try:
        files = tuple((path.name, path.stat().st_size) for path in snapshot.weight_files() if path.is_file())
        for _, entry in snapshot.entries().values():
            stored[entry.dtype] = stored.get(entry.dtype, 0) + torch.Size(entry.shape).numel()
        snapshot.check(model)
    except SnapshotError as error:
        problems.append(str(error))
    text, audio = model.config.get_text_config(), model.config.audio_config
    max_audio_s, token_s = None, 0.0
    try:
        adapter = family(model, checked_processor(family, snapshot))
        max_audio_s, token_s = adapter.max_s, adapter.clock.token_s
    except SnapshotError as error:
        problems.append(str(error))
    return SnapshotReport(
        folder=snapshot.folder,
        family=family.name,
        model_type=snapshot.model_type,
        n_parameters=sum(p.numel() for p in model.parameters()),
        n_blocks=text.num_hidden_layers,
        width=text.hidden_size,
        audio_layers=audio.num_hidden_layers,
        audio_width=audio.hidden_size,
        context=text.max_position_embeddings,
        max_audio_s=max_audio_s,
        token_s=token_s,
        files=files,
        stored=tuple(sorted(stored.items())),
        problems=tuple(problems),
    )
