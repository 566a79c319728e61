"""Files are found in the promised order, in every form they may be stored in."""

from pathlib import Path

import pytest

from fedlightning.datasets import CATALOGUE, list_datasets, load_table
from fedlightning.datasets.locate import BUNDLED, LIBSVM_URL, cache_dir, file_url, locate_file

A9A, A9A_T = CATALOGUE["a9a"].files
ABALONE = CATALOGUE["abalone"].files[0]


def put(folder: Path, name: str) -> Path:
    """Create an empty file, for a search that does not look inside."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.touch()
    return path


def test_order_of_the_search(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Argument, environment, bundled, cache, download: each is used only if none before it has the file."""
    argument, environment = tmp_path / "argument", tmp_path / "environment"
    argument.mkdir()
    environment.mkdir()
    monkeypatch.setenv("FEDLIGHTNING_DATA_DIR", str(environment))

    def found(file):
        source = locate_file(file, argument)
        return source.origin, source.path

    assert found(ABALONE) == ("download", None)
    cached = put(cache, ABALONE.name)
    assert found(ABALONE) == ("cache", cached)
    put(cache, A9A.name)
    assert found(A9A) == ("bundled", BUNDLED / "a9a.xz")
    from_environment = put(environment, A9A.name)
    assert found(A9A) == ("data_dir", from_environment)
    from_argument = put(argument, A9A.name)
    assert found(A9A) == ("data_dir", from_argument)


@pytest.mark.parametrize("ending", ["", ".xz", ".bz2", ".gz"])
@pytest.mark.parametrize("subfolder", ["", "libsvm"])
def test_file_is_found_in_every_form(tmp_path: Path, ending: str, subfolder: str) -> None:
    """A file may be compressed or not, in the folder itself or in its `libsvm` subfolder."""
    path = put(tmp_path / subfolder, f"a9a.t{ending}")
    assert locate_file(A9A_T, tmp_path).path == path


def test_missing_data_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that was asked for and is not there is named, with who asked for it."""
    nowhere = tmp_path / "nowhere"
    with pytest.raises(NotADirectoryError, match=r"the data folder '.*nowhere' is no folder"):
        load_table("a9a", data_dir=nowhere)
    monkeypatch.setenv("FEDLIGHTNING_DATA_DIR", str(nowhere))
    with pytest.raises(NotADirectoryError, match=r"FEDLIGHTNING_DATA_DIR '.*nowhere' is no folder"):
        load_table("a9a")


def test_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is the project's own variable, else below XDG_CACHE_HOME, else below ~/.cache."""
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("FEDLIGHTNING_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "fedlightning"
    for unusable in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert cache_dir() == Path.home() / ".cache" / "fedlightning"


def test_address_follows_argument_then_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files come from LIBSVM Data unless another address is given, and only over HTTP."""
    assert file_url(A9A) == f"{LIBSVM_URL}binary/a9a"
    monkeypatch.setenv("FEDLIGHTNING_DATA_URL", "http://mirror/data")
    assert file_url(A9A) == "http://mirror/data/binary/a9a"
    assert file_url(A9A, "https://other/") == "https://other/binary/a9a"
    with pytest.raises(ValueError, match="'file:///etc' must start with http"):
        file_url(A9A, "file:///etc")


def test_list_tells_what_needs_a_download(tmp_path: Path) -> None:
    """Every data set is listed; available without a download are a9a, scikit-learn's and what is stored."""
    put(tmp_path, ABALONE.name)
    listed = {sources.entry.name: sources for sources in list_datasets(tmp_path)}
    assert list(listed) == list(CATALOGUE)
    available = {name for name, sources in listed.items() if sources.available}
    assert available == {"a9a", "abalone", "breast_cancer", "diabetes", "wine", "digits"}
    assert [source.origin for source in listed["ijcnn1"].files] == ["download", "download"]
    assert listed["ijcnn1"].files[0].url == f"{LIBSVM_URL}binary/ijcnn1.t.bz2"
