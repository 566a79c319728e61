"""The dotted keys of settings: which there are, what each takes, and how they nest."""

from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fedlightning.config.documents import Scalar

ALIASES = {"batch_size": "CNN.batch_size"}


def canonical(key: str) -> str:
    """A key as users may write it, in the one spelling used everywhere else."""
    key = short(key)
    return ALIASES.get(key, key)


def short(key: str) -> str:
    """A key without the section `clients.`: the tuned numbers are named bare, as in a client config."""
    return key.removeprefix("clients.")


def fields(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Every single setting of a model by its full dotted key, in the order of the model."""
    found: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        key = prefix + (field.validation_alias if isinstance(field.validation_alias, str) else name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= fields(field.annotation, f"{key}.")
        else:
            found[key] = field
    return found


def known_keys(model: type[BaseModel]) -> list[str]:
    """The dotted keys of a model as users write them."""
    return [short(key) for key in fields(model)]


def flatten(config: BaseModel) -> dict[str, Scalar]:
    """Every setting by its dotted key: `num_rounds`, `xgb.max_depth`, `CNN.lr`, `dataset.name`, ..."""
    document = config.model_dump()
    flat: dict[str, Scalar] = {}
    for key in fields(type(config)):
        value: Any = document
        for part in key.split("."):
            value = value[part]
        flat[short(key)] = value
    return flat


def nested(model: type[BaseModel], flat: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flatten`: plain data that `model` validates."""
    document: dict[str, Any] = {}
    for key in fields(model):
        if short(key) in flat:
            *sections, name = key.split(".")
            inner = document
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[name] = flat[short(key)]
    return document


def allowed(field: FieldInfo) -> str:
    """What a setting takes, in words: `a whole number from 1 to 30`."""
    if get_origin(field.annotation) is Literal:
        return " or ".join(str(choice) for choice in get_args(field.annotation))
    if get_origin(field.annotation) is dict:
        return "a mapping"
    kinds = get_args(field.annotation) or (field.annotation,)
    bounds = {
        name: getattr(constraint, name)
        for constraint in field.metadata
        for name in ("ge", "gt", "le", "lt", "max_length")
        if hasattr(constraint, name)
    }
    texts = ["null" if kind is type(None) else _words(kind, bounds) for kind in kinds]
    return " or ".join(texts) + (f" ({field.description})" if field.description else "")


def _words(kind: Any, bounds: Mapping[str, float]) -> str:
    if kind is str:
        return f"text of 1 to {bounds['max_length']} characters"
    noun = "a whole number" if kind is int else "a number"
    if "ge" in bounds and bounds["ge"] == bounds.get("le"):
        return f"only {bounds['ge']}"
    if "ge" in bounds and "le" in bounds:
        return f"{noun} from {bounds['ge']:.10g} to {bounds['le']:.10g}"
    low = f"above {bounds['gt']:.10g}" if "gt" in bounds else f"at least {bounds['ge']:.10g}"
    high = f"below {bounds['lt']:.10g}" if "lt" in bounds else f"at most {bounds['le']:.10g}"
    return f"{noun} {low} and {high}"
