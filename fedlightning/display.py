"""Show a job as it goes: a live line in a terminal, plain lines anywhere else."""

import threading
import time

from rich.console import Console
from rich.live import Live
from rich.text import Text

from fedlightning.config import ClientsConfig
from fedlightning.federation.rounds import RoundReport
from fedlightning.search import Counts, TrialSummary
from fedlightning.tables import format_loss, format_metric


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
        self._lock = threading.RLock()
        self._live: Live | None = None
        self._started = time.monotonic()
        self._timeout: float | None = None
        self._total = 0
        self._counts = Counts(0, 0, 0)
        self._done_before = 0
        self._best = ""
        self._running: dict[int, str] = {}

    def result(self, text: str) -> None:
        """Write what the user came for."""
        with self._lock:
            self._console.print(Text(text), soft_wrap=True)

    def phase(self, text: str) -> None:
        """Say what begins now."""
        self._line(text)

    def round_done(self, report: RoundReport, num_rounds: int) -> None:
        """Write a round's line."""
        self._line(round_line(report, num_rounds, self._metric))

    def search_begins(self, counts: Counts, total: int, timeout: float | None) -> None:
        """Start the live line."""
        with self._lock:
            self._started = time.monotonic()
            self._counts, self._total, self._timeout = counts, total, timeout
            self._done_before = counts.finished
            missing = total - counts.finished
            limit = f", no new trial after {_clock(timeout)}" if timeout else ""
            there = f" ({counts.finished} are there)" if counts.finished else ""
            self._line(f"searching: {missing} trials to do{there}{limit}")
            if self._console.is_terminal and not self._quiet:
                self._live = Live(
                    get_renderable=self._live_line,
                    console=self._console,
                    refresh_per_second=4,
                    transient=True,
                )
                self._live.start()

    def trial_begins(self, number: int, clients: ClientsConfig) -> None:
        """Note that a trial is under way."""
        with self._lock:
            self._running[number] = "growing"

    def trial_round(self, number: int, report: RoundReport, num_rounds: int) -> None:
        """Note how far a trial is."""
        assert report.validation is not None
        with self._lock:
            self._running[number] = f"round {report.number}/{num_rounds} loss {format_loss(report.validation.loss)}"

    def trial_ends(self, summary: TrialSummary, counts: Counts, best: TrialSummary | None) -> None:
        """Write a trial's line."""
        with self._lock:
            self._running.pop(summary.number, None)
            self._counts = counts
            if best is not None:
                self._best = f"best so far {format_loss(best.value)} (trial {best.number})"
            self._line(f"{trial_line(summary, self._metric)} | {self._best or 'none complete yet'} | {self._left()}")

    def search_ends(self) -> None:
        """Take the live line away."""
        with self._lock:
            if self._live is not None:
                self._live.stop()
                self._live = None

    close = search_ends

    def _line(self, text: str) -> None:
        if not self._quiet:
            with self._lock:
                self._console.print(Text(text), soft_wrap=True)

    def _live_line(self) -> Text:
        with self._lock:
            trials = "; ".join(f"trial {number} {state}" for number, state in sorted(self._running.items()))
            done = f"{self._counts.finished}/{self._total} trials"
            text = " | ".join(part for part in (done, trials, self._best, self._left()) if part)
            return Text(text, style="bold", no_wrap=True, overflow="ellipsis")

    def _left(self) -> str:
        """Return how long the search may still take: by the trials so far, and never beyond the timeout."""
        elapsed = time.monotonic() - self._started
        done = self._counts.finished - self._done_before
        estimates = []
        if done:
            estimates.append(elapsed / done * (self._total - self._counts.finished))
        if self._timeout is not None:
            estimates.append(self._timeout - elapsed)
        return f"{_clock(max(0.0, min(estimates)))} left" if estimates else ""


def round_line(report: RoundReport, num_rounds: int, metric: str) -> str:
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


def trial_line(summary: TrialSummary, metric: str) -> str:
    """Return one line on a trial: how it ended, its scores, its searched values."""
    text = f"trial {summary.number} {summary.state}"
    if summary.state == "complete":
        scores = summary.attributes["validation"]["network"]
        text += (
            f": loss {format_loss(scores['loss'])} {metric} {format_metric(metric, scores['metric'])}"
            f" in round {summary.attributes['best_round']}"
        )
    values = " ".join(f"{key}={_short(value)}" for key, value in summary.values.items())
    seconds = f" | {summary.seconds:.1f} s" if summary.seconds is not None else ""
    return f"{text} | {values}{seconds}"


def format_bytes(count: int) -> str:
    """Return bytes as people read them, in decimal units."""
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
