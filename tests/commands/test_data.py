"""Data files from the command line: what there is, what is missing, and what is damaged."""

import bz2
import dataclasses
import hashlib
import io
import lzma
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from run_command import Finished, one_core

from fedlightning.datasets import CATALOGUE, catalogue, list_datasets, load_table, locate
from fedlightning.downloads import DownloadDisplay, fetch_missing

Call = Callable[..., Finished]
BUNDLED = locate.BUNDLED
A9A = {name: lzma.decompress((BUNDLED / f"{name}.xz").read_bytes()) for name in ("a9a", "a9a.t")}
SKLEARN = ["breast_cancer", "diabetes", "wine", "digits"]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """Serve contents by path from this machine, in place of LIBSVM Data."""
    contents: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = contents.get(self.path)
            if body is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Keep quiet."""

    # A proxy of the environment would be asked even for this machine.
    monkeypatch.setenv("no_proxy", "*")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        monkeypatch.setenv("FEDLIGHTNING_DATA_URL", f"http://127.0.0.1:{server.server_address[1]}/data")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield contents
        server.shutdown()
        thread.join()


@pytest.fixture
def served_a9a(served: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, bytes]:
    """Serve a9a, which is not found in the package for once."""
    monkeypatch.setattr(locate, "BUNDLED", tmp_path)
    served.update({f"/data/binary/{name}": content for name, content in A9A.items()})
    return served


@pytest.fixture
def cache(call: Call, tmp_path: Path) -> Path:
    """The cache that commands use."""
    return tmp_path / "cache"


def visible(folder: Path) -> set[str]:
    """Return the names of the files in a folder that a user sees; the empty locks of downloads are hidden."""
    hidden = {path.name for path in folder.iterdir() if path.name.startswith(".")}
    assert all(name.endswith(".lock") for name in hidden)
    return {path.name for path in folder.iterdir()} - hidden


def test_the_list_has_every_data_set(call: Call) -> None:
    """A line each: task, size, and where the files come from or which are missing."""
    done = call("data", "list")
    assert (done.status, done.err) == (0, "")
    _, _, *lines = done.out.splitlines()
    cells = [line.split(maxsplit=4) for line in lines]
    assert [line[:4] for line in cells] == [
        [entry.name, entry.task, f"{entry.rows:,}", str(entry.features)] for entry in CATALOGUE.values()
    ]
    where = {line[0]: line[4] for line in cells}
    assert where["a9a"] == "bundled"
    assert where["cod_rna"] == "missing, `data fetch` downloads: cod-rna.t, cod-rna.r"
    assert {where[name] for name in SKLEARN} == {"with scikit-learn"}


def test_the_list_says_where_files_are(call: Call, cache: Path, tmp_path: Path) -> None:
    """The user's folder is named, the cache is called so, and what is in neither is missing."""
    own = tmp_path / "own"
    own.mkdir()
    cache.mkdir()
    (own / "cod-rna.r").touch()
    (cache / "abalone_scale").touch()
    done = call("data", "list", "--data-dir", own, "cod-rna", "abalone")
    *_, cod_rna, abalone = done.out.splitlines()
    assert cod_rna.endswith(f"8  {own}; missing, `data fetch` downloads: cod-rna.t")
    assert abalone.endswith("8  cache")


def test_the_list_is_there_for_programs(call: Call) -> None:
    """With --json a line holds all that is known of a data set."""
    found = {line["dataset"]: line for line in call("data", "list", "--json").json_lines()}
    assert list(found) == list(CATALOGUE)
    for sources in list_datasets():
        values = found[sources.entry.name]
        assert values["available"] is sources.available
        assert [(file["file"], file["path"], file["url"]) for file in values["files"]] == [
            (source.file.name, str(source.path) if source.path else None, source.url) for source in sources.files
        ]
    assert {key: found["digits"][key] for key in ("task", "rows", "features", "classes")} == {
        "task": "multiclass",
        "rows": 1797,
        "features": 64,
        "classes": 10,
    }


def test_fetch_downloads_and_verifies(call: Call, cache: Path, served_a9a: dict[str, bytes]) -> None:
    """Files arrive whole, progress comes as plain lines, and a second fetch needs no download."""
    done = call("data", "fetch", "a9a")
    assert (done.status, done.err) == (0, "")
    assert {name: (cache / name).read_bytes() for name in visible(cache)} == A9A
    lines = done.out.splitlines()
    assert lines[0] == "downloading a9a: 0 B of 2.3 MB"
    assert "downloading a9a: 2.3 MB of 2.3 MB" in lines
    assert lines[-2:] == [f"a9a: ok: {cache / name}" for name in ("a9a", "a9a.t")]
    served_a9a.clear()
    again = call("data", "fetch", "a9a")
    assert (again.status, again.out.splitlines()) == (0, lines[-2:])


def test_fetch_is_there_for_programs(call: Call, cache: Path, served_a9a: dict[str, bytes]) -> None:
    """With --json stdout holds an object per file and progress goes to stderr; --quiet leaves that out."""
    done = call("data", "fetch", "a9a", "--json")
    assert done.err.startswith("downloading a9a: 0 B")
    found = done.json_lines()
    assert [(line["dataset"], line["file"], line["status"], line["origin"]) for line in found] == [
        ("a9a", "a9a", "ok", "cache"),
        ("a9a", "a9a.t", "ok", "cache"),
    ]
    assert [line["path"] for line in found] == [str(cache / "a9a"), str(cache / "a9a.t")]
    shutil.rmtree(cache)
    assert call("data", "fetch", "a9a", "--json", "-q").err == ""


def test_fetch_all_goes_on_after_a_failure(call: Call, cache: Path, served_a9a: dict[str, bytes]) -> None:
    """What cannot be had is named, everything else is fetched, and the exit status says so."""
    done = call("data", "fetch", "all", "--json")
    found = done.json_lines()
    missing = ["cod_rna", "ijcnn1", "abalone", "cpusmall", "space_ga", "YearPredictionMSD"]
    assert done.status == 1
    assert [line["dataset"] for line in found if line["status"] == "failed"] == missing
    assert [line["dataset"] for line in found if line["status"] == "ok"] == ["a9a", "a9a", *SKLEARN]
    assert "ERROR: cod-rna.t: " in done.err
    assert f"ERROR: 6 of 11 data sets could not be fetched: {', '.join(missing)}" in done.err
    assert visible(cache) == set(A9A)


def test_a_failed_fetch_leaves_nothing(call: Call, cache: Path, served_a9a: dict[str, bytes]) -> None:
    """A file with another content, or none, is an error that says what to put where; the cache stays as it was."""
    served_a9a["/data/binary/a9a"] = A9A["a9a"].replace(b"+1", b"-1", 1)
    damaged = call("data", "fetch", "a9a")
    assert damaged.status == 2
    assert "ERROR: a9a: sha256 is " in damaged.err
    del served_a9a["/data/binary/a9a"]
    absent = call("data", "fetch", "a9a")
    assert absent.status == 1
    assert "answered 404" in absent.err
    for done in (damaged, absent):
        assert f"put a9a (plain, .xz, .bz2 or .gz) into {cache}" in done.err
    assert visible(cache) == set()


def libsvm(rng: np.random.Generator, rows: int, features: int, labels: list[int], blank: bytes) -> bytes:
    """Return made-up rows as LIBSVM Data writes them; the first feature is never zero, others may be left out."""
    lines = []
    for row in range(rows):
        values = np.round(rng.normal(scale=30, size=features), 5)
        left_out = rng.random(features) < 0.1
        cells = [f"{k + 1}:{v:g}" for k, v in enumerate(values) if row == 0 or not left_out[k]]
        lines.append(f"{labels[row % len(labels)]} {' '.join(cells)}".encode() + blank + b"\n")
    return b"".join(lines)


@pytest.fixture
def served_small(served: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Serve small files in place of cod_rna's and YearPredictionMSD's, and shrink their entries to these."""
    rng = np.random.default_rng(7)
    small = dict(CATALOGUE)
    for name, labels, blank in (("cod_rna", [1, -1, -1], b" "), ("YearPredictionMSD", list(range(1990, 2008)), b"")):
        entry, files = CATALOGUE[name], []
        for file, rows in zip(entry.files, (300, 180), strict=True):
            content = libsvm(rng, rows, entry.features, labels, blank)
            served[f"/data/{file.url_path}"] = bz2.compress(content) if file.url_path.endswith(".bz2") else content
            # A digest of the same kind as the real file's.
            md5 = file.md5 and hashlib.md5(content).hexdigest()
            sha256 = file.sha256 and hashlib.sha256(content).hexdigest()
            files.append(dataclasses.replace(file, rows=rows, md5=md5, sha256=sha256))
        small[name] = dataclasses.replace(entry, files=tuple(files), rows=480)
    monkeypatch.setattr(catalogue, "CATALOGUE", small)
    return served


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("cod_rna", {"cod-rna.t", "cod-rna.r"}),
        (
            "YearPredictionMSD",
            {
                "YearPredictionMSD.bz2",
                "YearPredictionMSD.sha256",
                "YearPredictionMSD.t.bz2",
                "YearPredictionMSD.t.sha256",
            },
        ),
    ],
)
def test_the_large_data_sets_come_the_same_way(
    call: Call, cache: Path, served_small: dict[str, bytes], name: str, stored: set[str]
) -> None:
    """Plain with an MD5, or packed and without a digest: fetched once, verified, loaded, and damage is found."""
    done = call("data", "fetch", name)
    assert (done.status, done.err) == (0, "")
    assert visible(cache) == stored
    served_small.clear()
    again = call("data", "fetch", name)
    assert (again.status, again.out.splitlines()) == (0, done.out.splitlines()[-2:])
    assert call("data", "verify", name).out.count("as expected") == 2
    table = load_table(name)
    assert table.x.shape == (480, CATALOGUE[name].features)
    assert set(table.y) == ({0, 1} if name == "cod_rna" else set(range(1990, 2008)))

    damaged = next(path for path in sorted(cache.iterdir()) if path.suffix in (".t", ".bz2"))
    content = damaged.read_bytes()
    changed = (
        content.replace(b"1:", b"1:1", 1) if name == "cod_rna" else bz2.compress(bz2.decompress(content) + b"1 1:1\n")
    )
    damaged.write_bytes(changed)
    verified = call("data", "verify", name)
    assert verified.status == 1
    assert f"{'md5' if name == 'cod_rna' else 'sha256'} is " in verified.out


@pytest.mark.parametrize("name", ["cod_rna", "YearPredictionMSD"])
def test_a_web_page_in_place_of_a_file_is_told(
    call: Call, cache: Path, served_small: dict[str, bytes], name: str
) -> None:
    """Whatever a file's digest, a proxy's page is called a web page, and the cache stays empty."""
    for path in served_small:
        served_small[path] = b"<html><body>Access denied</body></html>"
    done = call("data", "fetch", name)
    assert done.status == 2
    assert f"ERROR: {CATALOGUE[name].files[0].name}: a web page came instead of the file, from http://" in done.err
    assert visible(cache) == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cod_rna", "YearPredictionMSD"])
def test_a_run_downloads_what_it_needs(call: Call, cache: Path, served_small: dict[str, bytes], name: str) -> None:
    """A run on a data set that is not there fetches it, trains on it, and leaves it for the next one."""
    small = ["num_rounds=2", "num_iterations=3", "n_estimators_client=3"]
    with one_core():
        done = call("run", "--dataset", name, "--clients", "paper_2_clients", "--json", *small)
    assert done.status == 0, done.err
    assert [line["dataset"] for line in done.json_lines()] == [name]
    assert {file.name for file in CATALOGUE[name].files} <= {name.removesuffix(".bz2") for name in visible(cache)}


def test_verify_tells_good_from_damaged_and_missing(call: Call, tmp_path: Path) -> None:
    """Each file has a line with its state and what to do, and one that is not ok makes the command fail."""
    own = tmp_path / "own"
    own.mkdir()
    shutil.copy(BUNDLED / "a9a.xz", own)
    assert call("data", "verify", "a9a", "wine", "--data-dir", own).status == 0
    (own / "a9a.t").write_bytes(A9A["a9a.t"][:-1])
    done = call("data", "verify", "a9a", "abalone", "wine", "--data-dir", own)
    assert done.status == 1
    good, damaged, missing, sklearn = done.out.splitlines()
    assert good == f"a9a: ok: a9a: sha256 as expected ({own}/a9a.xz)"
    assert damaged.startswith("a9a: damaged: a9a.t: sha256 is ")
    assert damaged.endswith(f"; replace or remove {own}/a9a.t, it is your own and was left as it is")
    assert missing.startswith("abalone: missing: abalone_scale: not stored, would come from https://")
    assert missing.endswith("; `data fetch` downloads it")
    assert sklearn == "wine: ok: comes with scikit-learn"
    assert "ERROR: 2 of 3 files are damaged or missing: a9a.t, abalone_scale" in done.err
    assert (own / "a9a.t").exists()


def test_verify_is_there_for_programs(call: Call) -> None:
    """With --json every file of every data set has an object, those of scikit-learn one without a file."""
    done = call("data", "verify", "all", "--json")
    found = done.json_lines()
    assert done.status == 1
    assert {(line["dataset"], line["file"]) for line in found} == {
        (entry.name, file.name) for entry in CATALOGUE.values() for file in entry.files
    } | {(name, None) for name in SKLEARN}
    assert {line["dataset"] for line in found if line["status"] == "ok"} == {"a9a", *SKLEARN}
    assert {line["status"] for line in found} == {"ok", "missing"}


def test_a_damaged_download_is_fetched_again(call: Call, cache: Path, served_a9a: dict[str, bytes]) -> None:
    """`verify` says that `fetch` helps, and it does."""
    cache.mkdir()
    for name in A9A:
        (cache / name).write_bytes(A9A[name])
    (cache / "a9a").write_bytes(b"")
    damaged = call("data", "verify", "a9a")
    assert damaged.status == 1
    assert damaged.out.splitlines()[0].endswith("; `data fetch` downloads it")
    assert call("data", "fetch", "a9a").status == 0
    assert call("data", "verify", "a9a").status == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fetch"], "fetch what? name a data set, or all; known: a9a, "),
        (["verify"], "verify what? name a data set, or all; known: a9a, "),
        (["fetch", "wine", "a9b"], "unknown data set 'a9b'; known: a9a, "),
        (["verify", "al"], "unknown data set 'al'; known: "),
        (["list", "a9b"], "unknown data set 'a9b'; known: a9a, "),
        (["list", "--data-dir", "nowhere"], "the data folder 'nowhere' is no folder"),
    ],
)
def test_mistakes_are_explained(call: Call, arguments: list[str], said: str) -> None:
    """A wrong name is told before anything is done."""
    done = call("data", *arguments)
    assert (done.status, done.out) == (2, "")
    assert said in done.err


def test_only_the_action_is_required(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    """Without any argument the action is asked for, and no name, which a list does not need."""
    with pytest.raises(SystemExit):
        call("data")
    assert "required: list|fetch|verify; see " in capsys.readouterr().err


def test_an_unknown_action_is_explained(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    """The three actions are named."""
    with pytest.raises(SystemExit) as stopped:
        call("data", "download", "a9a")
    assert stopped.value.code == 2
    assert "invalid choice: 'download' (choose from 'list', 'fetch', 'verify')" in capsys.readouterr().err


def shown(progress: list[tuple[str, int, int | None]], **settings: Any) -> str:
    """Return what a display writes for a sequence of calls."""
    file = io.StringIO()
    with DownloadDisplay(Console(file=file, **settings)) as display:
        for call in progress:
            display(*call)
    return file.getvalue()


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=50), st.booleans())
def test_plain_progress_is_short(chunks: list[int], told: bool) -> None:
    """Five lines at most from nothing to everything, one if the server does not tell how much will come."""
    total = sum(chunks)
    done = [sum(chunks[:count]) for count in range(len(chunks) + 1)]
    lines = shown([("f", count, total if told else None) for count in done]).splitlines()
    if not told:
        assert lines == ["downloading f"]
        return
    assert 2 <= len(lines) <= 5
    assert lines[0].startswith("downloading f: 0 B of ")
    size = lines[0].rpartition(" of ")[2]
    assert lines[-1] == f"downloading f: {size} of {size}"


def test_a_terminal_gets_a_bar() -> None:
    """One line per file is drawn over and over; nothing is drawn where nothing is downloaded."""
    text = shown([("first", 0, 100), ("first", 100, 100), ("second", 0, None)], force_terminal=True, width=100)
    assert "downloading first" in text
    assert "100/100 bytes" in text
    assert "downloading second" in text
    assert "\x1b[" in text
    assert shown([], force_terminal=True) == shown([]) == ""


def test_only_what_is_missing_is_fetched(call: Call, cache: Path, served_a9a: dict[str, bytes]) -> None:
    """Before a run its files are downloaded with their progress; data sets that are there cost nothing."""
    file = io.StringIO()
    fetch_missing("wine", None, Console(file=file))
    assert not cache.exists()
    fetch_missing("a9a", None, Console(file=file))
    assert visible(cache) == set(A9A)
    assert file.getvalue().startswith("downloading a9a: 0 B of ")
    served_a9a.clear()
    fetch_missing("a9a", None, Console(file=file))
    with pytest.raises(OSError, match="abalone_scale"):
        fetch_missing("abalone", None, Console(file=file), quiet=True)
