"""Numbers in, figures out: how a run converged, how a study improved and which parameters mattered.

What a figure shows is computed apart from drawing it. Figures are matplotlib objects that belong to nobody
else: no pyplot, no global backend. Pages are HTML texts with plotly's JavaScript inside (about 5 MB), so that
MLflow's UI shows them without a network.
"""

import logging
import math
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from optuna import Study
    from optuna.trial import FrozenTrial

    from fedlightning.experiment import Comparison
    from fedlightning.federation.rounds import RoundReport
    from fedlightning.tasks import Scores

IMPORTANCE_EVALUATOR = "fANOVA"
"""How importances are computed; seeded, so that the same study gives the same figure."""

# Okabe and Ito's palette: told apart with every common kind of colour blindness; without black and yellow.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_GREY = "#555555"
_WIDTH, _DPI = 9.0, 100  # 900 pixels
_LOG_RATIO = 20.0
_MARKED_ROUNDS = 40

_Line = Literal["-.", ":"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Curve:
    """What one training shows over its rounds; NaN where a round has no validation."""

    label: str
    rounds: tuple[int, ...]
    train_loss: tuple[float, ...]
    validation_loss: tuple[float, ...]
    validation_metric: tuple[float, ...]
    chosen: int | None = None
    """The round whose network was kept."""
    mean_margin: "Scores | None" = None
    local_only: "Scores | None" = None
    """Mean of the clients; like mean-margin on validation rows."""

    @classmethod
    def of(
        cls,
        label: str,
        reports: "Sequence[RoundReport]",
        *,
        chosen: int | None = None,
        validation: "Comparison | None" = None,
    ) -> Self:
        """Read a curve from the reports of a training and its comparison on validation rows."""
        checks = [report.validation for report in reports]
        return cls(
            label,
            tuple(report.number for report in reports),
            tuple(report.train.loss for report in reports),
            tuple(math.nan if scores is None else scores.loss for scores in checks),
            tuple(math.nan if scores is None else scores.metric for scores in checks),
            chosen,
            None if validation is None else validation.mean_margin,
            validation.local_only_mean if validation is not None and validation.local_only else None,
        )


def convergence(curves: Sequence[Curve], *, metric: str, title: str | None = None) -> "Figure":
    """Draw losses and validation metric over the rounds, with the baselines that need no rounds as levels."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    if not curves:
        raise ValueError("no curve to draw; give at least one training")
    figure = Figure(figsize=(_WIDTH, 4.4), dpi=_DPI, layout="constrained")
    losses, metrics = figure.subplots(1, 2)
    palette = _palette(len(curves))
    for curve, colour in zip(curves, palette, strict=True):
        marker = "o" if len(curve.rounds) <= _MARKED_ROUNDS else ""
        losses.plot(
            curve.rounds,
            curve.train_loss,
            "--",
            marker=marker,
            markersize=2,
            color=colour,
            linewidth=1.2,
            alpha=0.7,
        )
        for axes, values in ((losses, curve.validation_loss), (metrics, curve.validation_metric)):
            axes.plot(curve.rounds, values, marker=marker, markersize=3, color=colour, linewidth=1.6)
            if curve.chosen in curve.rounds:
                chosen = values[curve.rounds.index(curve.chosen)]
                star = {"markersize": 15, "markeredgecolor": "white", "zorder": 5}
                axes.plot([curve.chosen], [chosen], "*", color=colour, **star)
    _draw_levels(losses, curves, palette, "loss")
    _draw_levels(metrics, curves, palette, "metric")
    last = max(max(curve.rounds, default=1) for curve in curves)
    for axes, name in ((losses, "loss"), (metrics, f"validation {_metric_name(metric)}")):
        axes.set(xlabel="round", ylabel=name, xlim=(1 - 0.03 * last, 1.03 * last))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        _tidy(axes)
    if not _is_validated(curves):
        metrics.set_yticks([])
        metrics.text(0.5, 0.5, "no validation rows", transform=metrics.transAxes, ha="center", color=_GREY)
    if _spread(curves) > _LOG_RATIO:
        losses.set_yscale("log")
    if metric == "accuracy":
        metrics.yaxis.set_major_formatter(PercentFormatter(1.0))
    if title:
        figure.suptitle(title)
    handles = _legend(curves, palette)
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 5), frameon=False)
    return figure


@dataclass(frozen=True)
class History:
    """A study's complete trials in order, and the best value up to each."""

    numbers: tuple[int, ...]
    values: tuple[float, ...]
    best: tuple[float, ...]
    others: tuple[tuple[str, int], ...]
    """How many trials ended otherwise, such as (("pruned", 3),)."""


def trial_history(study: "Study", *, objective: int = 0) -> History:
    """Return the finite values of one of the study's objectives, trial by trial."""
    from optuna.study import StudyDirection

    complete = _complete_trials(study, objective)
    values = [trial.values[objective] for trial in complete]
    better = max if study.directions[objective] == StudyDirection.MAXIMIZE else min
    best: list[float] = []
    for value in values:
        best.append(better([*best[-1:], value]))
    counts: dict[str, int] = {}
    for trial in study.get_trials(deepcopy=False):
        if trial.state.name != "COMPLETE":
            counts[trial.state.name.lower()] = counts.get(trial.state.name.lower(), 0) + 1
    return History(tuple(trial.number for trial in complete), tuple(values), tuple(best), tuple(sorted(counts.items())))


def param_importances(study: "Study", *, objective: int = 0) -> dict[str, float] | None:
    """Return each searched parameter's share of the objective's variance, the most important first.

    None, with the reason in the log, where the study cannot tell: fewer than two complete trials, equal
    values, or no parameter that all complete trials have.
    """
    from optuna.importance import get_param_importances

    complete = _complete_trials(study, objective)
    values = {trial.values[objective] for trial in complete}
    if len(complete) < 2:
        reason = f"{len(complete)} complete trial(s), at least 2 are needed"
    elif len(values) == 1:
        reason = f"all {len(complete)} complete trials have the value {values.pop():.6g}"
    else:
        with _unexcited():
            shares = get_param_importances(study, evaluator=_evaluator(), target=lambda trial: trial.values[objective])
        if shares and all(math.isfinite(share) for share in shares.values()):
            return {name: float(share) for name, share in shares.items()}
        reason = "the complete trials share no searched parameter"
    _logger.info("study %s: no parameter importances: %s", study.study_name, reason)
    return None


def optimization_history_figure(
    study: "Study", *, objective: int = 0, value_name: str = "objective"
) -> "Figure | None":
    """Draw the value of every complete trial and the best so far; None if no trial is complete."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    history = trial_history(study, objective=objective)
    if not history.numbers:
        _logger.info("study %s: no optimization history: no trial is complete", study.study_name)
        return None
    figure = Figure(figsize=(_WIDTH, 4.4), dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(history.numbers, history.values, "o", color=_COLOURS[0], markersize=5, alpha=0.7, label="trial")
    axes.step(history.numbers, history.best, where="post", color=_COLOURS[1], linewidth=1.8, label="best so far")
    if min(history.values) > 0 and max(history.values) / min(history.values) > _LOG_RATIO:
        axes.set_yscale("log")
    counts = ", ".join(f"{count} {state}" for state, count in (("complete", len(history.numbers)), *history.others))
    axes.set(xlabel="trial", ylabel=value_name, title=f"{study.study_name}: {counts}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    _tidy(axes)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def importances_figure(study: "Study", *, objective: int = 0, value_name: str = "objective") -> "Figure | None":
    """Draw the importances as bars; None where there are none, see `param_importances`."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    shares = param_importances(study, objective=objective)
    if shares is None:
        return None
    figure = Figure(figsize=(_WIDTH, 1.5 + 0.4 * len(shares)), dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh(list(shares)[::-1], list(shares.values())[::-1], color=_COLOURS[0], height=0.65)
    axes.bar_label(bars, labels=[f"{100 * share:.1f} %" for share in list(shares.values())[::-1]], padding=4)
    axes.set(xlabel=f"share of the variance of {value_name} ({IMPORTANCE_EVALUATOR})", title=study.study_name)
    axes.set_xlim(0, 1.12 * max(shares.values()))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    _tidy(axes)
    axes.grid(visible=False, axis="y")
    return figure


def optimization_history_page(study: "Study", *, objective: int = 0, value_name: str = "objective") -> str | None:
    """Return Optuna's interactive history as an HTML page; None if no trial is complete."""
    from optuna.visualization import plot_optimization_history

    if not _complete_trials(study, objective):
        _logger.info("study %s: no optimization history: no trial is complete", study.study_name)
        return None
    # Optuna leaves out the best values if a target is given, so a study with one objective gives none.
    target = None if len(study.directions) == 1 else lambda trial: trial.values[objective]
    with _unexcited():
        figure = plot_optimization_history(study, target=target, target_name=value_name)
    return _page(figure)


def importances_page(study: "Study", *, objective: int = 0, value_name: str = "objective") -> str | None:
    """Return Optuna's interactive importances as an HTML page; None where there are none."""
    from optuna.visualization import plot_param_importances

    if param_importances(study, objective=objective) is None:
        return None
    with _unexcited():
        figure = plot_param_importances(
            study,
            evaluator=_evaluator(),
            target=lambda trial: trial.values[objective],
            target_name=f"{value_name} ({IMPORTANCE_EVALUATOR})",
        )
    return _page(figure)


def _page(figure: Any) -> str:
    # "cdn" would be small, and blank on a machine without a network.
    return str(figure.to_html(include_plotlyjs=True, full_html=True, config={"displaylogo": False}))


def _evaluator() -> Any:
    from optuna.importance import FanovaImportanceEvaluator

    return FanovaImportanceEvaluator(seed=0)


def _complete_trials(study: "Study", objective: int) -> "list[FrozenTrial]":
    from optuna.trial import TrialState

    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return [trial for trial in trials if math.isfinite(trial.values[objective])]


def _unexcited() -> AbstractContextManager[Any]:
    """Keep back Optuna's remarks on experimental features, for one call only."""
    from optuna.exceptions import ExperimentalWarning

    return warnings.catch_warnings(action="ignore", category=ExperimentalWarning)


def _palette(number: int) -> list[str]:
    if number <= len(_COLOURS):
        return list(_COLOURS[:number])
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    # More curves than names for colours: their order is what can still be seen.
    return [to_hex(colormaps["viridis"](0.92 * i / (number - 1))) for i in range(number)]


_LEVELS: tuple[tuple[str, str, _Line, str], ...] = (
    ("mean_margin", "mean-margin", "-.", _COLOURS[1]),
    ("local_only", "local-only mean", ":", _COLOURS[2]),
)


def _draw_levels(axes: "Axes", curves: Sequence[Curve], palette: Sequence[str], figure: str) -> None:
    for attribute, _, line, own_colour in _LEVELS:
        known: list[Scores | None] = [getattr(curve, attribute) for curve in curves]
        levels = [None if scores is None else float(getattr(scores, figure)) for scores in known]
        # A level that all curves share belongs to none of them.
        shared = own_colour if len(curves) == 1 else _GREY
        colours = [shared] * len(levels) if len(set(levels)) == 1 else palette
        for level, colour in dict(zip(levels, colours, strict=True)).items():
            if level is not None:
                axes.axhline(level, linestyle=line, color=colour, linewidth=1.5)


def _is_validated(curves: Sequence[Curve]) -> bool:
    return any(math.isfinite(value) for curve in curves for value in curve.validation_metric)


def _legend(curves: Sequence[Curve], palette: Sequence[str]) -> list[Any]:
    from matplotlib.lines import Line2D

    alone = len(curves) == 1
    shade = palette[0] if alone else _GREY
    handles = [
        Line2D([], [], color=colour, linewidth=2.5, label=curve.label)
        for curve, colour in zip(curves, palette, strict=True)
        if not alone
    ]
    if _is_validated(curves):
        name = f"{curves[0].label}, validation" if alone else "validation"
        handles.append(Line2D([], [], color=shade, label=name))
    handles.append(Line2D([], [], color=shade, linestyle="--", label="training loss"))
    for attribute, name, line, colour in _LEVELS:
        if any(getattr(curve, attribute) is not None for curve in curves):
            handles.append(Line2D([], [], color=colour if alone else _GREY, linestyle=line, label=name))
    if any(curve.chosen in curve.rounds for curve in curves):
        handles.append(Line2D([], [], color=shade, linestyle="", marker="*", markersize=12, label="chosen round"))
    return handles


def _spread(curves: Sequence[Curve]) -> float:
    """Largest over smallest loss shown; 1 if a logarithmic axis could not show all of them."""
    shown = [loss for curve in curves for loss in (*curve.train_loss, *curve.validation_loss) if math.isfinite(loss)]
    return max(shown) / min(shown) if shown and min(shown) > 0 else 1.0


def _metric_name(metric: str) -> str:
    return "MSE" if metric == "mse" else metric


def _tidy(axes: "Axes") -> None:
    axes.grid(visible=True, alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
