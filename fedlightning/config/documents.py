"""Read and write YAML 1.2 as configurations use it: mappings, lists, numbers and text, nothing else.

PyYAML follows YAML 1.1, where `1e-05` is text, `010` is eight and `on` is true; here scalars are read by the
core schema of YAML 1.2. Aliases, tags, repeated keys, deep nesting and large files are refused, so that a
file from somebody else can only be wrong. Every such failure is a `ValueError` that names the file.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import yaml

Scalar: TypeAlias = bool | int | float | str
"""What one dotted key can hold."""

MAX_BYTES = 65_536
MAX_DEPTH = 16
MAX_DIGITS = 400
"""Longer numerals are refused: no setting needs them, and converting them takes quadratic time."""

_TAG = "tag:yaml.org,2002:"
_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_CORE_SCHEMA = (("null", _NULL), ("bool", _BOOL), ("int", _INT), ("float", _FLOAT))


class _Loader(yaml.SafeLoader):
    """Compose nodes by YAML 1.2's core schema, without aliases and only so deep."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML's own hook; filled below)
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Refuse aliases and too deep a nesting before anything recurses into them."""
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not allowed", problem_mark=event.start_mark)
        if self.depth >= MAX_DEPTH:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem=f"nested deeper than {MAX_DEPTH} levels", problem_mark=mark)
        self.depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """Quote whatever text YAML 1.1 or 1.2 would take for something else, and write no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write equal values in full: aliases are refused when the file is read again."""
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Write text that holds another line break than a newline with escapes: YAML folds it in any other style."""
        style = '"' if any(character in data for character in "\r\x85\u2028\u2029") else None
        return self.represent_scalar(_TAG + "str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)
for _name, _pattern in _CORE_SCHEMA:
    _whole = re.compile(rf"(?:{_pattern.pattern})\Z")
    _Loader.add_implicit_resolver(_TAG + _name, _whole, None)
    _Dumper.add_implicit_resolver(_TAG + _name, _whole, None)


def shown(value: object, limit: int = 80) -> str:
    """A value as an error message shows it: one printable line, cut when long."""
    text = repr(value) if not isinstance(value, bool | None) else {True: "true", False: "false", None: "null"}[value]
    return text if len(text) <= limit else text[: limit - 3] + "..."


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds.

    Raises:
        ValueError: If the file is too large, not UTF-8, no YAML or no mapping; the text names the file.
    """
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"{shown_path(path)}: larger than {MAX_BYTES} bytes, too large for a configuration")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = f"byte 0x{content[error.start]:02x} at position {error.start}"
        raise ValueError(f"{shown_path(path)}: not UTF-8 text ({where}); save it as UTF-8") from None
    return parse_mapping(text, source=shown_path(path))


def shown_path(path: Path) -> str:
    """A path as an error message names it: printable, in one line."""
    text = str(path)
    return text if text.isprintable() else ascii(text)


def parse_mapping(text: str, *, source: str) -> dict[str, Any]:
    """The mapping in a YAML text; `source` names the text in errors."""
    value = _parse(text, source=source)
    if not isinstance(value, dict):
        what = "empty" if value is None else shown(value)
        raise ValueError(f"{source}: a mapping (lines `key: value`) is needed, but the file is {what}")
    return value


def parse_scalar(text: str, *, source: str) -> Scalar | None:
    """The value of a command line's `key=value`, read as a YAML file reads it."""
    value = _parse(text, source=source)
    if isinstance(value, dict | list):
        raise ValueError(f"{source}: {shown(text)} is not a single value")
    assert value is None or isinstance(value, bool | int | float | str)
    return value


def dump(document: Mapping[str, Any], *, flow: bool = False) -> str:
    """A mapping as YAML text that YAML 1.1 and 1.2 read alike; `flow` writes the innermost in one line."""
    text: str = yaml.dump(
        document,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=10_000,
        default_flow_style=None if flow else False,
    )
    return text


def comments(lines: Sequence[str]) -> str:
    """Lines as YAML comments; whatever could end a comment or make the file unreadable is escaped."""
    single = [part for line in lines for part in line.splitlines() or [""]]
    printable = ("".join(c if c.isprintable() else ascii(c)[1:-1] for c in part) for part in single)
    return "".join(f"# {part}".rstrip() + "\n" for part in printable)


def _parse(text: str, *, source: str) -> Any:
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        problem = " ".join(part for part in (error.context, error.problem) if part)
        hint = "; indent with spaces, not tabs" if "\\t" in problem else ""
        raise ValueError(f"{source}: {_place(error.problem_mark)}{problem}{hint}") from None
    except yaml.reader.ReaderError as error:
        where = f"character U+{error.character:04X} at position {error.position}"
        raise ValueError(f"{source}: {where} is not allowed in YAML") from None
    except (yaml.YAMLError, ValueError, OverflowError, IndexError) as error:
        # PyYAML lets a few of Python's own errors through, for example for an escape beyond Unicode.
        raise ValueError(f"{source}: not readable as YAML ({error})") from None
    return None if node is None else _value(node, source)


def _value(node: yaml.Node, source: str) -> Any:
    where = f"{source}: {_place(node.start_mark)}"
    if node.tag == _TAG + "map" and isinstance(node, yaml.MappingNode):
        return _mapping(node, source)
    if node.tag == _TAG + "seq" and isinstance(node, yaml.SequenceNode):
        return [_value(item, source) for item in node.value]
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, where)
    raise ValueError(f"{where}the tag {shown(node.tag)} is not allowed")


def _mapping(node: yaml.MappingNode, source: str) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        where = f"{source}: {_place(key_node.start_mark)}"
        key = _value(key_node, source)
        if not isinstance(key, str):
            raise ValueError(f"{where}the key {shown(key)} is not text")
        if key in mapping:
            raise ValueError(f"{where}the key {shown(key)} is given twice")
        mapping[key] = _value(value_node, source)
    return mapping


def _scalar(node: yaml.ScalarNode, where: str) -> Scalar | None:
    text: str = node.value
    kind = node.tag.removeprefix(_TAG)
    if kind == "str":
        # An escape can name half a character, which no file or database could hold later.
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError(f"{where}{shown(text)} holds half a character (a surrogate)")
        return text
    # An explicit tag (`!!int x`) reaches this line too, so the text is held against the pattern again.
    pattern = dict(_CORE_SCHEMA).get(kind)
    if pattern is None:
        raise ValueError(f"{where}the tag {shown(node.tag)} is not allowed")
    if pattern.fullmatch(text) is None:
        raise ValueError(f"{where}{shown(text)} is not a YAML {kind}")
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if len(text) > MAX_DIGITS:
        raise ValueError(f"{where}{shown(text)} has more than {MAX_DIGITS} digits")
    if kind == "int":
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    # Python spells infinity and not-a-number without YAML's dot.
    return float(text.replace(".", "", 1) if text[-1] in "fFnN" else text)


def _place(mark: yaml.Mark | None) -> str:
    return "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
