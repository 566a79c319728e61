"""The definition of a study: what is searched, on which data, and how a trial's config follows from it."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from fedlightning.config.clients import REFERENCE_KEYS
from fedlightning.config.distributions import (
    SPACE_KEYS,
    Choices,
    Distribution,
    Fixed,
    Range,
    describe,
    parse_space,
    widen_distribution,
)
from fedlightning.config.documents import Scalar, parse_mapping
from fedlightning.config.keys import flatten, nested
from fedlightning.config.models import MAX_SEED, ClientsConfig, DatasetConfig, Settings
from fedlightning.config.problems import validate

PUBLISHED = "published"
NEEDED_KEYS = tuple(key for key in REFERENCE_KEYS if key != "client_num")


class StudyFile(Settings):
    """What a study file holds."""

    dataset: DatasetConfig
    client_num: int = Field(ge=1, le=1_000)
    trials: int = Field(ge=1, le=100_000)
    timeout: float | None = Field(default=None, gt=0, le=1e9)
    """Seconds after which no further trial starts."""
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    start_from: str | None = Field(default=None, min_length=1, max_length=255)
    """`published`, or the client config that becomes the first trial."""
    space: dict[str, Distribution]
    sampler: Literal["tpe", "random", "gp"] = "tpe"
    pruner: Literal["median", "none"] = "median"
    objective: Literal["loss", "metric"] = "loss"
    val_ratio: float = Field(default=0.2, gt=0, lt=1)

    @field_validator("space", mode="plain")
    @classmethod
    def _read_space(cls, space: object) -> dict[str, Distribution]:
        return parse_space(space)

    @property
    def searched(self) -> dict[str, Choices | Range]:
        """The part of the space that a sampler draws from."""
        return {key: entry for key, entry in self.space.items() if not isinstance(entry, Fixed)}


class StudyConfig(StudyFile):
    """A study that is ready to run: its file, and the config behind the keys that its space leaves out."""

    base: ClientsConfig | None = None
    """The config of `start_from`, or else the published one where the space does not give every value."""

    @model_validator(mode="after")
    def _has_every_value(self) -> Self:
        missing = [key for key in NEEDED_KEYS if key not in self.space]
        if missing and self.base is None:
            raise ValueError(
                f"space: {', '.join(missing)} missing, and no client config is published for "
                f"{self.dataset.name} with {self.client_num} clients; "
                "add the keys, or name a client config in start_from"
            )
        if self.start_from is not None and self.base is None:
            raise ValueError(f"start_from is {self.start_from!r}, but its config was not given as base")
        return self


def trial_clients(study: StudyConfig, values: Mapping[str, Scalar]) -> ClientsConfig:
    """The client config of a trial that drew `values`, one for every searched key.

    Raises:
        ValueError: If `values` has other keys than those searched, or an impossible value.
    """
    if values.keys() != study.searched.keys():
        differing = sorted(values.keys() ^ study.searched.keys())
        raise ValueError(f"trial: values and searched keys differ in {', '.join(differing)}")
    fixed = {key: entry.value for key, entry in study.space.items() if isinstance(entry, Fixed)}
    base = {} if study.base is None else flatten(study.base)
    flat = {**base, **fixed, **values, "client_num": study.client_num}
    return validate(ClientsConfig, nested(ClientsConfig, flat), source="trial")


def start_values(study: StudyConfig) -> dict[str, Scalar] | None:
    """What `start_from` has for the searched keys, or None where a study starts from nothing."""
    if study.start_from is None:
        return None
    assert study.base is not None
    base = flatten(study.base)
    return {key: base[key] for key in study.searched}


def widen(study: StudyConfig, values: Mapping[str, Scalar]) -> tuple[StudyConfig, list[str]]:
    """The study with `values` inside its space, and a notice for every key that had to be widened.

    Raises:
        ValueError: If a range cannot hold its value: nothing at or below 0 fits a log range.
    """
    space = dict(study.space)
    notices = []
    for key, value in values.items():
        space[key], notice = widen_distribution(key, space[key], value)
        if notice is not None:
            notices.append(notice)
    return study.model_copy(update={"space": space}), notices


def definition(study: StudyConfig) -> dict[str, Scalar]:
    """What makes trials comparable, by dotted key: data, seed, objective, and every value or its space.

    Trials, timeout, sampler and pruner are not part of it: they may change when a study is resumed. Take it
    of the widened study, because that is the space the trials were drawn from.
    """
    first = {key: entry.values[0] if isinstance(entry, Choices) else entry.low for key, entry in study.searched.items()}
    config = flatten(trial_clients(study, first))
    config |= {key: describe(entry) for key, entry in study.searched.items()}
    dataset = {f"dataset.{key}": value for key, value in flatten(study.dataset).items()}
    return {
        **dataset,
        **config,
        "val_ratio": study.val_ratio,
        "seed": study.seed,
        "objective": study.objective,
    }


def study_from_definition(stored: Mapping[str, Any], *, source: str) -> StudyConfig:
    """The study that has this `definition`; what a definition leaves out (trials, timeout, sampler) is not told.

    Raises:
        ValueError: If it is not the definition of a study of this version.
    """
    space = {
        key: parse_mapping(value, source=f"{source}: {key}") if isinstance(value, str) else value
        for key, value in stored.items()
        if key in SPACE_KEYS
    }
    settings = {key: stored[key] for key in ("client_num", "seed", "objective", "val_ratio") if key in stored}
    dataset = {key.removeprefix("dataset."): value for key, value in stored.items() if key.startswith("dataset.")}
    return validate(StudyConfig, {**settings, "dataset": dataset, "space": space, "trials": 1}, source=source)


def fingerprint(study: StudyConfig) -> str:
    """The sha256 of a study's definition, in hexadecimal."""
    canonical = json.dumps(definition(study), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def differences(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """The keys in which two definitions differ, each with both values; stored values may have become text."""
    absent = "absent"
    return [
        f"{key}: {old.get(key, absent)} before, {new.get(key, absent)} now"
        for key in [*old, *(key for key in new if key not in old)]
        if str(old.get(key, absent)) != str(new.get(key, absent))
    ]


def study_document(study: StudyConfig) -> dict[str, Any]:
    """A study as its file writes it, every setting spelled out."""
    document = study.model_dump(exclude={"base", "space"})
    space = {key: entry.document() for key, entry in study.space.items()}
    return {key: space if key == "space" else document[key] for key in StudyFile.model_fields}
