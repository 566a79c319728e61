"""YAML is read by the rules of version 1.2, and nothing hostile gets further than a ValueError."""

import math
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from fedlightning.config.documents import MAX_BYTES, comments, dump, parse_mapping, parse_scalar, read_mapping

finite = st.floats(allow_nan=False, allow_infinity=False)
text = st.text(st.characters(exclude_categories=["Cs"]))


@given(finite)
def test_every_float_is_read_as_python_spells_it(value: float) -> None:
    """Exponents without a dot or sign, such as 1e-05, are numbers."""
    assert parse_scalar(repr(value), source="test") == value


@given(st.one_of(finite, st.integers(-(10**300), 10**300), text, st.booleans(), st.none()))
@example("\x85")
@example("a\u2028 b\r")
def test_a_written_value_is_read_back_by_both_yaml_versions(value: object) -> None:
    """Our reader and a plain YAML 1.1 reader agree on value and type."""
    written = dump({"key": value})
    for document in (parse_mapping(written, source="test"), yaml.safe_load(written)):
        assert document == {"key": value}
        assert type(document["key"]) is type(value)


@pytest.mark.parametrize("value", ["1e-05", "0o10", "5.", "yes", "1:30", "null", "", "010", "<<", "*x", "- a", "a: b"])
def test_text_that_looks_like_something_else_stays_text(value: str) -> None:
    """A name such as 1e-05 is quoted when written, for either YAML version."""
    written = dump({"key": value})
    assert parse_mapping(written, source="test") == yaml.safe_load(written) == {"key": value}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-05", 1e-05),
        (".80", 0.8),
        ("5.", 5.0),
        ("+3", 3),
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        ("on", "on"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2023-01-01", "2023-01-01"),
        ("'5'", "5"),
        ("", None),
        ("~", None),
        ("True", True),
        ("-.inf", -math.inf),
        ("5 # a comment", 5),
        ("!!str 5", "5"),
    ],
)
def test_scalars_follow_yaml_1_2(written: str, value: object) -> None:
    """Octal, sexagesimal, yes/no and dates of YAML 1.1 are not seen."""
    read = parse_scalar(written, source="test")
    assert read == value
    assert type(read) is type(value)


def test_not_a_number_is_read_as_such() -> None:
    """The model behind it can then say that it must be finite."""
    value = parse_scalar(".nan", source="test")
    assert isinstance(value, float)
    assert math.isnan(value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"- 1\n", "a mapping (lines `key: value`) is needed, but the file is [1]"),
        (b"just text", "a mapping (lines `key: value`) is needed, but the file is 'just text'"),
        (b"a: 1\nb:\n  c: 1\n  c: 2\n", "line 4, column 3: the key 'c' is given twice"),
        (b"a: &x [1, 1]\nb: *x\n", "line 2, column 4: aliases (*name) are not allowed"),
        (b"a: &a [*a]", "aliases (*name) are not allowed"),
        (b"a:\n\tb: 1\n", "indent with spaces, not tabs"),
        (b"a: " + b"[" * 10_000, "nested deeper than 16 levels"),
        (b"a: " + b"{b: " * 10_000, "nested deeper than 16 levels"),
        (b"- " * 10_000, "nested deeper than 16 levels"),
        (
            b"a: !!python/object/apply:os.system [ls]",
            "the tag 'tag:yaml.org,2002:python/object/apply:os.system'",
        ),
        (b"a: !!binary aGk=", "the tag 'tag:yaml.org,2002:binary' is not allowed"),
        (b"a: !!set {b, c}", "the tag 'tag:yaml.org,2002:set' is not allowed"),
        (b"a: !own 5", "the tag '!own' is not allowed"),
        (b"a: !!int x", "'x' is not a YAML int"),
        (b"a: !!float 1:30.0", "'1:30.0' is not a YAML float"),
        (b"1: a", "line 1, column 1: the key 1 is not text"),
        (b"? [a, b]\n: 1", "the key ['a', 'b'] is not text"),
        (b"~: 1", "the key null is not text"),
        (b"a: 1\n---\nb: 2\n", "expected a single document"),
        (b"a: \x00", "character U+0000 at position 3 is not allowed in YAML"),
        (b"a: \xff", "not UTF-8 text (byte 0xff at position 3); save it as UTF-8"),
        ("a: 1".encode("utf-16"), "not UTF-8 text (byte 0xff at position 0); save it as UTF-8"),
        (b"a: " + b"9" * 5_000, "has more than 400 digits"),
        (b"a: 0x" + b"f" * 5_000, "has more than 400 digits"),
        (b'a: "\\UFFFFFFFF"', "not readable as YAML"),
        (b'a: "\\ud800"', "holds half a character"),
        (b'"\\ud800": a', "holds half a character"),
        (b"%YAML 3.0\n---\na: 1", "found incompatible YAML document"),
        (b"a: b: c", "mapping values are not allowed here"),
        (b"a: 'open", "found unexpected end of stream"),
        (b"a: 1\n" * MAX_BYTES, "larger than 65536 bytes"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    """Every failure is a ValueError with the file's name, the place and the reason."""
    path = tmp_path / "wrong.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"wrong\.yaml: ") as raised:
        read_mapping(path)
    assert message in str(raised.value)


def test_many_aliases_do_not_multiply(tmp_path: Path) -> None:
    """The classic bomb of nested aliases is refused at its first alias."""
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60))]
    with pytest.raises(ValueError, match=r"line 2, column \d+: aliases"):
        parse_mapping("\n".join(lines), source="bomb")


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    """Editors that write a mark in front of UTF-8 do no harm."""
    path = tmp_path / "marked.yaml"
    path.write_bytes("key: ä".encode("utf-8-sig"))
    assert read_mapping(path) == {"key": "ä"}


def test_a_merge_key_is_an_ordinary_key() -> None:
    """YAML 1.2 has no merge keys, so none can bring in values unseen."""
    assert parse_mapping("<<: {a: 1}", source="test") == {"<<": {"a": 1}}


yaml_like = st.text(st.sampled_from("ab01.e-+:,[]{}\"'\\xUu&*!%@`|>?#~ \n\t\r\0\x85\u2028\ufeff<"), max_size=60)


@given(st.one_of(yaml_like, st.text(max_size=60)))
def test_no_text_fails_otherwise_than_with_a_value_error(content: str) -> None:
    """Whatever stands in a file, the answer is a mapping or a ValueError that names the source."""
    try:
        assert isinstance(parse_mapping(content, source="some file"), dict)
    except ValueError as error:
        assert str(error).startswith("some file: ")  # noqa: PT017


@given(st.binary(max_size=60))
def test_no_bytes_fail_otherwise_than_with_a_value_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    """The same holds for files that are no text at all."""
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(content)
    try:
        assert isinstance(read_mapping(path), dict)
    except ValueError as error:
        assert "any.yaml: " in str(error)  # noqa: PT017


@given(st.lists(st.text()))
def test_no_comment_becomes_content(lines: list[str]) -> None:
    """A line break or control character inside a comment cannot add or break keys."""
    assert parse_mapping(comments(lines) + "a: 1\n", source="test") == {"a": 1}
    comments(lines).encode()
