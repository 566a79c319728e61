"""Tests for figures: the numbers behind them, and that they can be drawn."""

import io
import logging
import math
import re
import subprocess
import sys

import optuna
import pytest
from matplotlib.figure import Figure

from fedlightning import figures
from fedlightning.experiment import Comparison
from fedlightning.federation.rounds import RoundReport
from fedlightning.figures import Curve
from fedlightning.tasks import Scores


@pytest.fixture(autouse=True)
def _quiet_optuna() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def png(figure: Figure | None) -> bytes:
    """Render a figure."""
    assert figure is not None
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()


def curve(label: str = "network", *, level: float = 0.34, chosen: int | None = 2) -> Curve:
    """A training of three rounds."""
    return Curve(
        label,
        (1, 2, 3),
        (0.4, 0.35, 0.3),
        (0.41, 0.33, 0.36),
        (0.82, 0.85, 0.84),
        chosen,
        Scores(level, 0.844, 10),
        Scores(0.36, 0.839, 10),
    )


def study_of(
    values: list[float | None],
    *,
    parameters: tuple[str, ...] = ("CNN.lr", "xgb.max_depth"),
    maximize: bool = False,
) -> optuna.Study:
    """A study whose trials have the given values; None stands for a pruned one."""
    study = optuna.create_study(
        study_name="a9a_5",
        direction="maximize" if maximize else "minimize",
        sampler=optuna.samplers.RandomSampler(seed=0),
    )
    for value in values:
        trial = study.ask({name: optuna.distributions.FloatDistribution(0, 1) for name in parameters})
        study.tell(trial, value, state=None if value is not None else optuna.trial.TrialState.PRUNED)
    return study


def informative_study(trials: int = 30) -> optuna.Study:
    """A study in which the learning rate decides and the depth hardly matters."""
    study = optuna.create_study(study_name="a9a_5", sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(
        lambda trial: (trial.suggest_float("CNN.lr", 0, 1) - 0.5) ** 2 + 1e-3 * trial.suggest_int("depth", 4, 8),
        n_trials=trials,
    )
    return study


class TestConvergence:
    """The figure of a training's rounds."""

    def test_curve_reads_reports_and_comparison(self) -> None:
        """Every number is where it belongs, and a round without validation is NaN."""
        train, check = Scores(0.4, 0.8, 10), Scores(0.5, 0.7, 10)
        reports = [RoundReport(1, train, None, 1, 2, 0.1, {}), RoundReport(2, train, check, 1, 2, 0.1, {})]
        comparison = Comparison(check, Scores(0.6, 0.65, 10), (Scores(0.7, 0.6, 10), Scores(0.9, 0.5, 10)))
        made = Curve.of("network", reports, chosen=2, validation=comparison)
        assert (made.rounds, made.train_loss, made.chosen) == ((1, 2), (0.4, 0.4), 2)
        assert math.isnan(made.validation_loss[0])
        assert (made.validation_loss[1], made.validation_metric[1]) == (0.5, 0.7)
        assert made.mean_margin == comparison.mean_margin
        assert made.local_only is not None
        assert made.local_only.loss == pytest.approx(0.8)
        assert Curve.of("network", reports).local_only is None

    def test_lines_show_the_curve(self) -> None:
        """Training dashed and validation solid, the chosen round on its values, the baselines as levels."""
        losses, metrics = figures.convergence([curve()], metric="accuracy").axes
        drawn = {
            (line.get_linestyle(), line.get_marker()): [float(y) for y in line.get_ydata()]  # type: ignore[union-attr]
            for line in losses.lines
        }
        assert drawn["--", "o"] == [0.4, 0.35, 0.3]
        assert drawn["-", "o"] == [0.41, 0.33, 0.36]
        assert drawn["None", "*"] == [0.33]
        assert drawn["-.", "None"] == [0.34, 0.34]
        assert drawn[":", "None"] == [0.36, 0.36]
        assert [0.844, 0.844] in [list(line.get_ydata()) for line in metrics.lines]
        assert (losses.get_xlabel(), metrics.get_ylabel()) == ("round", "validation accuracy")

    def test_legend_names_what_is_drawn_and_nothing_else(self) -> None:
        """A training without baselines and validation has only its training loss in the legend."""
        full = figures.convergence([curve()], metric="accuracy").legends[0]
        assert [text.get_text() for text in full.get_texts()] == [
            "network, validation",
            "training loss",
            "mean-margin",
            "local-only mean",
            "chosen round",
        ]
        bare = Curve("network", (1, 2), (0.4, 0.3), (math.nan,) * 2, (math.nan,) * 2)
        (legend,) = figures.convergence([bare], metric="mse").legends
        assert [text.get_text() for text in legend.get_texts()] == ["training loss"]

    def test_several_curves_keep_colours_apart_and_share_equal_levels(self) -> None:
        """Each curve has a colour of its own; a baseline that all share is drawn once, in grey."""
        losses = figures.convergence([curve("a"), curve("b", level=0.345)], metric="accuracy").axes[0]
        solid = [line.get_color() for line in losses.lines if (line.get_linestyle(), line.get_marker()) == ("-", "o")]
        assert len(set(solid)) == 2
        assert [line.get_color() for line in losses.lines if line.get_linestyle() == "-."] == solid
        assert [line.get_color() for line in losses.lines if line.get_linestyle() == ":"] == ["#555555"]

    @pytest.mark.parametrize("number", [1, 3, 9])
    def test_any_number_of_curves_is_a_picture_of_900_pixels(self, number: int) -> None:
        """One training, a few and many are drawn in the same width."""
        data = png(figures.convergence([curve(f"trial {i}") for i in range(number)], metric="mse", title="a9a_5"))
        assert data.startswith(b"\x89PNG")
        assert int.from_bytes(data[16:20]) == 900

    def test_losses_over_magnitudes_get_a_logarithmic_axis(self) -> None:
        """A first round that is 100 times worse does not flatten the rest."""
        steep = Curve("network", (1, 2), (500.0, 4.0), (400.0, 5.0), (400.0, 5.0))
        assert figures.convergence([steep], metric="mse").axes[0].get_yscale() == "log"
        assert figures.convergence([curve()], metric="mse").axes[0].get_yscale() == "linear"

    def test_nothing_to_draw_is_an_error(self) -> None:
        """An empty list is the caller's mistake."""
        with pytest.raises(ValueError, match="no curve to draw"):
            figures.convergence([], metric="mse")


class TestHistory:
    """The figure of a study's trials."""

    def test_best_so_far_follows_the_direction(self) -> None:
        """Pruned trials are counted, and the best value only ever improves."""
        values = [3.0, None, 2.0, 5.0, math.inf, 1.0]
        history = figures.trial_history(study_of(values))
        assert (history.numbers, history.values) == ((0, 2, 3, 5), (3.0, 2.0, 5.0, 1.0))
        assert history.best == (3.0, 2.0, 2.0, 1.0)
        assert history.others == (("pruned", 1),)
        assert figures.trial_history(study_of(values, maximize=True)).best == (3.0, 3.0, 5.0, 5.0)

    def test_second_objective_is_read_where_asked(self) -> None:
        """A study of loss and bytes has a history for each."""
        study = optuna.create_study(directions=["minimize", "minimize"])
        for pair in [(3.0, 10.0), (2.0, 30.0)]:
            study.tell(study.ask({"x": optuna.distributions.FloatDistribution(0, 1)}), pair)
        assert figures.trial_history(study, objective=1).best == (10.0, 10.0)
        assert figures.trial_history(study).best == (3.0, 2.0)
        page = figures.optimization_history_page(study, objective=1, value_name="bytes")
        assert page is not None
        assert "bytes" in page

    def test_figure_says_how_trials_ended(self) -> None:
        """The title counts complete and other trials."""
        figure = figures.optimization_history_figure(study_of([3.0, None, 2.0]), value_name="validation loss")
        assert png(figure).startswith(b"\x89PNG")
        assert figure is not None
        assert figure.axes[0].get_title() == "a9a_5: 2 complete, 1 pruned"
        assert figure.axes[0].get_ylabel() == "validation loss"

    def test_page_needs_no_network(self) -> None:
        """Plotly's code is in the page, so MLflow shows it offline."""
        page = figures.optimization_history_page(study_of([3.0, 2.0]), value_name="validation loss")
        assert page is not None
        assert len(page) > 1_000_000
        assert re.search(r"<(script|link|img)[^>]*\s(src|href)=", page) is None
        assert "Best Value" in page

    def test_study_without_complete_trials_has_no_history(self, caplog: pytest.LogCaptureFixture) -> None:
        """None and a reason, instead of an empty picture."""
        with caplog.at_level(logging.INFO, "fedlightning"):
            assert figures.optimization_history_figure(study_of([None])) is None
            assert figures.optimization_history_page(study_of([])) is None
        assert caplog.text.count("no trial is complete") == 2


class TestImportances:
    """Which parameters mattered."""

    def test_the_parameter_that_decides_comes_first(self) -> None:
        """Shares sum to one, are ordered, and are the same each time."""
        study = informative_study()
        shares = figures.param_importances(study)
        assert shares is not None
        assert list(shares) == ["CNN.lr", "depth"]
        assert shares["CNN.lr"] > 0.8
        assert sum(shares.values()) == pytest.approx(1)
        assert figures.param_importances(study) == shares

    @pytest.mark.parametrize(
        ("values", "parameters", "reason"),
        [
            ([], ("CNN.lr",), "0 complete"),
            ([1.0, None], ("CNN.lr",), "1 complete"),
            ([1.0, math.inf], ("CNN.lr",), "1 complete"),
            ([2.5, 2.5, 2.5], ("CNN.lr", "depth"), "all 3 complete trials have the value 2.5"),
            ([1.0, 2.0], (), "share no searched parameter"),
        ],
    )
    def test_a_study_that_cannot_tell_says_why(
        self,
        values: list[float | None],
        parameters: tuple[str, ...],
        reason: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """None with the reason at INFO, for the numbers, the figure and the page."""
        study = study_of(values, parameters=parameters)
        with caplog.at_level(logging.INFO, "fedlightning"):
            assert figures.param_importances(study) is None
            assert figures.importances_figure(study) is None
            assert figures.importances_page(study) is None
        assert caplog.text.count(reason) == 3

    def test_single_parameter_has_all_the_importance(self) -> None:
        """A space of one key is no special case."""
        study = study_of([1.0, 2.0, 3.0], parameters=("CNN.lr",))
        assert figures.param_importances(study) == {"CNN.lr": 1.0}
        assert png(figures.importances_figure(study)).startswith(b"\x89PNG")

    def test_figure_and_page_name_the_evaluator(self) -> None:
        """A share means nothing without the method that computed it."""
        study = informative_study()
        figure = figures.importances_figure(study, value_name="validation loss")
        assert png(figure).startswith(b"\x89PNG")
        assert figure is not None
        assert "validation loss (fANOVA)" in figure.axes[0].get_xlabel()
        bars = [bar.get_width() for bar in figure.axes[0].patches]  # type: ignore[attr-defined]
        assert bars == sorted((figures.param_importances(study) or {}).values())
        page = figures.importances_page(study, value_name="validation loss")
        assert page is not None
        assert "validation loss (fANOVA)" in page


def test_importing_and_drawing_leave_pyplot_alone() -> None:
    """No plotting library is imported with the module, and pyplot not even by drawing."""
    code = (
        "import sys; from fedlightning.figures import Curve, convergence\n"
        "assert not {'matplotlib', 'plotly', 'optuna'} & set(sys.modules)\n"
        "convergence([Curve('a', (1,), (1.0,), (1.0,), (1.0,))], metric='mse')\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
