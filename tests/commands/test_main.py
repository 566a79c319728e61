"""One program for all commands: it lists them, and calls the one that is named with all that follows."""

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_command import Finished

import fedlightning
from fedlightning.__main__ import COMMANDS, main

PACKAGE = Path(fedlightning.__file__).parent

# What the script that an installer makes holds, for a checkout whose script was not made.
SCRIPT = "import sys; sys.argv[0] = 'bin/fedlightning'; from fedlightning.__main__ import main; sys.exit(main())"


def start(*words: str, cwd: Path | None = None, code: str | None = None) -> Finished:
    """Run Python with these words, or with code that is given the words."""
    head = [sys.executable] if code is None else [sys.executable, "-c", code]
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run([*head, *words], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    return Finished(done.returncode, done.stdout, done.stderr)


def test_the_list_is_complete() -> None:
    """Every module at the top that can be started is a command, and no other name is."""
    started = {
        path.stem
        for path in PACKAGE.glob("*.py")
        if any(
            isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)
            for node in ast.parse(path.read_text()).body
        )
    }
    assert started - {"__main__"} == set(COMMANDS)
    for name in COMMANDS:
        module = importlib.import_module(f"fedlightning.{name}")
        assert callable(module.main)
        assert module.build_parser().prog == f"python -m fedlightning.{name}"


@pytest.mark.parametrize(
    ("words", "program"), [((), "fedlightning"), (("-m", "fedlightning"), "python -m fedlightning")]
)
def test_help_lists_the_commands(words: tuple[str, ...], program: str, tmp_path: Path) -> None:
    """One line of a narrow terminal each, below the name of the program as it was called."""
    done = start(*words, "--help", cwd=tmp_path, code=None if words else SCRIPT)
    assert (done.status, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == f"usage: {program} COMMAND [argument ...]"
    listed = lines[lines.index("commands:") + 1 :][: len(COMMANDS)]
    assert [line.split(maxsplit=1) for line in listed] == [[name, purpose] for name, purpose in COMMANDS.items()]
    assert max(map(len, lines)) <= 80
    assert lines[-1] == f"{program} COMMAND --help tells more."


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_called_by_either_name(name: str, tmp_path: Path) -> None:
    """Its help is the same in all three ways, but for the way it was called."""
    ways = {
        f"fedlightning {name}": start(name, "--help", code=SCRIPT),
        f"python -m fedlightning {name}": start("-m", "fedlightning", name, "--help", cwd=tmp_path),
        f"python -m fedlightning.{name}": start("-m", f"fedlightning.{name}", "--help", cwd=tmp_path),
    }
    texts = set()
    for called, done in ways.items():
        assert (done.status, done.err) == (0, "")
        assert done.out.startswith(f"usage: {called} [-h] ")
        _, description, *_, examples = done.out.split("\n\n")
        assert all(line.startswith(f"  {called}") for line in examples.splitlines()[1:])
        texts.add((description, examples.replace(called, "CALLED")))
    assert len(texts) == 1


def test_only_the_chosen_command_is_loaded() -> None:
    """Listing loads no command, calling one loads no other."""
    code = """
import sys
from fedlightning.__main__ import COMMANDS, main
def loaded():
    return [name for name in COMMANDS if f"fedlightning.{name}" in sys.modules]
for words in (["--help"], ["data", "--help"]):
    try:
        main(words)
    except SystemExit:
        print("loaded:", *loaded())
"""
    done = start(code=code)
    assert [line for line in done.out.splitlines() if line.startswith("loaded:")] == ["loaded:", "loaded: data"]


def test_what_follows_is_the_commands_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Options and values reach the command as they are, and its exit status is returned."""
    done = start("data", "list", "wine", "--json", code=SCRIPT)
    assert done.status == 0
    assert done.json_lines()[0]["dataset"] == "wine"
    assert start("data", "list", "vine", code=SCRIPT).status == 2
    with pytest.raises(SystemExit) as stopped:
        main(["tune", "--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"fedlightning {fedlightning.__version__}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["tun"], "argument COMMAND: invalid choice: 'tun' (choose from 'tune', 'ui', "),
        (["Data"], "argument COMMAND: invalid choice: 'Data'"),
        (["--json"], "COMMAND"),
    ],
)
def test_a_wrong_command_is_explained(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    """No name or a wrong one is one line that leads to the list, and exit status 2."""
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("ERROR: ")
    assert said in captured.err
    assert captured.err.endswith("--help\n")
    assert len(captured.err.splitlines()) == 1


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a command, too."""
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"fedlightning {fedlightning.__version__}\n"
