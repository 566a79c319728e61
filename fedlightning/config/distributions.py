"""What a study may try for one key: a fixed value, one of several choices, or a range."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, TypeAlias

from pydantic import ValidationError

from fedlightning.config.documents import Scalar, shown
from fedlightning.config.keys import allowed, canonical, fields, flatten, nested
from fedlightning.config.models import ClientsConfig
from fedlightning.config.problems import unknown

FIELDS = fields(ClientsConfig)
SPACE_KEYS = tuple(key for key in FIELDS if key != "client_num")
"""The keys that a study may search; the number of clients is the study's own."""
MAX_CHOICES = 1_000
Number: TypeAlias = int | float

# Any valid config will do: one value at a time is put into it and validated.
_SAMPLE = {
    "n_estimators_client": 1,
    "num_rounds": 1,
    "client_num": 1,
    "num_iterations": 1,
    "xgb.max_depth": 1,
    "CNN.lr": 1e-3,
}


@dataclass(frozen=True)
class Fixed:
    """The same value in every trial."""

    value: Scalar

    def document(self) -> Any:
        """The entry as a study file writes it."""
        return self.value

    def contains(self, value: Scalar) -> bool:
        """Whether a trial can have this value."""
        return value == self.value


@dataclass(frozen=True)
class Choices:
    """One of several values."""

    values: tuple[Scalar, ...]

    def document(self) -> Any:
        """The entry as a study file writes it."""
        return {"choices": list(self.values)}

    def contains(self, value: Scalar) -> bool:
        """Whether a trial can have this value."""
        return value in self.values


@dataclass(frozen=True)
class Range:
    """A value from `low` to `high`, both included; with `step`, only `low` plus whole steps."""

    low: Number
    high: Number
    step: Number | None = None
    log: bool = False
    kind: Literal["int", "float"] = "float"

    def document(self) -> Any:
        """The entry as a study file writes it."""
        entry: dict[str, Scalar] = {"low": self.low, "high": self.high}
        if self.step is not None:
            entry["step"] = self.step
        if self.log:
            entry["log"] = True
        return entry

    def contains(self, value: Scalar) -> bool:
        """Whether a trial can have this value."""
        assert not isinstance(value, str)
        return self.low <= value <= self.high and (self.step is None or _whole_steps(self.low, value, self.step))


Distribution: TypeAlias = Fixed | Choices | Range


def parse_space(space: object) -> dict[str, Distribution]:
    """The distributions of a study's `space`, by the keys in their one spelling.

    Raises:
        ValueError: One line per problem.
    """
    if not isinstance(space, Mapping):
        raise ValueError(f"space is {shown(space)}; allowed: a mapping of keys to values, choices or ranges")
    parsed: dict[str, Distribution] = {}
    lines: list[str] = []
    for written, entry in space.items():
        key = canonical(str(written))
        try:
            if key in parsed:
                raise ValueError(f"{key} is given twice")
            parsed[key] = _parse_entry(key, entry)
        except ValueError as error:
            lines.append(f"space: {error}")
    if lines:
        raise ValueError("\n".join(lines))
    return parsed


def check_value(key: str, value: object, *, label: str = "") -> Scalar:
    """A value as the config holds it: `0` becomes `0.0` where the setting is a number.

    Raises:
        ValueError: If the setting cannot take it; the text names key, value and what is allowed.
    """
    try:
        config = ClientsConfig.model_validate(nested(ClientsConfig, {**_SAMPLE, key: value}), by_name=False)
    except ValidationError:
        raise ValueError(f"{key}{label} is {shown(value)}; allowed: {allowed(FIELDS[key])}") from None
    return flatten(config)[key]


def describe(distribution: Distribution) -> str:
    """A distribution in one line, exact enough to tell two apart."""
    entry = distribution.document()
    if not isinstance(entry, dict):
        return str(entry)
    return (
        "{"
        + ", ".join(f"{name}: {str(value).lower() if value is True else value}" for name, value in entry.items())
        + "}"
    )


def widen_distribution(key: str, distribution: Distribution, value: Scalar) -> tuple[Distribution, str | None]:
    """The distribution with `value` among what it can give, and a notice if it had to be widened."""
    if distribution.contains(value):
        return distribution, None
    notice = f"start value {key}={value} lies outside the space {describe(distribution)}"
    wider: Distribution
    if isinstance(distribution, Fixed):
        raise ValueError(f"{notice}; a fixed key cannot be widened")
    if isinstance(distribution, Choices):
        values = (*distribution.values, value)
        wider = Choices(tuple(sorted(values, key=float)))
    else:
        assert not isinstance(value, str)
        wider = _wider_range(distribution, value, notice)
    return wider, f"{notice}, which now is {describe(wider)}"


def _wider_range(range_: Range, value: Number, notice: str) -> Range:
    if range_.log and value <= 0:
        raise ValueError(f"{notice}, and a log range holds no {value}; drop `log` or set start_from: null")
    low, high, step = min(range_.low, value), max(range_.high, value), range_.step
    if step is not None and not _whole_steps(range_.low, value, step):
        # The grid has to hold the value as well as what it held before.
        step = math.gcd(int(step), int(value) - int(range_.low)) if range_.kind == "int" else None
    return Range(low, high, step, range_.log, range_.kind)


def _parse_entry(key: str, entry: object) -> Distribution:
    if key == "client_num":
        raise ValueError("client_num is not searched; it is the study's own key")
    if key not in SPACE_KEYS:
        sections = {name.partition(".")[0] for name in SPACE_KEYS if "." in name}
        hint = f"; write its keys with a dot, such as {key}.{'lr' if key == 'CNN' else 'max_depth'}"
        raise ValueError(unknown("key", key, SPACE_KEYS) + (hint if key in sections else ""))
    if isinstance(entry, Fixed | Choices | Range):
        entry = entry.document()
    if isinstance(entry, list | tuple):
        raise ValueError(f"{key} is a list; write {{choices: {shown(list(entry))}}}")
    if not isinstance(entry, Mapping):
        return Fixed(check_value(key, entry))
    if set(entry) == {"choices"}:
        return _parse_choices(key, entry["choices"])
    further = [name for name in entry if name not in ("low", "high", "step", "log")]
    if further or not {"low", "high"} <= set(entry):
        raise ValueError(
            f"{key} is {shown(dict(entry))}; allowed: a value, {{choices: [...]}} or {{low, high, step, log}}"
        )
    return _parse_range(key, entry)


def _parse_choices(key: str, choices: object) -> Choices:
    if not isinstance(choices, list | tuple) or not 1 <= len(choices) <= MAX_CHOICES:
        raise ValueError(f"{key}: choices is {shown(choices)}; allowed: a list of 1 to {MAX_CHOICES} values")
    values = tuple(check_value(key, choice, label=" among the choices") for choice in choices)
    for position, value in enumerate(values):
        if value in values[:position]:
            raise ValueError(f"{key}: the choice {shown(value)} is given twice")
    return Choices(values)


def _parse_range(key: str, entry: Mapping[Any, Any]) -> Range:
    low = check_value(key, entry["low"], label=" at its low end")
    high = check_value(key, entry["high"], label=" at its high end")
    assert not isinstance(low, str)
    assert not isinstance(high, str)
    kind: Literal["int", "float"] = "int" if FIELDS[key].annotation is int else "float"
    log, step = entry.get("log", False), entry.get("step")
    if not isinstance(log, bool):
        raise ValueError(f"{key}: log is {shown(log)}; allowed: true or false")
    if low > high:
        raise ValueError(f"{key}: low is {low} and high is {high}; low must not be above high")
    if log and low <= 0:
        raise ValueError(f"{key}: low is {low}; a log range starts above 0")
    if step is None:
        return Range(low, high, None, log, kind)
    if log:
        raise ValueError(f"{key}: step is {shown(step)} in a log range; give either log or step")
    number = int if kind == "int" else int | float
    if isinstance(step, bool) or not isinstance(step, number) or not 0 < step < math.inf:
        what = "a whole number" if kind == "int" else "a number"
        raise ValueError(f"{key}: step is {shown(step)}; allowed: {what} above 0")
    step = step if kind == "int" else float(step)
    if not _whole_steps(low, high, step):
        raise ValueError(f"{key}: high is {high}, which {low} does not reach in whole steps of {step}")
    return Range(low, high, step, log, kind)


def _whole_steps(low: Number, value: Number, step: Number) -> bool:
    # By their decimal text, as Optuna does: in binary, 0.1 does not divide 0.3.
    return (Fraction(repr(value)) - Fraction(repr(low))) % Fraction(repr(step)) == 0
