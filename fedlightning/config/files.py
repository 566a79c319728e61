"""Find configurations by name or path: the user's folder first, then what ships with the package."""

from pathlib import Path

from fedlightning.config.documents import shown_path

PACKAGE = Path(__file__).resolve().parent.parent
PUBLISHED = PACKAGE / "published"


def shipped_studies() -> Path:
    """The folder of studies that ships: inside an installed package, beside the package in a checkout."""
    installed = PACKAGE / "studies"
    return installed if installed.is_dir() else PACKAGE.parent / "studies"


def looks_like_path(name: str | Path) -> bool:
    """Whether a file is meant, not a name: a suffix or a separator tells."""
    return isinstance(name, Path) or name.endswith((".yaml", ".yml")) or "/" in name or "\\" in name


def named_files(root: Path | None, folder: str = "") -> dict[str, Path]:
    """The YAML files that can be called by name, in `<root>/studies` and in what ships; the user's win."""
    places = [shipped_studies() / folder]
    if root is not None:
        places.append(root / "studies" / folder)
    return {path.stem: path for place in places for path in sorted(place.glob("*.yaml"))}


def existing_file(name: str | Path, *, what: str) -> Path:
    """The file at a path that the user gave.

    Raises:
        LookupError: If there is no file.
    """
    path = Path(name)
    if not path.is_file():
        raise LookupError(f"no {what} file {shown_path(path)}; give an existing file, or a name without .yaml")
    return path
