"""Load and write client configs, and the published values that ship with the package."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlightning.config import documents
from fedlightning.config.files import PUBLISHED, existing_file, looks_like_path, named_files
from fedlightning.config.keys import fields, flatten, nested
from fedlightning.config.models import CentralizedConfig, ClientsConfig
from fedlightning.config.problems import report, unknown, validate

REFERENCE_KEYS = (
    "n_estimators_client",
    "num_rounds",
    "client_num",
    "num_iterations",
    "xgb.max_depth",
    "CNN.lr",
)
"""What a client config of hfedxgboost holds, in its order."""


def known_clients(root: Path | None = None) -> list[str]:
    """The names that `load_clients` finds."""
    return sorted({*named_files(root, "clients"), *_published("clients.yaml")})


def load_clients(name_or_path: str | Path, *, root: Path | None = None) -> ClientsConfig:
    """The client config at a path or of a name.

    Names are looked up in `<root>/studies/clients`, among the exports that ship, then among the published.

    Raises:
        LookupError: If there is none; the text lists the known names, the closest first.
        ValueError: If the file is wrong; each line names the file, the key, the value and what is allowed.
    """
    if looks_like_path(name_or_path):
        path = existing_file(name_or_path, what="client config")
        return _clients(documents.read_mapping(path), source=documents.shown_path(path))
    name = str(name_or_path)
    files = named_files(root, "clients")
    if name in files:
        return _clients(documents.read_mapping(files[name]), source=documents.shown_path(files[name]))
    published = _published("clients.yaml")
    if name not in published:
        raise LookupError(unknown("client config", name, {*files, *published}))
    return _clients(published[name], source=f"published {name}")


def published_clients(dataset: str, client_num: int) -> ClientsConfig | None:
    """The reference's own values for a data set and a number of clients, whatever `studies/clients` holds."""
    name = f"{dataset}_{client_num}_clients"
    published = _published("clients.yaml")
    return _clients(published[name], source=f"published {name}") if name in published else None


def parse_clients(text: str, *, source: str) -> ClientsConfig:
    """The client config in a YAML text; `source` names the text in errors."""
    return _clients(documents.parse_mapping(text, source=source), source=source)


def dump_clients(config: ClientsConfig, *, header: Sequence[str] = ()) -> str:
    """A client config as YAML that hfedxgboost loads too.

    It holds the reference's six keys, and further ones only where they differ from their defaults.
    """
    defaults = {key: field.default for key, field in fields(ClientsConfig).items()}
    flat = flatten(config)
    further = [key for key in flat if key not in REFERENCE_KEYS and flat[key] != defaults[key]]
    lines = list(header)
    if further:
        lines.append(f"hfedxgboost ignores: {', '.join(further)}")
    written = {key: flat[key] for key in (*REFERENCE_KEYS, *further)}
    return documents.comments(lines) + documents.dump(nested(ClientsConfig, written))


def load_centralized(name: str | None = None, dataset: str | None = None) -> CentralizedConfig:
    """A centralized parameter set: by its name, or by default the data set's own, or else the paper's.

    The names are `paper` and the data sets for which the reference has special values; its own spelling
    `<name>_xgboost_centralized` is understood.
    """
    published = _published("centralized.yaml")
    name = (name or default_centralized(dataset)).removesuffix("_xgboost_centralized")
    if name not in published:
        raise LookupError(unknown("centralized parameter set", name, published))
    return validate(CentralizedConfig, published[name], source=f"published {name}")


def default_centralized(dataset: str | None) -> str:
    """The name of the centralized parameter set that is a data set's own, or else `paper`."""
    return dataset if dataset is not None and dataset in _published("centralized.yaml") else "paper"


def _published(file: str) -> dict[str, Any]:
    return documents.read_mapping(PUBLISHED / file)


def _clients(data: Mapping[str, Any], *, source: str) -> ClientsConfig:
    config = validate(ClientsConfig, data, source=source)
    # A run may leave the depth to its default; hfedxgboost may not, and a file is for both.
    if "max_depth" not in config.xgb.model_fields_set:
        raise ValueError(report(["xgb.max_depth is missing; a client config holds it"], source=source))
    return config
