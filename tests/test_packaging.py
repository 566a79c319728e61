"""What is installed is what the checkout has: commands, studies, published values, bundled data, pinned libraries."""

import importlib
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fedlightning
from fedlightning.__main__ import COMMANDS, main
from fedlightning.config import known_clients, known_studies, load_study

CHECKOUT = Path(__file__).resolve().parent.parent
STUDIES = sorted(path.relative_to(CHECKOUT) for path in (CHECKOUT / "studies").rglob("*.yaml"))


def project() -> dict[str, Any]:
    """Return the project table of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def requirements() -> list[Requirement]:
    """Return all that the project and its extras name."""
    table = project()
    extras = [line for lines in table["optional-dependencies"].values() for line in lines]
    return [Requirement(line) for line in table["dependencies"] + extras]


def names(requirement: Requirement) -> tuple[str, str]:
    """Return what a requirement asks for, in one spelling."""
    return canonicalize_name(requirement.name), str(requirement.specifier)


def pins() -> dict[str, str]:
    """Return the exact versions of constraints.txt by canonical name."""
    lines = (CHECKOUT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    found = {canonicalize_name(name): version for name, version in pairs}
    assert len(found) == len(pairs)
    return found


def test_every_requirement_is_pinned_in_its_range() -> None:
    """Who installs with the constraints gets known versions of everything that is named, each in the range named."""
    versions = pins()
    for requirement in requirements():
        name = canonicalize_name(requirement.name)
        assert name in versions, f"{requirement.name} is not in constraints.txt"
        assert requirement.specifier.contains(versions[name]), f"{versions[name]} is not {requirement}"


def test_the_version_is_the_same_everywhere() -> None:
    """Flower reads the version in pyproject.toml, programs the package's own: they are one."""
    assert project()["version"] == fedlightning.__version__


def test_every_requirement_has_a_floor() -> None:
    """A resolver is told the oldest version that can work; type stubs follow their library."""
    bare = [requirement.name for requirement in requirements() if ">=" not in str(requirement.specifier)]
    assert [name for name in bare if not name.startswith("types-")] == []


def test_the_console_script_is_the_program() -> None:
    """pyproject's only script calls what `python -m fedlightning` calls, with the same commands as modules."""
    scripts = project()["scripts"]
    assert list(scripts) == ["fedlightning"]
    module, _, function = scripts["fedlightning"].partition(":")
    assert getattr(importlib.import_module(module), function) is main
    for name in COMMANDS:
        assert callable(importlib.import_module(f"fedlightning.{name}").main)


def test_the_checkouts_studies_are_found() -> None:
    """Without an installation of files, in an editable one, the studies beside the package are those that ship."""
    assert STUDIES
    for path in STUDIES:
        if path.parent.name == "studies":
            assert path.stem in known_studies()
            assert load_study(path.stem).dataset.name
        else:
            assert path.stem in known_clients()


def test_versions_agree() -> None:
    """The changelog, where it names versions, begins with this one."""
    named = re.findall(r"^## \[?(\d+\.\d+\.\d+)", (CHECKOUT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert named[:1] in ([], [fedlightning.__version__])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the checkout as a release would be."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(CHECKOUT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the wheel's files and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(folder), str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def run_installed(installed: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder where only the installed files are found first."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FEDLIGHTNING_")}
    environment |= {"PYTHONPATH": str(installed), "FEDLIGHTNING_CACHE_DIR": str(cwd / "cache")}
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_the_wheel_is_whole(wheel: Path) -> None:
    """It holds every file of the package and every study, and nothing of tests, data stores or caches."""
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert wheel.name.startswith(f"fedlightning-{fedlightning.__version__}-py3-none-any")
    package = {
        path.relative_to(CHECKOUT).as_posix()
        for path in (CHECKOUT / "fedlightning").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == package | {f"fedlightning/{path.as_posix()}" for path in STUDIES}
    assert held >= {
        "fedlightning/py.typed",
        "fedlightning/studies/a9a_5.yaml",
        "fedlightning/published/clients.yaml",
        "fedlightning/published/centralized.yaml",
        "fedlightning/datasets/bundled/a9a.xz",
        "fedlightning/datasets/bundled/a9a.t.xz",
    }


@pytest.mark.slow
def test_the_wheel_names_what_it_needs(wheel: Path) -> None:
    """Its requirements are pyproject's, and the licence comes along."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
        assert any(name.endswith("/LICENSE") for name in archive.namelist())
    named = [
        Requirement(line.removeprefix("Requires-Dist: "))
        for line in text.splitlines()
        if line.startswith("Requires-Dist")
    ]
    assert {names(requirement) for requirement in named} == {names(requirement) for requirement in requirements()}
    assert f"\nRequires-Python: {project()['requires-python']}\n" in text


@pytest.mark.slow
def test_an_installation_works_anywhere(installed: Path, tmp_path: Path) -> None:
    """From an empty folder, commands start and find the studies, the published values and the bundled rows."""
    tuned = run_installed(installed, tmp_path, "-m", "fedlightning.tune", "--help")
    assert (tuned.returncode, tuned.stderr) == (0, "")
    assert tuned.stdout.startswith("usage: python -m fedlightning.tune [-h] ")
    code = """
import fedlightning
from fedlightning.config import load_centralized, load_clients, load_study
from fedlightning.datasets import load_table
print(fedlightning.__file__)
print(load_study("a9a_5").dataset.name, load_clients("a9a_5_clients").client_num)
print(load_centralized("abalone").n_estimators)
print(load_table("a9a").x.shape)
"""
    loaded = run_installed(installed, tmp_path, "-c", code)
    assert (loaded.returncode, loaded.stderr) == (0, "")
    assert loaded.stdout.splitlines() == [str(installed / "fedlightning/__init__.py"), "a9a 5", "200", "(48842, 123)"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_installed_program_runs(installed: Path, tmp_path: Path) -> None:
    """The script that the installer made lists the data sets, and is called by its own name."""
    script = str(installed / "bin" / "fedlightning")
    listed = run_installed(installed, tmp_path, script, "data", "list")
    assert (listed.returncode, listed.stderr) == (0, "")
    assert re.search(r"^a9a +binary +48,842 +123 +bundled$", listed.stdout, re.MULTILINE)
    helped = run_installed(installed, tmp_path, script, "data", "--help")
    assert helped.stdout.startswith("usage: fedlightning data [-h] ")
    assert list(tmp_path.iterdir()) == []
