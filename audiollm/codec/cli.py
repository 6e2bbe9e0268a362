"""`audiollm decode` and `audiollm encode`.

`add_parsers` hangs both on the program's subparsers; each sets `run`, a function of the parsed arguments that returns
the exit status. What goes wrong is raised as the package's errors. Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_parsers(subparsers: argparse._SubParsersAction) -> None:
    """Add the parsers `decode` and `encode`."""
    decode = subparsers.add_parser("decode", help="codec codes (.npy) to a 16-bit WAV")
    decode.add_argument("codes", type=Path, help=".npy of ids, [frames, codebooks], frame-major")
    decode.add_argument("out", type=Path, help="the WAV to write")
    decode.add_argument("--codebooks", type=int, default=None, metavar="N", help="decode the first N codebooks only")
    decode.add_argument(
        "--max-frames", type=int, default=None, metavar="T", help="ceiling, 4096 unless given; 0 for none"
    )
    decode.set_defaults(run=run_decode)
    encode = subparsers.add_parser("encode", help="a sound file to codec codes (.npy)")
    encode.add_argument("clip", type=Path, help="a sound file, any rate, mono or stereo")
    encode.add_argument("out", type=Path, help="the .npy to write, int64 [frames, codebooks]")
    encode.set_defaults(run=run_encode)
    for parser in (decode, encode):
        parser.add_argument(
            "--model", required=True, help="a loom GGUF, a snapshot folder, owner/name in the local cache, or 'demo'"
        )
        parser.add_argument("--device", default="", help="cpu, gpu, or a torch device; a GPU where there is one")


def run_decode(args: argparse.Namespace) -> int:
    """Decode a .npy file, writing the WAV piece by piece. Raises: CodesError, ModelFileError, ModelNotFoundError."""
    from .audio import WavWriter
    from .codes import MAX_FRAMES, check_codes

    model = _load(args.model, args.device)
    ceiling = MAX_FRAMES if args.max_frames is None else args.max_frames or None
    codes = _read_npy(args.codes)
    config = model.config
    frames = len(check_codes(codes, model.code_space, ceiling, args.codebooks))
    partial = args.out.with_name(args.out.name + ".part")
    try:
        with WavWriter(partial, config.sample_rate, config.channels, frames * config.samples_per_frame) as out:
            pieces = model.codes2speech.stream(codes, 512, num_codebooks=args.codebooks, max_frames=None)
            for piece in pieces:
                out.write(piece.samples)
        partial.replace(args.out)
    finally:
        partial.unlink(missing_ok=True)
    seconds = frames / config.frame_rate
    sys.stdout.write(f"wrote {args.out}: {seconds:.2f} s, {config.sample_rate} Hz, {config.channels} channels\n")
    return 0


def run_encode(args: argparse.Namespace) -> int:
    """Encode a sound file to a .npy file. Raises: AudioError, UnsupportedTask, ModelFileError, ModelNotFoundError."""
    import numpy as np

    model = _load(args.model, args.device)
    codes = model.speech2codes.infer(args.clip)
    with args.out.open("wb") as file:
        np.save(file, codes, allow_pickle=False)
    sys.stdout.write(f"wrote {args.out}: {codes.shape[0]} frames of {codes.shape[1]} codes\n")
    return 0


def _load(name: str, device: str):  # type: ignore[no-untyped-def]  # Model, which must not be imported up there
    from .example import demo_model
    from .model import Model

    return demo_model(device or "cpu") if name == "demo" else Model.from_pretrained(name, device=device)


def _read_npy(path: Path):  # type: ignore[no-untyped-def]  # an array
    import numpy as np

    from .errors import CodesError
    from .gguf_file import checked_model_file

    checked_model_file(path)
    try:
        array = np.load(path, allow_pickle=False, mmap_mode="r")
    except (ValueError, EOFError, OSError) as error:
        raise CodesError(f"{path} is no .npy file of numbers: {error}", code="bad_codes", source=path) from error
    if not isinstance(array, np.ndarray):
        raise CodesError(f"{path} holds several arrays; save one with numpy.save", code="bad_codes", source=path)
    return array
