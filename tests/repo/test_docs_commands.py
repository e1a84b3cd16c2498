"""Tests that commands in the docs refer to existing subcommands, models, make targets and files."""

import re
import shlex
from pathlib import Path

import pytest

from fgoffload import cli
from fgoffload.cli.shipped_models import find_model

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")), *sorted((ROOT / "examples").glob("**/*.md"))]
BASH_BLOCK = re.compile(r"^```(?:bash|sh|shell|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMANDS = ("help", *(command.NAME for command in cli.COMMANDS))
MAKE_TARGET = re.compile(r"^([a-z][a-z_-]*):", re.MULTILINE)


def read_commands(text):
    """Yield the words of each command in the bash blocks of `text`, without comments and prompts."""
    for block in BASH_BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words:
                yield words


def find_fault(words, *, root=ROOT):
    """Return why a command would fail, or None."""
    program = Path(words[0]).name
    if words[:3] == ["python", "-m", "fgoffload"]:
        words, program = words[2:], "fgoffload"
    if program == "make":
        targets = MAKE_TARGET.findall((root / "Makefile").read_text(encoding="utf-8"))
        missing = [word for word in words[1:] if "=" not in word and not word.startswith("-") and word not in targets]
        return f"make has no target {missing[0]!r}" if missing else None
    if program == "fgoffload" and len(words) > 1 and words[1] not in ("--help", "--version", *COMMANDS):
        return f"fgoffload has no command {words[1]!r}"
    if program == "fgoffload" and len(words) > 2 and words[2].isidentifier() and find_model(words[2]) is None:
        return f"there is no model {words[2]!r}"
    for word in words:
        if re.match(r"(?:\./)?(?:arguments|examples|tests|docs|\.ci)/", word) and not any(root.glob(word.removeprefix("./"))):
            return f"{word} does not exist"
    return None


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_command_in_the_docs_exists(page):
    commands = read_commands(page.read_text(encoding="utf-8"))
    assert [fault for words in commands if (fault := find_fault(words))] == []
