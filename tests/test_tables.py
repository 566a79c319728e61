"""Tests for the tables of results."""

import csv
import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlightning.experiment import Comparison
from fedlightning.tables import (
    ComparisonRow,
    as_csv,
    as_markdown,
    as_text,
    comparison_rows,
    format_loss,
    format_metric,
)
from fedlightning.tasks import Scores


def scores(loss: float, metric: float) -> Scores:
    """Scores over some rows."""
    return Scores(loss, metric, 100)


VALIDATION = Comparison(scores(0.3256, 0.8491), scores(0.339, 0.8441), (scores(0.35, 0.84), scores(0.36, 0.82)))
TEST = Comparison(
    scores(0.33, 0.8475),
    scores(0.3401, 0.8437),
    (scores(0.351, 0.839), scores(0.361, 0.821)),
    scores(0.31, 0.85),
)


def test_rows_pair_validation_and_test_of_every_competitor() -> None:
    """Each competitor has one row, the clients stand last, and what was not scored is None."""
    rows = comparison_rows(validation=VALIDATION, test=TEST)
    assert [row.name for row in rows] == [
        "network",
        "mean-margin",
        "local-only mean",
        "centralized",
        "local-only client 0",
        "local-only client 1",
    ]
    assert rows[0].figures == (0.3256, 0.8491, 0.33, 0.8475)
    assert rows[2].figures == pytest.approx((0.355, 0.83, 0.356, 0.83))
    assert rows[3].figures == (None, None, 0.31, 0.85)
    assert rows[5].figures == (0.36, 0.82, 0.361, 0.821)


def test_rows_of_one_comparison_alone() -> None:
    """Without test rows, or without any, the table is shorter, not broken."""
    assert [row.name for row in comparison_rows(validation=VALIDATION)][-1] == "local-only client 1"
    assert all(row.test_loss is None for row in comparison_rows(validation=VALIDATION))
    assert comparison_rows() == []


def test_text_is_aligned_and_shows_percent() -> None:
    """Lines have equal length, numbers end in one column, and a missing figure is a dash."""
    text = as_text(comparison_rows(validation=VALIDATION, test=TEST), "accuracy")
    lines = text.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert " ".join(lines[0].split()) == "model validation loss validation accuracy test loss test accuracy"
    assert lines[2].split() == ["network", "0.3256", "84.91", "%", "0.3300", "84.75", "%"]
    assert lines[5].split() == ["centralized", "-", "-", "0.3100", "85.00", "%"]


def test_markdown_has_the_cells_of_the_text() -> None:
    """The Markdown table is a heading, a rule with right-aligned numbers, and the rows."""
    lines = as_markdown(comparison_rows(test=TEST), "mse").splitlines()
    assert lines[0] == "| model | validation loss | validation mse | test loss | test mse |"
    assert lines[1] == "| --- | ---: | ---: | ---: | ---: |"
    assert lines[2] == "| network | - | - | 0.3300 | 0.8475 |"


@given(
    st.lists(
        st.tuples(st.text(st.characters(exclude_categories=["Cs", "Cc"])), st.none() | st.floats(allow_nan=False)),
        max_size=4,
    )
)
def test_csv_is_read_back_exactly(entries: list[tuple[str, float | None]]) -> None:
    """Names with commas or quotes and numbers at full precision survive."""
    rows = [ComparisonRow(name, test_metric=value) for name, value in entries]
    header, *lines = csv.reader(io.StringIO(as_csv(rows, "accuracy")))
    assert header == ["model", "validation_loss", "validation_accuracy", "test_loss", "test_accuracy"]
    assert [(line[0], float(line[4]) if line[4] else None) for line in lines] == entries
    assert all(line[1:4] == ["", "", ""] for line in lines)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (math.nan, "-"),
        (0.0, "0"),
        (4.43, "4.430"),
        (15.6, "15.60"),
        (0.00987654, "0.009877"),
        (9.99999, "10.00"),
        (123456.7, "123457"),
        (1.5e8, "1.5e+08"),
        (2.5e-7, "2.5e-07"),
        (-0.25, "-0.2500"),
        (math.inf, "inf"),
    ],
)
def test_losses_and_errors_have_four_significant_digits(value: float | None, text: str) -> None:
    """Numbers of any size stay readable and aligned."""
    assert format_loss(value) == text
    assert format_metric("mse", value) == text


@given(st.floats(1e-4, 9e5))
def test_four_significant_digits_are_right(value: float) -> None:
    """What is shown differs from the value by at most half a unit of the fourth digit."""
    assert float(format_loss(value)) == pytest.approx(value, rel=5.01e-4)


def test_accuracy_is_shown_in_percent() -> None:
    """A fraction of rows becomes percent with two decimals; a missing one a dash."""
    assert format_metric("accuracy", 0.84239) == "84.24 %"
    assert format_metric("accuracy", None) == "-"
