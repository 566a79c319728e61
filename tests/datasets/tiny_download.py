"""A small made-up data file, and a process that downloads it: ``python tiny_download.py``."""

import bz2
import hashlib
import logging
from pathlib import Path

from fedlightning.datasets import DataFile, DatasetEntry
from fedlightning.datasets.fetch import download_file

CONTENT = b"".join(b"%d 1:%d 2:-0.5 \n" % (i, i + 1) for i in range(500))
PACKED = bz2.compress(CONTENT)
OTHER = CONTENT.replace(b"-0.5", b"-0.7")
FILE = DataFile("tiny", "regression/tiny.bz2", rows=500, sha256=hashlib.sha256(CONTENT).hexdigest())
UNKNOWN = DataFile("tiny", "regression/tiny.bz2", rows=500)
"""The same file without a published digest."""
ENTRY = DatasetEntry(name="tiny", task="regression", files=(FILE,), rows=500, features=2, classes=0, description="")
PATH = "/regression/tiny.bz2"


def holds(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder, hidden ones too, with its content; empty locks are meant to stay."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: content for name, content in files.items() if content or not name.endswith(".lock")}


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    download_file(FILE, ENTRY)
