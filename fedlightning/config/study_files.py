"""Load studies, complete them from client configs, and override them on the command line."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlightning.config import documents
from fedlightning.config.clients import load_clients, published_clients
from fedlightning.config.distributions import SPACE_KEYS
from fedlightning.config.documents import shown
from fedlightning.config.files import existing_file, looks_like_path, named_files
from fedlightning.config.keys import known_keys
from fedlightning.config.models import ClientsConfig, DatasetConfig
from fedlightning.config.overrides import SOURCE, default_dataset, parse_overrides
from fedlightning.config.problems import unknown, validate
from fedlightning.config.study import NEEDED_KEYS, PUBLISHED, StudyConfig, StudyFile, study_document

_DATASET_KEYS = tuple(f"dataset.{key}" for key in known_keys(DatasetConfig) if key != "name")
_STUDY_KEYS = tuple(key for key in StudyFile.model_fields if key not in ("dataset", "space"))


def known_studies(root: Path | None = None) -> list[str]:
    """The names that `load_study` finds."""
    return sorted(named_files(root))


def study_name(name_or_path: str | Path) -> str:
    """The name of a study: that of its file, without folder and suffix."""
    return Path(name_or_path).stem if looks_like_path(name_or_path) else str(name_or_path)


def load_study(
    name_or_path: str | Path, *, root: Path | None = None, dataset_defaults: DatasetConfig | None = None
) -> StudyConfig:
    """The study at a path, in `<root>/studies`, or among those that ship.

    Raises:
        LookupError: If it, its data set or its client config is unknown; the text lists the known ones.
        ValueError: If the file is wrong; each line names the file, the key, the value and what is allowed.
    """
    if looks_like_path(name_or_path):
        path = existing_file(name_or_path, what="study")
    else:
        files = named_files(root)
        name = str(name_or_path)
        if name not in files:
            raise LookupError(unknown("study", name, files))
        path = files[name]
    source = documents.shown_path(path)
    document = documents.read_mapping(path)
    return study_from_document(document, source=source, root=root, dataset_defaults=dataset_defaults)


def study_from_document(
    document: Mapping[str, Any],
    *,
    source: str,
    root: Path | None = None,
    dataset_defaults: DatasetConfig | None = None,
) -> StudyConfig:
    """The study that a file's content describes, with the data set's and the published values filled in."""
    data = {**document, "dataset": _dataset(document.get("dataset"), source, dataset_defaults)}
    file = validate(StudyFile, data, source=source)
    return _complete(file, _base(file, root=root, source=source), source=source)


def override_study(study: StudyConfig, overrides: Sequence[str], *, root: Path | None = None) -> StudyConfig:
    """A study with settings of the command line in place of its own; a searched key becomes fixed.

    `root` is where a client config named by `start_from=NAME` is looked for.
    """
    if not overrides:
        return study
    given = parse_overrides(overrides, [*_STUDY_KEYS, *_DATASET_KEYS, *SPACE_KEYS])
    document = study_document(study)
    for key, value in given.items():
        section, _, name = key.rpartition(".")
        if key in _STUDY_KEYS:
            document[key] = value
        elif section == "dataset":
            document["dataset"][name] = value
        else:
            document["space"][key] = value
    file = validate(StudyFile, document, source=SOURCE)
    # A named config is kept as it was read; the published one depends on the number of clients.
    kept = file.start_from == study.start_from and file.start_from not in (None, PUBLISHED)
    return _complete(file, study.base if kept else _base(file, root=root, source=SOURCE), source=SOURCE)


def _complete(file: StudyFile, base: ClientsConfig | None, *, source: str) -> StudyConfig:
    return validate(StudyConfig, {**dict(file), "base": base}, source=source)


def _dataset(entry: object, source: str, defaults: DatasetConfig | None) -> dict[str, Any]:
    settings: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {"name": entry}
    name = settings.get("name")
    if not isinstance(name, str):
        raise ValueError(
            f"{source}: dataset is {shown(name)}; allowed: the name of a data set, "
            f"or a mapping with {', '.join(known_keys(DatasetConfig))}"
        )
    try:
        known = defaults or default_dataset(name)
    except LookupError as error:
        raise LookupError(f"{source}: {error.args[0]}") from None
    return {**known.model_dump(), **settings, "name": known.name}


def _base(file: StudyFile, *, root: Path | None, source: str) -> ClientsConfig | None:
    if file.start_from not in (None, PUBLISHED):
        try:
            return load_clients(file.start_from, root=root)
        except LookupError as error:
            raise LookupError(f"{source}: start_from: {error.args[0]}") from None
    published = published_clients(file.dataset.name, file.client_num)
    if file.start_from is None:
        return published if any(key not in file.space for key in NEEDED_KEYS) else None
    if published is None:
        raise LookupError(
            f"{source}: start_from is published, but nothing is published for {file.dataset.name} with "
            f"{file.client_num} clients; name a client config, or set start_from: null"
        )
    return published
