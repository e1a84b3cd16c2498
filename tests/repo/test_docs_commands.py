import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")), *sorted((ROOT / "examples").glob("**/*.md"))]
BASH_BLOCK = re.compile(r"^```(?:bash|sh|shell|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMANDS = ("train", "run", "plan", "profile", "bench", "doctor")
MAKE_TARGET = re.compile(r"^([a-z][a-z_-]*):", re.MULTILINE)


def read_commands(text):
    """Yield each command of the fenced bash blocks in `text` as its words, without comments and prompts."""
    for block in BASH_BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words:
                yield words


def find_fault(words, *, root=ROOT):
    """Return why the command cannot be what a reader should type, or None."""
    program = Path(words[0]).name
    if words[:3] == ["python", "-m", "fgoffload"]:
        words, program = words[2:], "fgoffload"
    if program == "make":
        targets = MAKE_TARGET.findall((root / "Makefile").read_text(encoding="utf-8"))
        missing = [word for word in words[1:] if "=" not in word and not word.startswith("-") and word not in targets]
        return f"make has no target {missing[0]!r}" if missing else None
    if program == "fgoffload" and len(words) > 1 and words[1] not in ("--help", "--version", *COMMANDS):
        return f"fgoffload has no command {words[1]!r}"
    for word in words:
        if re.match(r"(?:\./)?(?:arguments|examples|tests|docs|\.ci)/", word) and not any(root.glob(word.removeprefix("./"))):
            return f"{word} does not exist"
    return None


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_command_of_a_page_exists(page):
    commands = read_commands(page.read_text(encoding="utf-8"))
    assert [fault for words in commands if (fault := find_fault(words))] == []


def test_the_commands_that_this_check_knows_are_those_of_the_help():
    shown = subprocess.run([sys.executable, "-m", "fgoffload", "--help"], capture_output=True, text=True, check=True).stdout
    listed = shown.split("COMMAND\n")[1]
    assert tuple(re.findall(r"^    (\w+)", listed, re.MULTILINE)) == COMMANDS


def test_the_readme_shows_how_to_train_and_how_to_test():
    commands = list(read_commands((ROOT / "README.md").read_text(encoding="utf-8")))
    assert ["make", "train"] in [words[:2] for words in commands]
    assert ["make", "test"] in [words[:2] for words in commands]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("make tarin", "make has no target 'tarin'"),
        ("make train DATA=x STEPS=3 tset", "make has no target 'tset'"),
        ("fgoffload trian arguments/x.sh", "fgoffload has no command 'trian'"),
        ("python -m fgoffload planner", "fgoffload has no command 'planner'"),
        ("A=1 fgoffload train arguments/none.sh", "arguments/none.sh does not exist"),
        ("python examples/none.py  # an example", "examples/none.py does not exist"),
        ("fgoffload bench arguments/tiny_moe.sh --plans examples/none/*.json", "examples/none/*.json does not exist"),
        ("torchrun --nproc-per-node 2 \\\n  examples/none.py", "examples/none.py does not exist"),
    ],
)
def test_a_command_that_does_not_exist_is_found(line, fault):
    assert [find_fault(words) for words in read_commands(f"Text.\n```bash\n{line}\n```\n")] == [fault]


def test_commands_that_exist_and_text_that_is_no_command_pass():
    page = "```bash\n# a comment\nmake train DATA=my.txt\n$ fgoffload --help\n./.ci/run\n```\n```python\nmake tarin\n```\n"
    commands = list(read_commands(page))
    assert len(commands) == 3
    assert [find_fault(words) for words in commands] == [None, None, None]
