"""Finds the argument files that come with the package. Commands accept the model names instead of paths."""

from pathlib import Path

import fgoffload


def list_models() -> list[Path]:
    """Return the argument files of the shipped models. A model's name is its file name without `.sh`."""
    package = Path(fgoffload.__file__).parent
    installed = package / "arguments"  # in a Git checkout, the folder is next to the package
    return sorted((installed if installed.is_dir() else package.parent / "arguments").glob("*.sh"))


def find_model(name: str) -> Path | None:
    """Return the file of the shipped model called `name`, or None."""
    return next((path for path in list_models() if path.stem == name), None)


def read_summary(path: Path) -> str:
    """Return the summary from the first line of a shipped model's file."""
    with path.open(encoding="utf-8") as file:
        return file.readline().partition(": ")[2].strip()
