"""Tests for what people see of a job: plain lines, the live line of a terminal, and the estimates in them."""

import io
import threading
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from fedlightning import display as display_module
from fedlightning.config import ClientsConfig, load_clients
from fedlightning.display import Display, format_bytes, round_line, trial_line
from fedlightning.federation.rounds import RoundReport
from fedlightning.search import Counts, TrialSummary
from fedlightning.tasks import Scores

CLIENTS: ClientsConfig = load_clients("a9a_5_clients")


class Screen:
    """A console that remembers what was written to it."""

    def __init__(self, *, terminal: bool = False, width: int = 300, encoding: str = "utf-8") -> None:
        self._bytes = io.BytesIO()
        file = io.TextIOWrapper(self._bytes, encoding=encoding, write_through=True)
        self.console = Console(file=file, force_terminal=terminal, width=width, color_system=None)

    @property
    def text(self) -> str:
        """Everything that was written so far."""
        return self._bytes.getvalue().decode()

    @property
    def lines(self) -> list[str]:
        """Everything that was written so far, by lines."""
        return self.text.splitlines()


class Clock:
    """Stands in for the time, so that estimates can be foretold."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Return what a test has set."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Let a test say how late it is."""
    made = Clock()
    monkeypatch.setattr(display_module, "time", made)
    return made


def report(number: int, *, loss: float = 0.25, validated: bool = True) -> RoundReport:
    """Return what a round did."""
    validation = Scores(loss, 0.9, 100) if validated else None
    return RoundReport(number, Scores(0.5, 0.75, 400), validation, 1_500, 2_000_000, 1.25, {})


def complete(number: int, *, loss: float = 0.25, value: float | None = None, **values: Any) -> TrialSummary:
    """Return a trial that was completed."""
    network = {"loss": loss, "metric": 0.875, "examples": 100}
    attributes = {"validation": {"network": network}, "best_round": 12}
    return TrialSummary(number, "complete", loss if value is None else value, values, attributes, 61.25)


def pruned(number: int) -> TrialSummary:
    """Return a trial that was pruned."""
    return TrialSummary(number, "pruned", None, {"CNN.lr": 0.001}, {"pruned_because": "worse than the median"}, 2.0)


# -- lines ----------------------------------------------------------------------------------------------------------


def test_a_rounds_line() -> None:
    """A round's line holds both scores in readers' units, the bytes both ways, and the time."""
    assert round_line(report(3), 30, "accuracy") == (
        "round  3/30 | train loss 0.5000 accuracy 75.00 % | validation loss 0.2500 accuracy 90.00 %"
        " | up 1.5 kB down 2.0 MB | 1.2 s"
    )


def test_a_round_without_validation_says_nothing_of_it() -> None:
    """The rounds of a refit have no validation rows, and their lines no empty column."""
    line = round_line(report(1, validated=False), 1, "mse")
    assert "validation" not in line
    assert line.startswith("round 1/1 | train loss 0.5000 mse 0.7500 | up")


def test_a_trials_line() -> None:
    """A trial's line says how it ended and with which values, numbers short enough to read."""
    line = trial_line(complete(7, n_estimators_client=50, **{"CNN.lr": 0.000123456}), "accuracy")
    assert line == (
        "trial 7: loss 0.2500 accuracy 87.50 % in round 12 | n_estimators_client=50 CNN.lr=0.000123 | 61.2 s"
    )
    assert trial_line(pruned(8), "accuracy") == "trial 8 pruned: worse than the median | CNN.lr=0.001 | 2.0 s"
    unknown = TrialSummary(9, "failed", None, {}, {}, None)
    assert trial_line(unknown, "accuracy") == "trial 9 failed"


@given(st.integers(0, 10**13))
@example(999)
@example(999_949)
@example(999_950)
@example(999_999_999)
def test_bytes_are_readable_and_right(count: int) -> None:
    """A number of bytes keeps its size within rounding, and never needs four digits before a unit's next."""
    number, unit = format_bytes(count).split()
    scale = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}[unit]
    assert float(number) * scale == pytest.approx(count, abs={"B": 0, "GB": 0.00501 * scale}.get(unit, 0.0501 * scale))
    assert unit == "GB" or float(number) < 1000


# -- a whole search -------------------------------------------------------------------------------------------------


def test_plain_lines_without_a_terminal(clock: Clock) -> None:
    """Into a file or a pipe go whole lines, one per event, without control characters, however long they are."""
    screen = Screen(width=40)
    display = Display(screen.console, "accuracy")
    display.phase("opening [bold]the[/bold] stores")
    display.search_begins(Counts(0, 0, 0), 3, 600)
    assert display._live is None
    for number, ended, counts in (
        (0, complete(0, loss=0.5), Counts(1, 0, 0)),
        (1, pruned(1), Counts(1, 1, 0)),
        (2, complete(2, loss=0.25), Counts(2, 1, 0)),
    ):
        clock.now += 30
        display.trial_begins(number, CLIENTS)
        display.trial_round(number, report(1), 30)
        display.trial_ends(ended, counts, complete(2, loss=0.25) if number == 2 else complete(0, loss=0.5))
    display.search_ends()
    display.round_done(report(1, validated=False), 2)
    display.result("the table")
    assert "\x1b" not in screen.text
    lines = screen.lines
    assert lines[:2] == [
        "opening [bold]the[/bold] stores",
        "searching: 3 trials to do; after 10:00 no further one starts",
    ]
    assert lines[2] == (
        "[1/3] trial 0: loss 0.5000 accuracy 87.50 % in round 12 | 61.2 s"
        " | best so far: trial 0, loss 0.5000 accuracy 87.50 % | about 1:00 left"
    )
    assert lines[3].startswith("[2/3] trial 1 pruned: worse than the median | ")
    assert lines[3].endswith("| best so far: trial 0, loss 0.5000 accuracy 87.50 % | about 0:30 left")
    assert lines[4].endswith("| best so far: trial 2, loss 0.2500 accuracy 87.50 %")
    assert lines[5].startswith("round 1/2 | train loss")
    assert lines[6:] == ["the table"]


def test_before_any_trial_is_complete(clock: Clock) -> None:
    """As long as all trials were pruned there is no best one, and the line says so."""
    screen = Screen()
    display = Display(screen.console, "accuracy")
    display.search_begins(Counts(0, 0, 0), 9, None)
    display.trial_ends(pruned(0), Counts(0, 1, 0), None)
    assert "| none is complete yet" in screen.lines[1]


def test_a_resumed_search_tells_what_is_there(clock: Clock) -> None:
    """Trials of an earlier call count towards the total, but not towards this call's speed."""
    screen = Screen()
    display = Display(screen.console, "accuracy")
    display.search_begins(Counts(4, 1, 2), 7, None)
    assert screen.lines == ["searching: 2 trials to do (5 of 7 are there)"]
    clock.now += 50
    display.trial_ends(complete(9), Counts(5, 1, 2), complete(9))
    assert screen.lines[1].startswith("[6/7] trial 9")
    assert screen.lines[1].endswith("about 0:50 left")


@pytest.mark.parametrize(
    ("timeout", "elapsed", "total", "left"),
    [
        (None, 10, 3, "about 0:20 left"),
        (15, 10, 3, "about 0:05 left"),
        (5, 10, 3, "about 0:00 left"),
        (None, 600, 60, "about 9:50:00 left"),
    ],
)
def test_time_left(clock: Clock, timeout: float | None, elapsed: float, total: int, left: str) -> None:
    """What is left follows from the trials so far, is never more than the timeout leaves, and never below zero."""
    screen = Screen()
    display = Display(screen.console, "accuracy")
    display.search_begins(Counts(0, 0, 0), total, timeout)
    clock.now += elapsed
    display.trial_ends(complete(0), Counts(1, 0, 0), complete(0))
    assert screen.lines[1].endswith(left)


def test_a_study_of_the_metric_shows_the_metric(clock: Clock) -> None:
    """The best trial is shown by its scores, not by what Optuna minimises, which may be a negative accuracy."""
    screen = Screen()
    display = Display(screen.console, "accuracy")
    display.search_begins(Counts(0, 0, 0), 2, None)
    display.trial_ends(complete(0, value=-0.875), Counts(1, 0, 0), complete(0, value=-0.875))
    assert "-0.875" not in screen.text
    assert "best so far: trial 0, loss 0.2500 accuracy 87.50 %" in screen.text


def test_quiet_writes_results_only(clock: Clock) -> None:
    """With quiet, even in a terminal, nothing is written but what the user came for."""
    screen = Screen(terminal=True)
    display = Display(screen.console, "accuracy", quiet=True)
    display.phase("opening the stores")
    display.search_begins(Counts(0, 0, 0), 2, 10)
    display.trial_begins(0, CLIENTS)
    display.trial_round(0, report(1), 30)
    display.trial_ends(complete(0), Counts(1, 0, 0), complete(0))
    display.search_ends()
    display.round_done(report(1), 30)
    assert screen.text == ""
    display.result("the [bold]table[/bold]")
    assert screen.lines == ["the [bold]table[/bold]"]


# -- the live line --------------------------------------------------------------------------------------------------


def refresh(display: Display) -> None:
    """Draw the live line now."""
    assert display._live is not None
    display._live.refresh()


def test_live_line_in_a_terminal(clock: Clock) -> None:
    """A terminal shows all running trials, the best so far and the time left; in the end only plain lines remain."""
    screen = Screen(terminal=True)
    display = Display(screen.console, "accuracy")
    display.search_begins(Counts(0, 0, 0), 4, None)
    try:
        display.trial_begins(0, CLIENTS)
        display.trial_begins(1, CLIENTS)
        display.trial_round(1, report(7, loss=0.125), 30)
        refresh(display)
        assert "0/4 trials | trial 0 growing trees; trial 1 round 7/30 loss 0.1250" in screen.lines[-1]
        clock.now += 10
        display.trial_ends(complete(0), Counts(1, 0, 0), complete(0))
        refresh(display)
        assert screen.lines[-1].endswith(
            "1/4 trials | trial 1 round 7/30 loss 0.1250"
            " | best so far: trial 0, loss 0.2500 accuracy 87.50 % | about 0:30 left"
        )
    finally:
        display.search_ends()
    before = screen.text
    assert before.rstrip().endswith("\x1b[2K")  # the live line is wiped away
    display.phase("refitting")
    assert screen.text == before + "refitting\n"


def test_live_line_fits_any_terminal(clock: Clock) -> None:
    """A narrow terminal with a small character set gets what fits in one line, and no character it lacks."""
    screen = Screen(terminal=True, width=20, encoding="ascii")
    display = Display(screen.console, "accuracy")
    display.search_begins(Counts(0, 0, 0), 4, None)
    try:
        display.trial_begins(0, CLIENTS)
        refresh(display)
    finally:
        display.search_ends()
    assert "0/4 trials | trial 0" in screen.text
    assert "growing" not in screen.text


@pytest.mark.timeout(60)
def test_drawing_and_writing_do_not_wait_for_each_other() -> None:
    """While one thread redraws the live line all the time, others write and end trials; nobody waits for ever."""
    screen = Screen(terminal=True)
    display = Display(screen.console, "accuracy")
    display.search_begins(Counts(0, 0, 0), 1_000, 60)
    live = display._live
    assert live is not None
    done = threading.Event()

    def redraw() -> None:
        while not done.is_set():
            live.refresh()

    def work(worker: int) -> None:
        for number in range(worker, 120, 2):
            display.trial_begins(number, CLIENTS)
            display.trial_round(number, report(1), 30)
            display.trial_ends(complete(number), Counts(number, 0, 0), complete(0))

    redrawing = threading.Thread(target=redraw, daemon=True)
    workers = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in range(2)]
    redrawing.start()
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join(30)
    stuck = [thread.name for thread in workers if thread.is_alive()]
    assert stuck == []
    display.search_ends()
    done.set()
    redrawing.join(30)
    assert not redrawing.is_alive()
    assert sum("] trial " in line for line in screen.lines) == 120
