"""Tests for the shape of the package: imports point down, and every library enters by its own door."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "fedlightning"

LAYERS = (
    ("the package", ["fedlightning"]),
    ("vocabulary", ["config", "tasks", "seeds", "datasets.catalogue"]),
    ("sources", ["model", "trees", "datasets", "owners", "locks"]),
    ("client's work", ["training", "partition"]),
    ("federation", ["federation"]),
    ("experiment", ["experiment"]),
    ("around experiments", ["search", "storages", "workers", "tracking", "figures", "tables"]),
    ("jobs", ["jobs"]),
    ("the user's side", ["display", "downloads", "cli", "server_app"]),
)
"""From the bottom up; a module may import from its own layer and those below. Commands stand above all of them."""

DOORS: dict[str, set[str]] = {
    "ray": {"federation"},
    "filelock": {"federation", "datasets", "locks", "owners", "search", "storages"},
    "flwr": {"federation", "server_app"},
    "lightning": {"training"},
    "matplotlib": {"figures"},
    "mlflow": {"tracking"},
    "numpy": {"datasets", "experiment", "federation", "model", "partition", "tasks", "trees"},
    "optuna": {"search", "storages", "figures"},
    "plotly": {"figures"},
    "pydantic": {"config"},
    "rich": {"display", "downloads", "commands"},
    "scipy": {"datasets"},
    "sklearn": {"datasets", "partition"},
    "sqlalchemy": {"storages", "tracking"},
    "torch": {"experiment", "federation", "model", "partition", "tasks", "training"},
    "torchmetrics": {"tasks"},
    "xgboost": {"trees"},
    "yaml": {"config"},
}
"""Library -> the modules, folders or ``commands`` that may import it."""

TYPES = {
    ("flwr.serverapp", "Grid"): {"experiment", "jobs"},
    ("matplotlib.figure", "Figure"): {"tracking"},
}
"""Names of types that functions take from those who may use the library, and pass on."""

HEAVY = ("torch", "lightning", "xgboost", "flwr", "mlflow", "optuna")


@dataclass(frozen=True)
class Import:
    """One imported thing: a module, or a name out of a module."""

    module: str
    name: str | None
    line: int


def modules() -> dict[str, ast.Module]:
    """Return every module of the package by its dotted name below ``fedlightning``; the package itself by its own."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name or "fedlightning"] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


MODULES = modules()


def is_command(name: str) -> bool:
    """Return whether a module is started with ``python -m``: it guards a call at its end."""
    return "." not in name and any(
        isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in MODULES[name].body
    )


COMMANDS = sorted(name for name in MODULES if is_command(name))


def imports(tree: ast.Module) -> Iterator[Import]:
    """Yield all imports of a module, inside functions and for type checkers too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, None, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            assert node.module is not None
            yield from (Import(node.module, alias.name, node.lineno) for alias in node.names)


def own_target(entry: Import) -> str | None:
    """Return the module of this package that is imported, or None for another library."""
    parts = entry.module.split(".")
    if parts[0] != "fedlightning":
        return None
    below = ".".join(parts[1:])
    # `from fedlightning.federation import records` imports a module, `from fedlightning.config import X` a name.
    inner = f"{below}.{entry.name}" if below else str(entry.name)
    return inner if inner in MODULES else below or "fedlightning"


def layer(name: str) -> int:
    """Return how high a module stands."""
    if name in COMMANDS:
        return len(LAYERS)
    # The longest entry counts, so that a module may stand lower than its folder.
    fitting = [
        (len(entry), number)
        for number, (_, entries) in enumerate(LAYERS)
        for entry in entries
        if name == entry or name.startswith(f"{entry}.")
    ]
    assert fitting, f"{name} has no layer; give it one in LAYERS"
    return max(fitting)[1]


def enters(name: str, doors: set[str]) -> bool:
    """Return whether a module is one of a library's doors, or below one."""
    return name.split(".")[0] in doors or name in doors or (name in COMMANDS and "commands" in doors)


every_module = pytest.mark.parametrize("name", MODULES)


def test_the_package_is_found() -> None:
    """The tests below look at something: the commands and a module of every layer."""
    assert {"run", "tune"} <= set(COMMANDS)
    assert {layer(name) for name in MODULES} == set(range(len(LAYERS) + 1))


@every_module
def test_imports_point_down(name: str) -> None:
    """A module knows its own layer and those below, also where it imports late or for type checkers only."""
    upward = [
        f"line {entry.line}: {target}"
        for entry in imports(MODULES[name])
        if (target := own_target(entry)) is not None and layer(target) > layer(name)
    ]
    assert not upward, f"{name} imports from above: {upward}"


@every_module
def test_libraries_enter_by_their_doors(name: str) -> None:
    """Each library is imported where its things belong and nowhere else."""
    wrong = []
    for entry in imports(MODULES[name]):
        library = entry.module.split(".")[0]
        if library == "fedlightning" or library in sys.stdlib_module_names:
            continue
        assert library in DOORS, f"{name} line {entry.line}: {library} is new here; give it a door in DOORS"
        passed_on = TYPES.get((entry.module, str(entry.name)), set())
        if not enters(name, DOORS[library] | passed_on):
            wrong.append(f"line {entry.line}: {entry.module}")
    assert not wrong, f"{name} imports what enters elsewhere: {wrong}"


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_define_no_classes(name: str) -> None:
    """`python -m` loads a command twice; a class defined in it would exist twice, too."""
    classes = [node.name for node in ast.walk(MODULES[name]) if isinstance(node, ast.ClassDef)]
    assert classes == []


@every_module
def test_only_commands_print(name: str) -> None:
    """The library logs; print belongs to those whose output somebody asked for."""
    printed = [
        node.lineno
        for node in ast.walk(MODULES[name])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert name in COMMANDS or printed == []


def test_no_module_is_called_utils() -> None:
    """A module is named after what is in it."""
    vague = {"utils", "util", "helpers", "common", "misc"}
    assert [name for name in MODULES if name.split(".")[-1] in vague] == []


@every_module
def test_every_module_says_what_it_is(name: str) -> None:
    """A module begins with a sentence about itself."""
    docstring = ast.get_docstring(MODULES[name])
    assert docstring
    assert docstring.splitlines()[0].endswith((".", ":"))


def test_commands_start_light() -> None:
    """Importing the package or a command loads none of the heavy libraries: --help and mistakes answer at once."""
    code = f"""
import importlib, sys
for name in {["fedlightning", *(f"fedlightning.{name}" for name in COMMANDS)]!r}:
    importlib.import_module(name)
    loaded = [heavy for heavy in {HEAVY!r} if heavy in sys.modules]
    assert not loaded, f"importing {{name}} loads {{', '.join(loaded)}}"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
