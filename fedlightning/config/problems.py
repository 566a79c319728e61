"""Turn what is wrong with a configuration into lines that name the key, the value and what is allowed."""

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from fedlightning.config.documents import shown
from fedlightning.config.keys import allowed, fields, known_keys, short

M = TypeVar("M", bound=BaseModel)
MAX_LINES = 10


def validate(model: type[M], data: Mapping[str, Any], *, source: str) -> M:
    """Build a model from plain data, as a file or a command line gives it.

    Raises:
        ValueError: One line per problem, each starting with `source`.
    """
    try:
        return model.model_validate(data, by_alias=True, by_name=False)
    except ValidationError as error:
        problems = error.errors(include_url=False)
    raise ValueError(report([line for problem in problems for line in _lines(model, problem)], source=source))


def report(lines: Sequence[str], *, source: str) -> str:
    """Problems as one error text: a line each, only so many."""
    kept = list(lines[:MAX_LINES])
    if len(lines) > MAX_LINES:
        kept.append(f"and {len(lines) - MAX_LINES} more problems")
    return "\n".join(f"{source}: {line}" for line in kept)


def unknown(what: str, name: str, known: Collection[str]) -> str:
    """The text for a name that is not among those known, the closest match first."""
    text = f"'{name}'" if name.isprintable() and len(name) <= 80 else shown(name)
    return f"unknown {what} {text}; known: {', '.join(closest_first(name, known)) or 'none'}"


def closest_first(name: str, known: Iterable[str]) -> list[str]:
    """Known names in alphabetical order, those that resemble `name` before the others."""
    names = sorted(known, key=str.lower)
    # Only so much of a name is compared: difflib takes quadratic time.
    close = difflib.get_close_matches(name[:100], names, n=3)
    return close + [other for other in names if other not in close]


def _lines(model: type[BaseModel], problem: Any) -> list[str]:
    location = ".".join(str(part) for part in problem["loc"])
    key = short(location)
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"]).splitlines()
    if problem["type"] == "extra_forbidden" and key in known_keys(model):
        section, _, name = key.rpartition(".")
        return [f"{key} is not understood with a dot; write {name} below {section}:"]
    if problem["type"] == "extra_forbidden":
        return [unknown("key", key, known_keys(model))]
    field = fields(model).get(location)
    inner = [name.removeprefix(f"{location}.") for name in fields(model) if name.startswith(f"{location}.")]
    words = f"a mapping with {', '.join(inner)}" if field is None else allowed(field)
    if problem["type"] == "missing":
        return [f"{key} is missing; allowed: {words}"]
    return [f"{key} is {shown(problem['input'])}; allowed: {words}"]
