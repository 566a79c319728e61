"""Override any setting on the command line by its dotted key, as in `num_rounds=5 xgb.subsample=0.9`."""

from collections.abc import Collection, Mapping, Sequence

from fedlightning.config.documents import Scalar, parse_scalar
from fedlightning.config.keys import canonical, flatten, known_keys, nested
from fedlightning.config.models import (
    CentralizedConfig,
    CentralizedRunConfig,
    ClientsConfig,
    DatasetConfig,
    RunConfig,
)
from fedlightning.config.problems import unknown, validate

SOURCE = "command line"


def parse_overrides(overrides: Sequence[str], known: Collection[str]) -> dict[str, Scalar | None]:
    """The values given as `key=value`, by their keys in one spelling.

    Raises:
        ValueError: If a key is unknown or given twice, or a value is missing or not a single value.
    """
    parsed: dict[str, Scalar | None] = {}
    given: dict[str, str] = {}
    for override in overrides:
        written, equals, text = override.partition("=")
        if not equals:
            raise ValueError(f"{SOURCE}: {override!r} has no value; write KEY=VALUE, for example num_rounds=5")
        key = canonical(written.strip())
        if key == "dataset.name":
            raise ValueError(f"{SOURCE}: {key} cannot be overridden; choose another data set instead")
        if key not in known:
            hint = "; keys are written without + or ~" if key[:1] in ("+", "~") else ""
            raise ValueError(f"{SOURCE}: {unknown('key', written.strip(), known)}{hint}")
        if key in given:
            raise ValueError(f"{SOURCE}: {key} is given twice: {given[key]} and {override}")
        given[key] = override
        parsed[key] = parse_scalar(text, source=f"{SOURCE}: {key}")
    return parsed


def explicit_keys(overrides: Sequence[str]) -> set[str]:
    """The keys that a user set on the command line, in the spelling of `flatten`."""
    return {canonical(override.partition("=")[0].strip()) for override in overrides}


def default_dataset(name: str) -> DatasetConfig:
    """A data set of the catalogue with its train ratio and patience.

    Raises:
        LookupError: If the catalogue does not know it.
    """
    # Imported here: reading a configuration must not load the readers of data sets.
    from fedlightning.datasets.catalogue import find_dataset

    entry = find_dataset(name)
    return DatasetConfig(name=entry.name, train_ratio=entry.train_ratio, patience=entry.patience)


def resolve_run(
    dataset: str,
    clients: ClientsConfig,
    overrides: Sequence[str] = (),
    *,
    seed: int | None = None,
    dataset_defaults: DatasetConfig | None = None,
) -> RunConfig:
    """The complete configuration of a run; `dataset_defaults` stands in for the catalogue's entry.

    Raises:
        ValueError: If an override has an unknown key, is given twice, or holds an impossible value.
        LookupError: If the catalogue does not know the data set.
    """
    base = RunConfig(dataset=dataset_defaults or default_dataset(dataset), clients=clients)
    known = [key for key in known_keys(RunConfig) if key != "dataset.name"]
    given = _with_seed(parse_overrides(overrides, known), seed)
    return validate(RunConfig, nested(RunConfig, flatten(base) | given), source=SOURCE)


def resolve_centralized(
    dataset: str,
    config: CentralizedConfig,
    overrides: Sequence[str] = (),
    *,
    seed: int | None = None,
    dataset_defaults: DatasetConfig | None = None,
) -> CentralizedRunConfig:
    """The complete configuration of a centralized run; `dataset_defaults` stands in for the catalogue's entry.

    Raises:
        ValueError: If an override has an unknown key, is given twice, or holds an impossible value.
        LookupError: If the catalogue does not know the data set.
    """
    base = CentralizedRunConfig(dataset=dataset_defaults or default_dataset(dataset), **dict(config))
    known = [key for key in known_keys(CentralizedRunConfig) if key not in ("dataset.name", "dataset.patience")]
    given = _with_seed(parse_overrides(overrides, known), seed)
    return validate(CentralizedRunConfig, nested(CentralizedRunConfig, flatten(base) | given), source=SOURCE)


def _with_seed(given: Mapping[str, Scalar | None], seed: int | None) -> dict[str, Scalar | None]:
    if seed is None:
        return dict(given)
    if "seed" in given:
        raise ValueError(f"{SOURCE}: seed is given twice: {seed} and {given['seed']}")
    return {**given, "seed": seed}
