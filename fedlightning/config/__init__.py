"""What users write in YAML and on the command line, checked once and immutable from then on."""

from pydantic import BaseModel

from fedlightning.config.clients import (
    default_centralized,
    dump_clients,
    known_clients,
    load_centralized,
    load_clients,
    parse_clients,
    published_clients,
)
from fedlightning.config.distributions import Choices, Distribution, Fixed, Range
from fedlightning.config.documents import Scalar, dump
from fedlightning.config.effects import effectless
from fedlightning.config.keys import flatten
from fedlightning.config.models import (
    CentralizedConfig,
    CentralizedRunConfig,
    ClientsConfig,
    CnnConfig,
    DatasetConfig,
    RunConfig,
    XgbConfig,
)
from fedlightning.config.overrides import explicit_keys, resolve_centralized, resolve_run
from fedlightning.config.study import (
    StudyConfig,
    definition,
    differences,
    fingerprint,
    start_values,
    study_document,
    study_from_definition,
    trial_clients,
    widen,
)
from fedlightning.config.study_files import known_studies, load_study, override_study, study_name


def to_yaml(config: BaseModel) -> str:
    """A configuration as YAML with every setting spelled out; a study's text is a study file again."""
    if isinstance(config, StudyConfig):
        return dump(study_document(config), flow=True)
    return dump(config.model_dump())


__all__ = [
    "CentralizedConfig",
    "CentralizedRunConfig",
    "Choices",
    "ClientsConfig",
    "CnnConfig",
    "DatasetConfig",
    "Distribution",
    "Fixed",
    "Range",
    "RunConfig",
    "Scalar",
    "StudyConfig",
    "XgbConfig",
    "default_centralized",
    "definition",
    "differences",
    "dump_clients",
    "effectless",
    "explicit_keys",
    "fingerprint",
    "flatten",
    "known_clients",
    "known_studies",
    "load_centralized",
    "load_clients",
    "load_study",
    "override_study",
    "parse_clients",
    "published_clients",
    "resolve_centralized",
    "resolve_run",
    "start_values",
    "study_from_definition",
    "study_name",
    "to_yaml",
    "trial_clients",
    "widen",
]
