"""Tests word limits and relative links of pages. Words are separated by whitespace, and tables and code count."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("**/*.md"))
USER_PAGES = [ROOT / "docs" / "index.md", ROOT / "docs" / "quickstart.md", *sorted((ROOT / "docs" / "how_to").glob("*.md"))]
LINKED = [*sorted(ROOT.glob("*.md")), *DOCS, ROOT / "arguments" / "README.md", *sorted((ROOT / "examples").glob("**/*.md"))]
CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
DOCS_PATH = re.compile(r"\bdocs/[\w./-]*\w")
SOURCES = [path for part in ("fgoffload", "tests", "examples", "arguments") for path in sorted((ROOT / part).glob("**/*.*"))]


def count_words(path):
    return len(path.read_text(encoding="utf-8").split())


def list_anchors(path):
    """Return the anchors that GitHub creates for a page's headings."""
    headings = HEADING.findall(CODE_BLOCK.sub("", path.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def find_broken(page):
    """Yield each relative link of a page to a missing file or heading."""
    for link in LINK.findall(CODE_BLOCK.sub("", page.read_text(encoding="utf-8"))):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in list_anchors(target)):
            yield link


def test_the_readme_has_fewer_than_700_words():
    assert count_words(ROOT / "README.md") < 700


def test_the_docs_have_fewer_than_30000_words():
    assert sum(map(count_words, DOCS)) < 30_000


def test_the_decisions_have_at_most_2500_words():
    assert count_words(ROOT / "docs" / "decisions.md") <= 2_500


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda page: page.name)
def test_a_user_page_has_fewer_than_800_words(page):
    assert count_words(page) < 800


@pytest.mark.parametrize("page", LINKED, ids=[str(page.relative_to(ROOT)) for page in LINKED])
def test_every_relative_link_of_a_page_resolves(page):
    assert list(find_broken(page)) == []


def test_the_index_links_every_page():
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in LINK.findall(index.read_text(encoding="utf-8"))}
    assert [page.name for page in DOCS if page != index and page.resolve() not in linked] == []


def test_every_page_mentioned_in_the_code_exists():
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES if path.suffix in (".py", ".sh")}
    named = {(path.name, name) for path, text in texts.items() for name in DOCS_PATH.findall(text)}
    assert len(named) > 20
    assert [(path, name) for path, name in sorted(named) if not (ROOT / name).exists()] == []
