"""The argument files that come with the package. Commands take their names in place of a path."""

import dataclasses
import difflib
from pathlib import Path

import fgoffload


@dataclasses.dataclass(frozen=True, slots=True)
class ShippedModel:
    """An argument file of `arguments/`."""

    name: str
    path: Path
    summary: str
    """Summary from the first line of the file."""


def list_models() -> list[ShippedModel]:
    """Return the shipped models by name."""
    models = []
    for path in sorted(_find_folder().glob("*.sh")):
        with path.open(encoding="utf-8") as file:
            models.append(ShippedModel(path.stem, path, file.readline().partition(": ")[2].strip()))
    return models


def find_model(name: str) -> Path | None:
    """Return the file of the shipped model called `name`, or None."""
    return next((model.path for model in list_models() if model.name == name), None)


def suggest_model(name: str) -> str:
    """Return a sentence with the nearest shipped model; empty if `name` is a path."""
    if not name.isidentifier():
        return ""
    near = difflib.get_close_matches(name, [model.name for model in list_models()], n=1)
    meant = f" Did you mean {near[0]}?" if near else ""
    return f"{meant} `fgoffload plan --list` shows the models that come with fgoffload."


def _find_folder() -> Path:
    """Return where `arguments/` is: inside an installed package, next to the package in a checkout."""
    package = Path(fgoffload.__file__).parent
    installed = package / "arguments"
    return installed if installed.is_dir() else package.parent / "arguments"
