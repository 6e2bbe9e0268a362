"""The command line: `lab` opens the tutorials, `demo` checks an installation, `inspect` looks at a snapshot, `doctor` at the
machine; `decode` and `encode` run the codec; `extract` runs a corpus.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .codec import cli as codec
from .corpus import cli as corpus
from .errors import ArgumentError, AudioLLMError
from .lab import FOLDER, copy_to, run


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Errors of this package are printed as one line."""
    given = list(sys.argv[1:] if argv is None else argv)
    given, behind = _split(given) if given[:1] == ["lab"] else (given, [])
    arguments = _parser().parse_args(given, argparse.Namespace(behind=behind))
    try:
        return arguments.run(arguments)
    except AudioLLMError as error:
        print(f"audiollm: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("audiollm: interrupted", file=sys.stderr)
        return 130


def _split(given: list[str]) -> tuple[list[str], list[str]]:
    """What stands before `--`, and what behind it, which is JupyterLab's."""
    at = given.index("--") if "--" in given else len(given)
    return given[:at], given[at + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="audiollm", description="Look inside audio language models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    lab = commands.add_parser(
        "lab",
        help="copy the tutorials and demo clips to a folder and open JupyterLab there",
        usage="%(prog)s [-h] [--copy-only] [DIR] [-- JUPYTER ARGUMENTS]",
    )
    lab.add_argument("folder", nargs="?", type=Path, default=Path(FOLDER), metavar="DIR", help="(%(default)s)")
    lab.add_argument("--copy-only", action="store_true", help="copy, and open nothing")
    lab.set_defaults(run=_lab)

    demo = commands.add_parser("demo", help="run the main job on the embedded small models and write a page about it")
    demo.add_argument("--out", type=Path, default=Path("audiollm-demo.html"), help="the page to write (%(default)s)")
    demo.set_defaults(run=_demo)

    inspect = commands.add_parser("inspect", help="say what a snapshot folder holds and whether it would load")
    inspect.add_argument("snapshot", help="a local model folder")
    inspect.set_defaults(run=_inspect)

    doctor = commands.add_parser("doctor", help="say what this installation is and can")
    doctor.set_defaults(run=_doctor)

    codec.add_parsers(commands)
    corpus.add_parser(commands)
    return parser


def _lab(arguments: argparse.Namespace) -> int:
    copied = copy_to(arguments.folder)
    print(copied)
    return 0 if arguments.copy_only else run(copied.folder, arguments.behind)


def _inspect(arguments: argparse.Namespace) -> int:
    from .inspection import inspect

    report = inspect(arguments.snapshot)
    print(report)
    return 1 if report.problems else 0


def _doctor(arguments: argparse.Namespace) -> int:
    from .doctor import examine

    findings = examine()
    for finding in findings:
        print(finding)
    return 0 if all(finding.ok for finding in findings) else 1


def _demo(arguments: argparse.Namespace) -> int:
    from . import demo
    from .codec.example import run_demo
    from .demo import report

    folder = arguments.out.absolute().parent
    if not folder.is_dir():
        raise ArgumentError(f"{folder} is not a folder; make it first", code="not_found", source=arguments.out)
    print(report.RANDOM)
    sections = [_demo_of(name) for name in demo.SNAPSHOTS]
    decoded = run_demo()
    print(f"\n{decoded}")
    report.write(arguments.out, "audiollm demo", sections, decoded._repr_html_())
    print(f"\nwrote {arguments.out}")
    return 0


def _demo_of(name: str):  # type: ignore[no-untyped-def]  # a report.Section; plots load only here
    from . import demo
    from .analysis import layer_norms
    from .demo import report
    from .request import Request

    clips = demo.clips()
    session = demo.load(name)
    print(f"\n{session}")
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
    answers = session.generations(batch.requests, max_new_tokens=24)
    for request, answer in zip(batch.requests, answers, strict=True):
        print(f"{request.prompt!r} -> {answer}")
    return report.Section(repr(session), batch, norms, tuple(answer.text for answer in answers))


if __name__ == "__main__":
    raise SystemExit(main())
