"""Find settings that a user gave and that change nothing."""

from collections.abc import Set

from fedlightning.config.distributions import Choices, Fixed
from fedlightning.config.models import RunConfig
from fedlightning.config.study import StudyConfig


def effectless(config: RunConfig | StudyConfig, explicit: Set[str]) -> list[str]:
    """Sentences for a warning, one for each key of `explicit` that has no effect with the other settings."""
    if isinstance(config, StudyConfig):
        rounds = _most_rounds(config)
        found = _unused_patience(config, rounds) | _unused_by_study(config, rounds)
    else:
        found = _without_choice(config) or _unused_patience(config, config.clients.num_rounds)
    return [f"{key} has no effect: {reason}" for key, reason in found.items() if key in explicit]


def _without_choice(run: RunConfig) -> dict[str, str]:
    if run.val_ratio == 0:
        reason = "with val_ratio 0 there are no validation rows, so all rounds are run and the last one counts"
    elif run.clients.num_rounds == 1:
        reason = "with num_rounds 1 there is only one round to pick"
    else:
        return {}
    return {"dataset.patience": reason, "objective": reason}


def _unused_patience(config: RunConfig | StudyConfig, rounds: int) -> dict[str, str]:
    patience = config.dataset.patience
    if patience < rounds:
        return {}
    return {"dataset.patience": f"{patience} rounds without improvement cannot pass within num_rounds {rounds}"}


def _unused_by_study(study: StudyConfig, rounds: int) -> dict[str, str]:
    found = {}
    if not study.searched:
        reason = "no key is searched, so every trial has the same values"
        found = {"sampler": reason, "trials": reason}
    if rounds == 1:
        found["pruner"] = "with num_rounds 1 there is no round before which a trial could end"
    return found


def _most_rounds(study: StudyConfig) -> int:
    entry = study.space.get("num_rounds")
    if entry is None:
        assert study.base is not None
        return study.base.num_rounds
    if isinstance(entry, Fixed):
        return int(entry.value)
    return max(int(value) for value in entry.values) if isinstance(entry, Choices) else int(entry.high)
