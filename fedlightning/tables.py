"""Results as tables: every competitor on the same rows, as aligned text, Markdown or CSV."""

import csv
import io
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedlightning.experiment import Comparison
    from fedlightning.tasks import Scores

_COLUMNS = ("validation loss", "validation {}", "test loss", "test {}")


@dataclass(frozen=True)
class ComparisonRow:
    """One competitor's means; None where it was not scored."""

    name: str
    validation_loss: float | None = None
    validation_metric: float | None = None
    test_loss: float | None = None
    test_metric: float | None = None

    @property
    def figures(self) -> tuple[float | None, float | None, float | None, float | None]:
        """The four numbers in the order of the columns."""
        return self.validation_loss, self.validation_metric, self.test_loss, self.test_metric


def comparison_rows(*, validation: "Comparison | None" = None, test: "Comparison | None" = None) -> list[ComparisonRow]:
    """Return the network, its baselines, and each client on its own, in that order.

    A competitor that was scored neither on validation nor on test rows has no row.
    """
    on_validation_rows, on_test_rows = _competitors(validation), _competitors(test)
    # Clients come last whatever was scored; the sort is stable, so the others keep their order.
    names = sorted({**on_validation_rows, **on_test_rows}, key=lambda name: name.startswith("local-only client"))
    rows = []
    for name in names:
        on_validation, on_test = on_validation_rows.get(name), on_test_rows.get(name)
        rows.append(
            ComparisonRow(
                name,
                on_validation.loss if on_validation else None,
                on_validation.metric if on_validation else None,
                on_test.loss if on_test else None,
                on_test.metric if on_test else None,
            )
        )
    return rows


def _competitors(comparison: "Comparison | None") -> "dict[str, Scores]":
    if comparison is None:
        return {}
    scores: dict[str, Scores] = {
        "network": comparison.network,
        "mean-margin": comparison.mean_margin,
    }
    if comparison.local_only:
        scores["local-only mean"] = comparison.local_only_mean
    if comparison.centralized is not None:
        scores["centralized"] = comparison.centralized
    for client, own in enumerate(comparison.local_only):
        scores[f"local-only client {client}"] = own
    return scores


def as_text(rows: Sequence[ComparisonRow], metric: str) -> str:
    """Render aligned columns for a terminal: accuracy in percent, anything else with 4 significant digits."""
    return align([_header(metric), *(_cells(row, metric) for row in rows)])


def align(cells: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> str:
    """Return lines of cells in columns below a ruled header; the columns ``left`` hold words, the others numbers."""
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]]) + "\n"


def as_markdown(rows: Sequence[ComparisonRow], metric: str) -> str:
    """Render a Markdown table with the same cells as the text."""
    cells = [_header(metric), *(_cells(row, metric) for row in rows)]
    rule = "| --- |" + " ---: |" * (len(cells[0]) - 1)
    lines = ["| " + " | ".join(line) + " |" for line in cells]
    return "\n".join([lines[0], rule, *lines[1:]]) + "\n"


def as_csv(rows: Sequence[ComparisonRow], metric: str) -> str:
    """Render comma-separated values at full precision, accuracy as a fraction, missing figures empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(name.replace(" ", "_") for name in _header(metric))
    writer.writerows([row.name, *("" if value is None else repr(value) for value in row.figures)] for row in rows)
    return text.getvalue()


def format_metric(metric: str, value: float | None) -> str:
    """Return a metric as people read it: accuracy in percent, anything else with 4 significant digits."""
    if value is None or math.isnan(value):
        return "-"
    return f"{100 * value:.2f} %" if metric == "accuracy" else _significant(value)


def format_loss(value: float | None) -> str:
    """Return a loss with 4 significant digits."""
    return "-" if value is None or math.isnan(value) else _significant(value)


def _significant(value: float) -> str:
    if value != 0 and math.isfinite(value) and 1e-4 <= abs(value) < 1e6:
        # Like the format's "g", but without an exponent and with the trailing zeros that align a column.
        digits = max(0, 3 - math.floor(math.log10(float(f"{abs(value):.3e}"))))
        return f"{value:.{digits}f}"
    return f"{value:.4g}"


def _header(metric: str) -> list[str]:
    return ["model", *(column.format(metric) for column in _COLUMNS)]


def _cells(row: ComparisonRow, metric: str) -> list[str]:
    formats: list[Callable[[float | None], str]] = [format_loss, lambda value: format_metric(metric, value)]
    return [row.name, *(formats[i % 2](value) for i, value in enumerate(row.figures))]
