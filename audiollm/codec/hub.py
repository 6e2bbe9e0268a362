"""`owner/name` looked up in the local Hugging Face cache; nothing is ever downloaded."""

from __future__ import annotations

import os
import re
from pathlib import Path

from .errors import ModelNotFoundError


def cached_folder(repo_id: str, revision: str, cache_dir: str | os.PathLike | None) -> Path:
    """The cached snapshot folder of a repository.

    Raises: ModelNotFoundError `not_found` when the cache does not hold it, naming the path form.
    """
    # The library decides where its cache lies and how it is laid out; imported here because it is slow to load.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    if re.fullmatch(r"[\w.-]+/[\w.-]+", repo_id):
        try:
            return Path(
                snapshot_download(
                    repo_id,
                    revision=revision,
                    cache_dir=None if cache_dir is None else str(cache_dir),
                    local_files_only=True,
                )
            )
        except (LocalEntryNotFoundError, HFValidationError):
            pass
    raise ModelNotFoundError(
        f"{repo_id!r} is neither a local path nor in the local cache at revision {revision!r}, and nothing is downloaded; "
        'fetch it first (`hf download`) or pass a path: Model.from_pretrained("/models/MOSS-Audio-Tokenizer-v2") or '
        'Model.from_file("model.gguf")',
        code="not_found",
        source=repo_id,
    )
