"""Choosing audio: files of a folder, demo clips, a path or an upload, put in order and listened to."""

from __future__ import annotations

import shutil
import tempfile
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets
import traitlets

from .. import demo
from ..audio import Header, read_header
from ..errors import ArgumentError, RequestError
from ..lab import UPLOAD_BYTES
from ..request import MAX_SOURCES, Request, Waveform
from .audio_files import checked_folder, entries, from_folder, preview, printable, readable_suffixes, write_files
from .panel import Panel
from .static_view import StaticView, Table

if TYPE_CHECKING:
    from ..batch import TokenCount
    from ..session import Session

_MOST_LISTED = 500
_UPLOAD_NOTE = (
    f"The notebook server drops uploads above 10 MB without a word (under <code>audiollm lab</code>: "
    f"{UPLOAD_BYTES // 2**20} MB); for larger files use the path box."
)


class AudioPicker(Panel):
    """Up to `max_sources` pieces of audio in order. Made as `AudioPicker(folder, max_sources, session)`.

    `audios`, a tuple of paths and Waveforms, and `folder`, the Path that is browsed, are traits: set them from a cell, follow
    them from another panel. `chosen.value` is the number of the source that the buttons move, remove and play. With a
    `session` the tokens of each source and what the context has left are told, from the headers. No file is decoded but the
    few seconds that are played.

    Raises: ArgumentError for a folder that cannot be read, or for `max_sources` outside 1..5; setting `audios` raises
    RequestError for too many, and AudioError as `read_header` for what cannot be read.

    >>> from audiollm import demo
    >>> from audiollm.widgets import AudioPicker
    >>> picker = AudioPicker()
    >>> picker.audios = [demo.clips()["bass"]]
    >>> picker.request("Which instrument?").audios[0].name
    'bass.flac'
    >>> picker.close()
    """

    heading = "Audio"
    audios = traitlets.Any(())
    folder = traitlets.Any(None)
    _uploads: tempfile.TemporaryDirectory | None = None

    def __init__(
        self, folder: str | Path = ".", max_sources: int = MAX_SOURCES, session: Session | None = None
    ) -> None:
        if isinstance(max_sources, bool) or not isinstance(max_sources, int) or not 1 <= max_sources <= MAX_SOURCES:
            raise _bad(f"max_sources is {max_sources!r}; pass a whole number in 1..{MAX_SOURCES}", "max_sources")
        if session is not None and not hasattr(session, "count_tokens"):
            raise _bad(f"session is a {type(session).__name__}; pass what load_model returned, or None", "session")
        start = checked_folder(folder)
        self.max_sources = max_sources
        self.session = session
        self._checked: tuple[Any, tuple[Header, ...], TokenCount | None] = ((), (), None)
        self._played: str | Path | Waveform | None = None
        self._make_controls()
        super().__init__(self._laid_out())
        for button, act in (
            (self.open_button, self.open_marked),
            (self.refresh_button, self.refresh),
            (self.clip_button, self.add_clip),
            (self.path_button, self.add_path),
            (self.up_button, self.move_up),
            (self.down_button, self.move_down),
            (self.remove_button, self.remove),
            (self.play_button, self.play),
        ):
            self.on_click(button, act)
        self.path.on_msg(self.guarded(self._entered))
        self.on_change(self.filter, "value", self.refresh)
        self.on_change(self.upload, "value", self._uploaded)
        self.on_change(self, "folder", self.refresh)
        self.on_change(self, "audios", self._changed)
        self.folder = start
        self._changed()

    def _make_controls(self) -> None:
        wide = ipywidgets.Layout(width="96%")
        self.where = ipywidgets.HTML()
        self.filter = ipywidgets.Text(description="filter", tooltip="Show names that contain this", layout=wide)
        self.files = ipywidgets.Select(description="files", tooltip="Folders and audio files", rows=8, layout=wide)
        self.open_button = _button("Add / open", "Add the file, or open the folder, that is marked in the list")
        self.refresh_button = _button("Refresh", "Look at the folder again")
        self.clip = ipywidgets.Dropdown(options=demo.CLIPS, description="demo clip", tooltip="An embedded demo clip")
        self.clip_button = _button("Add clip", "Add the demo clip")
        self.path = ipywidgets.Text(
            description="path",
            placeholder="a file to add, or a folder to open",
            tooltip="Path of a file to add, or of a folder to open",
            layout=wide,
        )
        self.path_button = _button("Add path", "Add the file, or open the folder, of the path box")
        self.upload = ipywidgets.FileUpload(
            accept=",".join(readable_suffixes()), multiple=True, tooltip="Send audio files from this computer"
        )
        self.upload_note = ipywidgets.HTML(f'<span class="audiollm-note">{_UPLOAD_NOTE}</span>')
        self.chosen = ipywidgets.Select(
            description="sources",
            tooltip="The chosen sources, in order",
            rows=MAX_SOURCES + 1,
            layout=wide,
            style={"description_width": "60px"},
        )
        self.up_button = _button("Move up", "Put the marked source before the one above it")
        self.down_button = _button("Move down", "Put the marked source after the one below it")
        self.remove_button = _button("Remove", "Take the marked source out of the list")
        self.play_button = _button("Play", "Listen to at most 30 s of the marked source, at its true level")
        self.start_s = ipywidgets.FloatText(
            value=0.0, step=10, description="from (s)", tooltip="Where the preview begins, in seconds"
        )
        self.player = ipywidgets.Audio(
            format="wav",
            autoplay=True,
            loop=False,
            layout=ipywidgets.Layout(display="none"),
        )
        self.heard = ipywidgets.HTML()
        self.told = ipywidgets.HTML()

    def _laid_out(self) -> list[ipywidgets.Widget]:
        row = ipywidgets.HBox
        narrow, broad = (ipywidgets.Layout(width=width, min_width="300px") for width in ("44%", "56%"))
        files = [self.where, self.filter, self.files, row([self.open_button, self.refresh_button])]
        other = [row([self.clip, self.clip_button]), row([self.path, self.path_button])]
        move = row([self.up_button, self.down_button, self.remove_button])
        heard = [row([self.play_button, self.start_s]), self.heard, self.player]
        left = ipywidgets.VBox([*files, *other, self.upload, self.upload_note], layout=narrow)
        return [row([left, ipywidgets.VBox([self.chosen, self.told, move, *heard], layout=broad)])]

    # The sources

    @traitlets.validate("audios")
    def _check_audios(self, proposal: Any) -> tuple[str | Path | Waveform, ...]:
        request = Request("Listen.", proposal.value)
        if len(request.audios) > self.max_sources:
            raise RequestError(
                f"{len(request.audios)} sources; this picker holds at most {self.max_sources}: remove one first",
                code="too_many_sources",
                source="audios",
            )
        self._checked = self._looked_at(request.audios)
        return request.audios

    @traitlets.validate("folder")
    def _check_folder(self, proposal: Any) -> Path:
        return checked_folder(proposal.value)

    def _looked_at(self, audios: tuple[Any, ...]) -> tuple[Any, tuple[Header, ...], TokenCount | None]:
        names = (f"waveform {k + 1}" if isinstance(audio, Waveform) else None for k, audio in enumerate(audios))
        headers = tuple(read_header(audio, name) for audio, name in zip(audios, names, strict=True))
        count = self.session.count_tokens(Request("", audios)) if self.session is not None and audios else None
        return audios, headers, count

    @property
    def headers(self) -> tuple[Header, ...]:
        """What the headers of the sources say: name, frames, rate, channels."""
        return self._checked[1]

    @property
    def count(self) -> TokenCount | None:
        """Tokens that the sources take with an empty prompt; None without a session or without sources."""
        return self._checked[2]

    def request(self, prompt: str) -> Request:
        """The Request of a prompt and the sources. Raises: RequestError as Request."""
        return Request(prompt, self.audios)

    def add(self, *audios: str | Path | Waveform) -> AudioPicker:
        """Put sources at the end. Raises: as setting `audios`; then none of them is added."""
        self.audios = (*self.audios, *audios)
        self.chosen.index = len(self.audios) - 1 if self.audios else None
        return self

    def add_clip(self) -> None:
        """Add the demo clip that is chosen."""
        self.add(demo.clips()[self.clip.value])

    def add_path(self) -> None:
        """Add the file, or open the folder, whose path was typed: absolute, or from the folder that is shown."""
        text = self.path.value.strip().strip("\"'")
        if not text:
            raise _bad("the path box is empty; type the path of a file or of a folder", "path")
        path = from_folder(self.folder, text)
        if path is not None and path.is_dir():
            self.folder = path
        else:
            self.add(text if path is None else path)
        self.path.value = ""

    def _entered(self, _: Any, content: dict[str, Any], __: Any) -> None:
        if content.get("event") == "submit":
            self.add_path()

    def move_up(self) -> None:
        """Put the marked source one place earlier; the first stays."""
        self._move(-1)

    def move_down(self) -> None:
        """Put the marked source one place later; the last stays."""
        self._move(1)

    def remove(self) -> None:
        """Take the marked source out of the list."""
        number = self._marked()
        self.audios = self.audios[:number] + self.audios[number + 1 :]
        if self.audios:
            self.chosen.index = min(number, len(self.audios) - 1)

    def play(self) -> None:
        """Play at most 30 s of the marked source in the browser, from `start_s`, at its true level."""
        number = self._marked()
        start_s = self.start_s.value
        wav, length_s = preview(self.audios[number], start_s)
        self._played = self.audios[number]
        self.player.value = wav
        self.player.layout.display = ""
        heard = f"{self._cells(number)[0]}, {start_s:.2f}-{start_s + length_s:.2f} s"
        self.heard.value = f'<span class="audiollm-note">{escape(heard)}</span>'

    def _marked(self) -> int:
        if self.chosen.index is None:
            raise _bad("no source is marked; add one, and mark it in the list", "chosen")
        return self.chosen.index

    def _move(self, by: int) -> None:
        number = self._marked()
        if 0 <= number + by < len(self.audios):
            order = list(self.audios)
            order[number], order[number + by] = order[number + by], order[number]
            self.audios = tuple(order)
            self.chosen.index = number + by

    def _changed(self) -> None:
        if self._checked[0] is not self.audios:
            self._checked = self._looked_at(self.audios)
        marked = self.chosen.index
        self.chosen.options = [(self._words(k), k) for k in range(len(self.audios))]
        self.chosen.index = min(marked or 0, len(self.audios) - 1) if self.audios else None
        if not any(audio is self._played for audio in self.audios):
            self._played = None
            self.player.value, self.player.layout.display, self.heard.value = b"", "none", ""
        self.told.value = f'<span class="audiollm-note">{escape(self._budget_words())}</span>'
        self.failure = None
        self.say("")

    # Browsing and uploads

    def open_marked(self) -> None:
        """Add the file, or open the folder, that is marked in `files`."""
        path = self.files.value
        if path is None:
            raise _bad("nothing is marked in the folder; mark a file to add or a folder to open", "files")
        if path.is_dir():
            self.folder = path
        else:
            self.add(path)

    def refresh(self) -> None:
        """List the folder again."""
        folders, files = entries(self.folder, self.filter.value)
        every = [(f"{printable(path.name)}/", path) for path in folders] + [(printable(p.name), p) for p in files]
        up = [("../", self.folder.parent)] if self.folder.parent != self.folder else []
        self.files.options = up + every[:_MOST_LISTED]
        self.files.index = None
        cut = f", the first {_MOST_LISTED} shown: use the filter" if len(every) > _MOST_LISTED else ""
        self.where.value = (
            f'<span class="audiollm-note">{escape(printable(self.folder))}<br>{len(files)} audio file(s), '
            f"{len(folders)} folder(s){cut}</span>"
        )

    def _uploaded(self) -> None:
        """Write what was uploaded to a temporary folder and add it, all or nothing; then forget the bytes."""
        sent, self.upload.value = self.upload.value, ()
        if not sent:
            return
        if self._uploads is None:
            self._uploads = tempfile.TemporaryDirectory(prefix="audiollm-upload-")
        room = Path(tempfile.mkdtemp(dir=self._uploads.name))
        try:
            self.add(*write_files(room, [(str(file["name"]), file["content"]) for file in sent]))
        except BaseException:
            shutil.rmtree(room, ignore_errors=True)
            raise

    # Words

    def _cells(self, number: int) -> tuple[str, str, str, str, str]:
        """Label, length, rate, channels, and tokens or nothing, of a source."""
        header = self.headers[number]
        channels = "mono" if header.channels == 1 else f"{header.channels} channels"
        tokens = "" if self.count is None else f"{self.count.sources[number]:,} tokens"
        return printable(header.name), f"{header.duration_s:.2f} s", f"{header.sample_rate:,} Hz", channels, tokens

    def _words(self, number: int) -> str:
        name, *rest = self._cells(number)
        return f"{number} {name}: {', '.join(cell for cell in rest if cell)}"

    def _budget_words(self) -> str:
        told = f"{len(self.audios)} of {self.max_sources} source(s)"
        count = self.count
        if count is None:
            return told
        told += f", {sum(count.sources):,} audio tokens, {count.prompt:,} with what goes around them"
        if count.left < 0:
            return (
                f"{told}; too long by {-count.left:,}: the context holds {count.context:,}, remove or shorten sources"
            )
        return f"{told}; {count.left:,} of the context's {count.context:,} left for prompt and answer"

    def describe(self) -> str:
        """Every source with length, rate, channels and tokens, and what is left of the context."""
        lines = [f"{self.heading}: {self._budget_words()}"]
        return "\n".join([*lines, *(f"  source {self._words(k)}" for k in range(len(self.audios)))])

    def static(self) -> StaticView:
        """The sources as a table."""
        rows = tuple((str(k), *self._cells(k)) for k in range(len(self.audios)))
        head = ("source", "name", "length", "rate", "channels", "tokens")
        return StaticView(self.describe(), tables=(Table(self._budget_words(), head, rows),))

    def code(self) -> str:
        """Lines that make the same Request; what was made in a cell is taken from `picker`."""
        every = enumerate(self.audios)
        named = [f"picker.audios[{k}]" if isinstance(audio, Waveform) else repr(str(audio)) for k, audio in every]
        count = "" if self.session is None else "\nsession.count_tokens(request)  # from the headers"
        return f"from audiollm import Request\nrequest = Request('Describe the music.', [{', '.join(named)}]){count}"

    def close(self) -> None:
        """As every panel; what was uploaded is deleted."""
        super().close()
        uploads, self._uploads = self._uploads, None
        if uploads is not None:
            uploads.cleanup()


def _button(description: str, tooltip: str) -> ipywidgets.Button:
    layout = ipywidgets.Layout(width="auto", flex="0 0 auto")
    return ipywidgets.Button(description=description, tooltip=tooltip, layout=layout)


def _bad(message: str, source: str) -> ArgumentError:
    return ArgumentError(message, code="bad_argument", source=source)
