"""Who may watch a job as it goes."""

from typing import Protocol

from fedlightning.config import ClientsConfig
from fedlightning.federation.rounds import RoundReport
from fedlightning.search import Counts, TrialSummary


class RunWatcher(Protocol):
    """Sees a single training."""

    def phase(self, text: str) -> None:
        """Called when something begins that takes a while, or needs to be said."""

    def round_done(self, report: RoundReport, num_rounds: int) -> None:
        """Called after each round."""


class StudyWatcher(RunWatcher, Protocol):
    """Sees a study, and the refit of its winner as a single training; called from every worker's thread."""

    def search_begins(self, counts: Counts, total: int, timeout: float | None) -> None:
        """Called once, before the first trial of this call."""

    def trial_begins(self, number: int, clients: ClientsConfig) -> None:
        """Called when a trial starts."""

    def trial_round(self, number: int, report: RoundReport, num_rounds: int) -> None:
        """Called after each round of a trial."""

    def trial_ends(self, summary: TrialSummary, counts: Counts, best: TrialSummary | None) -> None:
        """Called when a trial is over."""

    def search_ends(self) -> None:
        """Called once, after the last trial of this call."""
