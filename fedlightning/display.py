"""Show a job as it goes: a live line in a terminal, plain lines anywhere else."""

import sys
import threading
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.text import Text

from fedlightning.tables import format_loss, format_metric

if TYPE_CHECKING:
    from fedlightning.config import ClientsConfig
    from fedlightning.federation.rounds import RoundReport
    from fedlightning.search import Counts, TrialSummary


class Display:
    """Watches runs and studies; safe to call from several threads.

    Args:
        console: Where to write; a terminal gets a live line below the plain ones.
        metric: Name of the metric that rounds report.
        quiet: Write nothing but what is asked for with ``result``.
    """

    def __init__(self, console: Console, metric: str, *, quiet: bool = False) -> None:
        self._console = console
        self._metric = metric
        self._quiet = quiet
        # Guards what the live line is made of. Never held while something is written: the thread that refreshes
        # the line holds rich's lock when it asks for this one.
        self._state = threading.Lock()
        self._live: Live | None = None
        self._started = time.monotonic()
        self._timeout: float | None = None
        self._total = 0
        self._done = 0
        self._done_before = 0
        self._best = ""
        self._running: dict[int, str] = {}

    def result(self, text: str) -> None:
        """Write what the user came for."""
        self._console.print(Text(text), soft_wrap=True)

    def phase(self, text: str) -> None:
        """Say what begins now."""
        if not self._quiet:
            self._console.print(Text(text), soft_wrap=True)

    def round_done(self, report: "RoundReport", num_rounds: int) -> None:
        """Write a round's line."""
        self.phase(round_line(report, num_rounds, self._metric))

    def search_begins(self, counts: "Counts", total: int, timeout: float | None) -> None:
        """Start the live line."""
        with self._state:
            self._started = time.monotonic()
            self._total, self._timeout = total, timeout
            self._done = self._done_before = counts.finished
        there = f" ({counts.finished} of {total} are there)" if counts.finished else ""
        limit = f"; after {_clock(timeout)} no further one starts" if timeout else ""
        self.phase(f"searching: {_counted(total - counts.finished, 'trial')} to do{there}{limit}")
        if self._console.is_terminal and not self._quiet:
            self._live = Live(
                get_renderable=self._live_line,
                console=self._console,
                refresh_per_second=4,
                transient=True,
                # Warnings are put above the line; those that somebody sends elsewhere still go there.
                redirect_stderr=sys.stderr.isatty(),
            )
            self._live.start()

    def trial_begins(self, number: int, clients: "ClientsConfig") -> None:
        """Note that a trial is under way."""
        with self._state:
            self._running[number] = "growing trees"

    def trial_round(self, number: int, report: "RoundReport", num_rounds: int) -> None:
        """Note how far a trial is."""
        assert report.validation is not None
        with self._state:
            self._running[number] = f"round {report.number}/{num_rounds} loss {format_loss(report.validation.loss)}"

    def trial_ends(self, summary: "TrialSummary", counts: "Counts", best: "TrialSummary | None") -> None:
        """Write a trial's line."""
        with self._state:
            self._running.pop(summary.number, None)
            self._done = counts.finished
            if best is not None:
                self._best = f"best so far: trial {best.number}, {_trial_scores(best, self._metric)}"
            parts = (
                f"[{self._done}/{self._total}] {trial_line(summary, self._metric)}",
                self._best or "none is complete yet",
                self._left(),
            )
        self.phase(" | ".join(part for part in parts if part))

    def search_ends(self) -> None:
        """Take the live line away."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    close = search_ends

    def _live_line(self) -> Text:
        with self._state:
            trials = "; ".join(f"trial {number} {state}" for number, state in sorted(self._running.items()))
            done = f"{self._done}/{self._total} trials"
            text = " | ".join(part for part in (done, trials, self._best, self._left()) if part)
        # Cropped, not ended by an ellipsis, which not every terminal's character set has.
        return Text(text, style="bold", no_wrap=True, overflow="crop")

    def _left(self) -> str:
        """Return how long the search may still take: by the trials so far, and never beyond the timeout."""
        if self._done >= self._total:
            return ""
        elapsed = time.monotonic() - self._started
        done = self._done - self._done_before
        estimates = []
        if done:
            estimates.append(elapsed / done * (self._total - self._done))
        if self._timeout is not None:
            estimates.append(self._timeout - elapsed)
        return f"about {_clock(max(0.0, min(estimates)))} left" if estimates else ""


def round_line(report: "RoundReport", num_rounds: int, metric: str) -> str:
    """Return one line on a round: losses, metric, bytes, seconds."""
    parts = [
        f"round {report.number:>{len(str(num_rounds))}}/{num_rounds}",
        f"train loss {format_loss(report.train.loss)} {metric} {format_metric(metric, report.train.metric)}",
    ]
    if report.validation is not None:
        validation = report.validation
        parts.append(
            f"validation loss {format_loss(validation.loss)} {metric} {format_metric(metric, validation.metric)}"
        )
    parts.append(f"up {format_bytes(report.bytes_up)} down {format_bytes(report.bytes_down)}")
    parts.append(f"{report.seconds:.1f} s")
    return " | ".join(parts)


def trial_line(summary: "TrialSummary", metric: str) -> str:
    """Return one line on a trial: how it ended, its scores, its searched values."""
    text = f"trial {summary.number}"
    if summary.state == "complete":
        text += f": {_trial_scores(summary, metric)} in round {summary.attributes['best_round']}"
    else:
        text += f" {summary.state}"
        if reason := summary.attributes.get("pruned_because"):
            text += f": {reason}"
    values = " ".join(f"{key}={_short(value)}" for key, value in summary.values.items())
    seconds = f"{summary.seconds:.1f} s" if summary.seconds is not None else ""
    return " | ".join(part for part in (text, values, seconds) if part)


def format_bytes(count: int) -> str:
    """Return bytes as people read them, in decimal units."""
    size = float(count)
    for unit in ("B", "kB", "MB"):
        # What would be rounded to 1000 of a unit is 1 of the next.
        if round(size, 0 if unit == "B" else 1) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def _trial_scores(summary: "TrialSummary", metric: str) -> str:
    scores = summary.attributes["validation"]["network"]
    return f"loss {format_loss(scores['loss'])} {metric} {format_metric(metric, scores['metric'])}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
