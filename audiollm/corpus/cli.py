"""`audiollm extract`. Nothing heavy is imported before the command runs."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the parser `extract`."""
    parser = subparsers.add_parser(
        "extract", help="embeddings of many files; the same command again does what is missing"
    )
    parser.add_argument("--snapshot", type=Path, required=True, metavar="S", help="a local model folder")
    parser.add_argument(
        "--manifest", type=Path, required=True, help="CSV or Parquet (id, audio, ...), or a folder of sound files"
    )
    parser.add_argument("--out", type=Path, required=True, help="the run's folder")
    parser.add_argument("--what", default="projected", help="some of raw,projected,contextual (%(default)s)")
    parser.add_argument("--layers", default="-1", help="layers of contextual, as in --layers=0,8,-1 (%(default)s)")
    parser.add_argument("--pool", default="none", help="none, mean, segments:SECONDS or labels:FILE (%(default)s)")
    parser.add_argument("--prompt", default="", help="for rows without one")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "float32"), help="as stored (%(default)s)")
    parser.add_argument("--device", default=None, help="cuda:0 where there is a GPU, else cpu")
    parser.add_argument("--model-dtype", default=None, choices=("bf16", "float32", "float16"), help="of the weights")
    parser.add_argument(
        "--workers", type=int, default=None, metavar="N", help="processes that decode ahead; 0 for none"
    )
    parser.add_argument("--batch-tokens", type=int, default=None, metavar="N", help="at most in a padded batch")
    parser.add_argument("--shard-mib", type=int, default=256, metavar="N", help="size of a shard (%(default)s)")
    parser.add_argument("--retry-errors", action="store_true", help="do rows again that failed before")
    parser.add_argument("--no-verify", action="store_true", help="check what is there by size only, not by SHA-256")
    parser.add_argument("--engine", default="local", choices=("local", "ray"), help="this machine, or a Ray cluster")
    parser.add_argument("--address", default=None, help="of a running Ray cluster; without it Ray starts here")
    parser.add_argument("--actors", type=int, default=None, metavar="N", help="models in Ray; one a GPU, or one")
    parser.set_defaults(run=run_extract)


def run_extract(args: argparse.Namespace) -> int:
    """Extract, telling the size before it starts and what there is in the end. Raises: as `audiollm.corpus.extract`."""
    import torch
    from tqdm.contrib.logging import logging_redirect_tqdm

    from . import extract

    dtypes = {"bf16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16, None: None}
    ray = {"address": args.address, "actors": args.actors}
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    with logging_redirect_tqdm():
        run = extract(
            args.snapshot,
            args.manifest,
            args.out,
            what=_words(args.what),
            layers=_numbers(args.layers),
            pool=args.pool,
            prompt=args.prompt,
            dtype={"bf16": "bfloat16"}.get(args.dtype, args.dtype),
            engine=args.engine,
            device=args.device,
            model_dtype=dtypes[args.model_dtype],
            workers=args.workers,
            batch_tokens=args.batch_tokens,
            shard_bytes=args.shard_mib << 20,
            retry_errors=args.retry_errors,
            verify=not args.no_verify,
            **{name: value for name, value in ray.items() if value is not None},
        )
    sys.stdout.write(f"{run}\n")
    for clip, said in list(run.failures.items())[:10]:
        sys.stdout.write(f"  {clip}: {said}\n")
    if len(run.failures) > 10:
        sys.stdout.write(f"  and {len(run.failures) - 10} more, see the column error of the index\n")
    return 0


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _numbers(text: str) -> tuple[int, ...]:
    from ..errors import ArgumentError

    try:
        return tuple(int(word) for word in _words(text))
    except ValueError:
        raise ArgumentError(
            f"--layers {text!r}; write whole numbers, as in --layers=0,8,-1", code="bad_argument", source="layers"
        ) from None
