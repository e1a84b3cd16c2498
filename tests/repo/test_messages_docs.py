"""Tests that the page on messages quotes only messages in the code."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
QUOTED = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)


def list_strings():
    """Return every string constant of the package, including parts of f-strings."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "fgoffload").glob("**/*.py")]
    nodes = (node for tree in trees for node in ast.walk(tree))
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def test_every_message_on_the_page_is_in_the_code():
    quoted = QUOTED.findall((ROOT / "docs" / "reference" / "messages.md").read_text(encoding="utf-8"))
    strings = list_strings()
    assert len(quoted) >= 20
    assert [text for text in quoted if not any(text in string for string in strings)] == []
