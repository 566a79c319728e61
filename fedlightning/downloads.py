"""Show downloads as they go: a bar in a terminal, plain lines anywhere else."""

from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from fedlightning.datasets import fetch_dataset, find_dataset, locate_dataset
from fedlightning.display import format_bytes

_PARTS = 4
"""Plain lines that one download takes after its first one."""


class DownloadDisplay:
    """Is called with a download's progress, and shows it until the end of its block.

    Args:
        console: Where to write.
        quiet: Write nothing.
    """

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console = console
        self._quiet = quiet
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._told: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, name: str, done: int, total: int | None) -> None:
        """Show that ``done`` bytes of a file have come; the total may be unknown."""
        if self._quiet:
            return
        if self._console.is_terminal:
            self._bar(name, done, total)
        else:
            self._line(name, done, total)

    def _bar(self, name: str, done: int, total: int | None) -> None:
        if self._bars is None:
            columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
            self._bars = Progress(*columns, console=self._console)
            self._bars.start()
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(f"downloading {name}", total=total)
        self._bars.update(self._tasks[name], completed=done)

    def _line(self, name: str, done: int, total: int | None) -> None:
        part = _PARTS * done // total if total else 0
        if part > self._told.get(name, -1):
            self._told[name] = part
            come = f": {format_bytes(done)} of {format_bytes(total)}" if total else ""
            self._console.print(Text(f"downloading {name}{come}"), soft_wrap=True)


def fetch_missing(name: str, data_dir: Path | None, console: Console, *, quiet: bool = False) -> None:
    """Download what a data set lacks before anything else waits for it."""
    if not locate_dataset(find_dataset(name), data_dir).available:
        with DownloadDisplay(console, quiet=quiet) as display:
            fetch_dataset(name, data_dir, display)
