"""Evaluate one proposal of a study on a federation."""

from flwr.serverapp import Grid

from fedlightning.config import Choices, ClientsConfig, Range, RunConfig, StudyConfig
from fedlightning.experiment import FederatedFit, fit_federated, is_better, objective_value, task_of
from fedlightning.federation.exchange import DivergedError
from fedlightning.federation.memory import Memory
from fedlightning.federation.rounds import RoundReport
from fedlightning.jobs.nested import TRIAL_STATE, NestedRuns
from fedlightning.jobs.run import comparison_to_dict, log_traffic
from fedlightning.jobs.watchers import StudyWatcher
from fedlightning.search import Proposal, Pruned
from fedlightning.tracking import TrackedRun

RUN_ID = "run_id"
BEST_ROUND = "best_round"
VALIDATION = "validation"
PRUNED_BECAUSE = "pruned_because"
ROUNDS = "rounds"
"""Training loss, validation loss and validation metric of each round, for the study's convergence figure."""


def trial_config(study: StudyConfig, clients: ClientsConfig) -> RunConfig:
    """Return the configuration of a study's run with the given client config."""
    return RunConfig(
        dataset=study.dataset,
        clients=clients,
        val_ratio=study.val_ratio,
        seed=study.seed,
        objective=study.objective,
    )


def trees_to_grow(study: StudyConfig) -> int:
    """Return how many trees per client a trial grows at least: as many as any other trial of the same settings uses.

    Where a setting of the trees is drawn from a continuum no two trials share any, and none grows more than it needs.
    """
    trees = study.searched.get("n_estimators_client")
    settings = [entry for key, entry in study.searched.items() if key.startswith("xgb.")]
    if any(isinstance(entry, Range) and entry.kind == "float" and entry.step is None for entry in settings):
        return 1
    if trees is None:
        return 1
    return int(max(trees.values) if isinstance(trees, Choices) else trees.high)


def evaluate_proposal(
    grid: Grid, proposal: Proposal, *, study: StudyConfig, runs: NestedRuns, watcher: StudyWatcher, memory: Memory
) -> float:
    """Train with a proposal's values and return what the study minimises.

    ``memory`` is what earlier trials left on the same federation.

    Raises:
        Pruned: The pruner, or a training that left the finite numbers, ended it.
    """
    config = trial_config(study, proposal.clients)
    task = task_of(config.dataset)
    best: RoundReport | None = None

    def observe(report: RoundReport) -> None:
        nonlocal best
        if best is None or is_better(report, best, config.objective, task):
            best = report
        tracked.log_round(report, metric=task.metric)
        watcher.trial_round(proposal.number, report, config.clients.num_rounds)
        assert best.validation is not None
        proposal.report(objective_value(best.validation, config.objective, task), report.number)

    watcher.trial_begins(proposal.number, proposal.clients)
    tags = runs.tags(config, proposal.number)
    with runs.start(f"trial {proposal.number}", "trial", config=config, tags=tags) as tracked:
        proposal.note(RUN_ID, tracked.run_id)
        try:
            fit = fit_federated(
                grid,
                config,
                observers=[observe],
                accelerator=runs.workspace.accelerator,
                memory=memory,
                grow_at_least=trees_to_grow(study),
            )
        except (Pruned, DivergedError) as reason:
            tracked.set_tags({TRIAL_STATE: "pruned", PRUNED_BECAUSE: str(reason)})
            tracked.finish("FINISHED")
            proposal.note(PRUNED_BECAUSE, str(reason))
            raise Pruned(str(reason)) from reason
        except BaseException:
            tracked.set_tags({TRIAL_STATE: "failed"})
            raise
        value = _note_fit(proposal, tracked, fit, config)
    return value


def _note_fit(proposal: Proposal, tracked: TrackedRun, fit: FederatedFit, config: RunConfig) -> float:
    validation = fit.validation
    assert validation is not None, "a trial always has validation rows"
    value = objective_value(validation.network, config.objective, fit.model.task)
    proposal.note(BEST_ROUND, fit.best.number)
    proposal.note(VALIDATION, comparison_to_dict(validation))
    proposal.note(ROUNDS, [_round_scores(report) for report in fit.reports])
    tracked.log_comparison("validation", validation, metric=fit.model.task.metric)
    tracked.log_metrics({"objective": value})
    log_traffic(tracked, fit)
    tracked.set_tags({TRIAL_STATE: "complete"})
    return value


def _round_scores(report: RoundReport) -> list[float]:
    assert report.validation is not None
    return [report.train.loss, report.validation.loss, report.validation.metric]
