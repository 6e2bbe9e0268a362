"""The command line: `audiollm demo` checks an installation on the embedded small models, without a browser."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .errors import AudioLLMError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Errors of this package are printed as one line."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except AudioLLMError as error:
        print(f"audiollm: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="audiollm", description="Look inside audio language models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="run the main job on an embedded small model and write a page about it")
    demo.add_argument("--out", type=Path, default=Path("audiollm-demo.html"), help="the page to write (%(default)s)")
    demo.set_defaults(run=_demo)
    return parser


def _demo(arguments: argparse.Namespace) -> int:
    from . import demo
    from .analysis import layer_norms
    from .demo import report
    from .request import Request

    clips = demo.clips()
    session = demo.load("music_flamingo")
    print(session)
    print(report.RANDOM)
    batch = session.prepare(
        [
            Request("Describe this track.", [clips["long_mix"]]),
            Request("Audio A: <audio>\nAudio B: <audio>\nCompare.", [clips["mix"], clips["drums"]]),
        ]
    )
    print(batch)
    for embedding in session.extract_audio_embeddings(batch):
        print(embedding)
    norms = layer_norms(session, batch)
    for line in norms:
        print(line)
    texts = session.generate(batch.requests, max_new_tokens=24)
    for request, text in zip(batch.requests, texts, strict=True):
        print(f"{request.prompt!r} -> {text!r}")
    report.write(arguments.out, "audiollm demo", batch, norms, texts)
    print(f"wrote {arguments.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
