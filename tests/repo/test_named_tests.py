"""Tests that all tests cited in the docs exist, and that each fault has a test."""

import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")), *sorted((ROOT / "examples").glob("**/*.md"))]
FAULTS = ROOT / "docs" / "concepts" / "faults.md"
ENGINE_TESTS = ROOT / "tests" / "unit" / "engine"
FAULT_TESTS = ENGINE_TESTS / "test_faults_of_others.py"
CITED_NAME = re.compile(r"(?<![\w/])(?:[\w.]+/)*test_\w+(?:\.py)?\b")
FUNCTION = re.compile(r"^ *def (test_\w+)\(", re.MULTILINE)


def read(page):
    return page.read_text(encoding="utf-8")


def list_functions(paths: Iterable[Path]) -> list[str]:
    """Return the names of the tests in `paths`, in order."""
    return [name for path in paths for name in FUNCTION.findall(read(path))]


@functools.cache
def find_tests() -> tuple[set[str], set[str]]:
    """Return the names of all test files and of all tests."""
    files = sorted((ROOT / "tests").glob("**/test_*.py"))
    return {path.name for path in files}, set(list_functions(files))


def find_missing(text: str) -> Iterator[str]:
    """Yield the name of each missing test or test file in `text`."""
    files, functions = find_tests()
    for name in CITED_NAME.findall(text):
        if not name.endswith(".py"):
            exists = name in functions
        elif "tests/" in name:
            exists = (ROOT / name[name.index("tests/") :]).is_file()
        else:
            exists = Path(name).name in files
        if not exists:
            yield name


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_test_cited_in_the_docs_exists(page):
    assert list(find_missing(read(page))) == []


def test_faults_in_the_docs_match_their_tests_in_order():
    rows = re.findall(r"^\| (\d+) \|(?:[^|\n]*\|){2} `(\w+)` \|", read(FAULTS), re.MULTILINE)
    functions = [name for name in list_functions([FAULT_TESTS]) if re.match(r"test_fault_\d\d_", name)]
    assert [name for _, name in rows] == functions
    assert [int(number) for number, _ in rows] == [int(name.split("_")[2]) for name in functions] == list(range(1, 24))
    assert read(FAULTS).count("test_fault_") == len(rows)
