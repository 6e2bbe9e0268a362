"""The token table: every token of the padded prompt with what it is, audio folded, linked to the timeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anywidget
import ipywidgets
import traitlets

from ..errors import ArgumentError
from ..plots.token_strip import token_strip
from ..token_runs import TokenRun, check_request, token_row, token_runs
from .figure_view import rendered
from .panel import Panel
from .selection import same_batch
from .skin import asset
from .static_view import Picture, StaticView, Table

if TYPE_CHECKING:
    from ..batch import PreparedBatch
    from .timeline_panel import TimelinePanel

PAGE = 200
_FOLDED = ("audio", "padding")  # roles whose runs are one row until they are unfolded
_SHORTEST_FOLD = 2
_KEYS = (
    "Arrows move through the rows, Enter chooses: an audio run selects its seconds on the timeline, a time marker moves its "
    "cursor. Right and Left unfold and fold, Esc selects nothing."
)


class TokenRows(anywidget.AnyWidget):
    """The rows of one page in the browser; `rows` are dicts of texts, messages tell which was chosen or folded."""

    _esm = asset("token_table.js")
    _css = asset("token_table.css")
    rows = traitlets.List().tag(sync=True)
    label = traitlets.Unicode("").tag(sync=True)

    def __repr__(self) -> str:
        return f"TokenRows({self.label})"


class TokenTable(Panel):
    """The tokens of a prompt with id, text, role and seconds. Made as `TokenTable(batch)`; `follow(timeline)` links it.

    `selected`, () or (source, first, last), tokens of a source by its number in `batch.slots`, and `cursor`, () or (source,
    second), where a time marker was chosen, are traits that other panels follow. `unfolded` holds the first positions of
    the runs that are shown token by token. `request.value` and `page.value` choose what is shown; a page has 200 rows.

    Raises: ArgumentError for something other than a batch.
    """

    heading = "Tokens"
    selected = traitlets.Tuple()
    cursor = traitlets.Tuple()
    unfolded = traitlets.Tuple()

    def __init__(self, batch: PreparedBatch) -> None:
        if not hasattr(batch, "prompts"):
            raise _bad(f"batch is a {type(batch).__name__}; pass what session.prepare returned", "batch")
        self.batch = batch
        self._known: dict[int, tuple[TokenRun, ...]] = {}
        requests = [(f"request {b}", b) for b in range(len(batch))]
        self.request = ipywidgets.Dropdown(description="request", options=requests)
        self.page = ipywidgets.BoundedIntText(1, min=1, max=1, description="page")
        self.pages = ipywidgets.HTML()
        self.pages.add_class("audiollm-note")
        self.fold_button = ipywidgets.Button(description="Fold all", tooltip="Show every run of audio as one row")
        self.view = TokenRows()
        note = ipywidgets.HTML(f'<span class="audiollm-note">{_KEYS}</span>')
        super().__init__([ipywidgets.HBox([self.request, self.page, self.pages, self.fold_button]), self.view, note])
        self.view.on_msg(self.guarded(self._take))
        self.on_change(self.request, "value", self._turn_to_first)
        self.on_change(self.page, "value", self._show)
        self.on_change(self, "unfolded", self._show)
        self.on_change(self, "selected", self._go_to_selected)
        self.on_click(self.fold_button, self.fold_all)
        self._show()

    # Linking and choosing

    def follow(self, timeline: TimelinePanel) -> TokenTable:
        """Show what a timeline selects, and select there what is chosen here. Raises: ArgumentError for another batch's."""
        same_batch(self.batch, timeline)
        self.follow_trait(timeline, "selected_tokens", lambda value: setattr(self, "selected", tuple(value)))
        self.selected = tuple(timeline.selected_tokens)
        self.follow_trait(self, "selected", lambda value: self._select_there(timeline, value))
        self.follow_trait(self, "cursor", lambda value: value and timeline.seek(value[1], value[0]))
        return self

    def _select_there(self, timeline: TimelinePanel, value: tuple) -> None:
        if value and tuple(timeline.selected_tokens) != value:
            timeline.select_tokens(*value)
        elif not value and timeline.selected_tokens:
            timeline.clear()

    def choose(self, position: int) -> TokenTable:
        """Select the token at a position of the shown request, or move the cursor to a time marker's second.

        Other tokens have no time: the selection stays. Raises: ArgumentError for a position outside the prompt.
        """
        row = token_row(self.batch, self.request.value, position)
        run = self._run_at(position)
        if row.role == "audio" and run.slot is not None and run.first_token is not None:
            token = run.first_token + position - run.first
            self.selected = (run.slot, token, token)
        elif row.marker_s is not None and run.slot is not None:
            self.cursor = (run.slot, min(row.marker_s, self.batch.timeline[run.slot].used_s))
        return self

    def choose_run(self, position: int) -> TokenTable:
        """Select all tokens of the audio run that holds a position. Raises: as `choose`."""
        token_row(self.batch, self.request.value, position)
        run = self._run_at(position)
        if run.slot is not None and run.first_token is not None and run.last_token is not None:
            self.selected = (run.slot, run.first_token, run.last_token)
        return self

    def fold(self, position: int) -> TokenTable:
        """Fold the run that holds a position, or unfold it where it is folded. Raises: as `choose`."""
        token_row(self.batch, self.request.value, position)
        run = self._run_at(position)
        if run.role in _FOLDED and len(run) >= _SHORTEST_FOLD:
            mine = (self.request.value, run.first)
            others = tuple(each for each in self.unfolded if each != mine)
            self.unfolded = others if mine in self.unfolded else (*others, mine)
        return self

    def fold_all(self) -> TokenTable:
        """Show every run of audio and padding as one row."""
        self.unfolded = ()
        return self

    @traitlets.validate("selected")
    def _check_selected(self, proposal: Any) -> tuple:
        value = tuple(proposal.value)
        if not value:
            return ()
        slots = self.batch.slots
        if len(value) != 3 or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            raise _bad(f"selected is {value!r}; pass (source, first, last), or ()", "selected")
        if not 0 <= value[0] < len(slots):
            raise _bad(f"source {value[0]} is not one of the batch's {len(slots)} source(s)", "selected")
        number, first, last = value
        n = len(slots[number].token_positions)
        if not 0 <= first <= last < n:
            raise _bad(f"tokens {first}..{last} are not in source {number}, which has {n}", "selected")
        return value

    @traitlets.validate("unfolded")
    def _check_unfolded(self, proposal: Any) -> tuple:
        for each in proposal.value:
            if len(tuple(each)) != 2:
                raise _bad(f"unfolded holds {each!r}; pass (request, first position) pairs", "unfolded")
            check_request(self.batch, each[0])
        return tuple(tuple(each) for each in proposal.value)

    def _take(self, widget: Any, content: dict, buffers: list) -> None:
        event, first = content.get("event"), content.get("first")
        if event == "clear":
            self.selected = ()
        elif event == "fold" and isinstance(first, int):
            self.fold(first)
        elif event == "choose" and isinstance(first, int):
            run = self._run_at(first)
            is_token = content.get("inner") or not self._is_folded(run)
            (self.choose if is_token else self.choose_run)(first)

    # Rows

    @property
    def runs(self) -> tuple[TokenRun, ...]:
        """The runs of the shown request."""
        b = self.request.value
        if b not in self._known:
            self._known[b] = token_runs(self.batch, b)
        return self._known[b]

    def _run_at(self, position: int) -> TokenRun:
        return next(run for run in self.runs if run.first <= position <= run.last)

    def _is_foldable(self, run: TokenRun) -> bool:
        return run.role in _FOLDED and len(run) >= _SHORTEST_FOLD

    def _is_folded(self, run: TokenRun) -> bool:
        return self._is_foldable(run) and (self.request.value, run.first) not in self.unfolded

    def _n_rows(self, run: TokenRun) -> int:
        """Rows of a run: one where it is folded, else its tokens, under a head where it can be folded again."""
        return 1 if self._is_folded(run) else len(run) + self._is_foldable(run)

    def _page_rows(self, start: int, end: int) -> list[dict[str, Any]]:
        """Rows start..end, exclusive, of all rows of the request; only these are decoded."""
        rows: list[dict[str, Any]] = []
        at = 0
        for run in self.runs:
            n = self._n_rows(run)
            for k in range(max(start - at, 0), min(end - at, n)):
                head = self._is_foldable(run)
                rows.append(self._head(run) if head and k == 0 else self._token(run, run.first + k - head, head))
            at += n
            if at >= end:
                break
        return rows

    def _head(self, run: TokenRun) -> dict[str, Any]:
        row = token_row(self.batch, run.sample_index, run.first)
        chosen = self._chosen_positions(run)
        text = f"{len(run):,} × {row.text}"
        if chosen and len(chosen) < len(run):
            text += f"   ({len(chosen):,} selected: positions {chosen[0]}-{chosen[-1]})"
        return _row(f"{run.first}-{run.last}", run, str(row.id), text, bool(chosen), not self._is_folded(run), False)

    def _token(self, run: TokenRun, position: int, inner: bool) -> dict[str, Any]:
        row = token_row(self.batch, run.sample_index, position)
        seconds = "" if row.marker_s is None else f"{row.marker_s:g}"
        if run.slot is not None and run.first_token is not None:
            start_s, end_s = self.batch.timeline[run.slot].token_to_time(run.first_token + position - run.first)
            seconds = f"{start_s:.2f}-{end_s:.2f}"
        shown = _row(
            str(position), run, str(row.id), _visible(row.text), position in self._chosen_positions(run), None, inner
        )
        return {**shown, "first": position, "seconds": seconds, "label": _label({**shown, "seconds": seconds})}

    def _chosen_positions(self, run: TokenRun) -> range:
        if not self.selected or run.slot != self.selected[0] or run.first_token is None or run.last_token is None:
            return range(0)
        _, first, last = self.selected
        low, high = max(first, run.first_token), min(last, run.last_token)
        return range(low - run.first_token + run.first, max(high - run.first_token + run.first + 1, 0))

    def _show(self) -> None:
        total = sum(map(self._n_rows, self.runs))
        n_pages = max(1, -(-total // PAGE))
        self.page.max = n_pages
        start = (self.page.value - 1) * PAGE
        self.pages.value = f"of {n_pages}: rows {start + 1:,}-{min(start + PAGE, total):,} of {total:,}"
        with self.view.hold_sync():
            self.view.label = f"tokens of request {self.request.value}"
            self.view.rows = self._page_rows(start, start + PAGE)

    def _turn_to_first(self) -> None:
        self.page.value = 1
        self._show()

    def _go_to_selected(self) -> None:
        """The request and page of what is selected; then the rows anew, since their marks changed."""
        if self.selected:
            self.request.value = self.batch.slots[self.selected[0]].sample_index
            at = 0
            for run in self.runs:
                chosen = self._chosen_positions(run)
                if chosen:
                    within = 0 if self._is_folded(run) else chosen[0] - run.first + self._is_foldable(run)
                    self._show()  # so that the number of pages is right
                    self.page.value = (at + within) // PAGE + 1
                    break
                at += self._n_rows(run)
        self._show()

    # Words

    def describe(self) -> str:
        """The runs of the shown request, and what is selected."""
        b = self.request.value
        lines = [f"{self.heading} of request {b}: {self.batch.width} positions in {len(self.runs)} runs"]
        lines += [f"  {row['label']}" for row in map(self._run_row, self.runs[:PAGE])]
        if len(self.runs) > PAGE:
            lines.append(f"  and {len(self.runs) - PAGE} runs more")
        if not self.selected:
            return "\n".join([*lines, "  nothing is selected"])
        number, first, last = self.selected
        timeline = self.batch.timeline[number]
        seconds = f"{timeline.token_to_time(first)[0]:.2f}-{timeline.token_to_time(last)[1]:.2f} s"
        places = f"{timeline.token_to_position(first)}-{timeline.token_to_position(last)}"
        return "\n".join(
            [*lines, f"  selected: tokens {first}-{last} of source {number}, {seconds}, positions {places}"]
        )

    def _run_row(self, run: TokenRun) -> dict[str, Any]:
        """A run as one row, whether it is unfolded or not."""
        if run.role in _FOLDED:
            row = token_row(self.batch, run.sample_index, run.first)
            return _row(_place(run), run, str(row.id), f"{len(run):,} × {row.text}", False, None, False)
        rows = [token_row(self.batch, run.sample_index, p) for p in range(run.first, run.last + 1)]
        ids = str(rows[0].id) if len(rows) == 1 else f"{len(rows)} ids"
        return _row(_place(run), run, ids, _visible("".join(row.text for row in rows)), False, None, False)

    def static(self) -> StaticView:
        """Runs as a strip of colours along the prompt, and as a table."""
        figure = token_strip(self.batch, self.request.value, self.selected or None)
        rows = [self._run_row(run) for run in self.runs[:PAGE]]
        cells = tuple(tuple(row[name] for name in ("place", "id", "text", "role", "source", "seconds")) for row in rows)
        table = Table(
            f"Prompt of request {self.request.value}", ("positions", "id", "text", "role", "source", "seconds"), cells
        )
        return StaticView(self.describe(), (Picture(rendered(figure, self.skin.dark), self.describe()),), (table,))

    def code(self) -> str:
        """Lines that list the same runs and tokens of `batch`."""
        b = self.request.value
        lines = [
            "from audiollm.token_runs import token_runs",
            f"runs = token_runs(batch, {b})",
            f"rows = [row for row in batch.tokens if row.sample_index == {b}]",
        ]
        if self.selected:
            number, first, last = self.selected
            lines.append(f"positions = batch.timeline[{number}].positions[{first} : {last + 1}]")
            lines.append("chosen = [rows[position] for position in positions]")
        return "\n".join(lines)


def _place(run: TokenRun) -> str:
    return str(run.first) if run.first == run.last else f"{run.first}-{run.last}"


def _row(
    place: str, run: TokenRun, token: str, text: str, selected: bool, is_open: bool | None, inner: bool
) -> dict[str, Any]:
    seconds = "" if run.start_s is None else f"{run.start_s:.2f}-{run.end_s:.2f}"
    row = {
        "first": run.first,
        "place": place,
        "id": token,
        "text": text,
        "role": run.role,
        "source": "" if run.slot is None else str(run.slot),
        "seconds": seconds,
        "selected": selected,
        "open": is_open,
        "inner": inner,
    }
    return {**row, "label": _label(row)}


def _label(row: dict[str, Any]) -> str:
    """A row in words, for screen readers and `describe`."""
    source = f" of source {row['source']}" if row["source"] else ""
    seconds = f", {row['seconds']} s" if row["seconds"] else ""
    return f"{row['place']} {row['role']}{source}{seconds}: {row['text']}"


def _visible(text: str) -> str:
    """Text with line ends and tabs as signs, so that a row stays a row."""
    return text.replace("\r", "␍").replace("\n", "⏎").replace("\t", "⇥")


def _bad(message: str, source: str) -> ArgumentError:
    return ArgumentError(message, code="bad_argument", source=source)
