"""Files of the command line stay short enough to be read as a whole."""

from pathlib import Path

import pytest

MOST_LINES = 400
CLI = Path(__file__).parents[2] / "fgoffload" / "cli"


@pytest.mark.parametrize("path", sorted(CLI.glob("*.py")), ids=lambda path: path.name)
def test_no_file_of_the_command_line_has_more_lines_than_people_read(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES
