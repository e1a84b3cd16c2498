"""Tests that files are written completely or not at all."""

import contextlib
import os
import re
import resource
import stat
from pathlib import Path

import pytest

from fgoffload.output_files import check_writable, replacing, write_file

PACKAGE = Path(__file__).parents[2] / "fgoffload"


@contextlib.contextmanager
def full_disk():
    """Let the system refuse to write more than 10 bytes to a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_older_file_and_nothing_else(tmp_path):
    path = tmp_path / "plan.json"
    write_file(path, "older")
    with full_disk(), pytest.raises(OSError, match="File too large"):
        write_file(path, "x" * 100)
    assert path.read_text() == "older"
    assert list(tmp_path.iterdir()) == [path]


def test_a_body_that_raises_leaves_the_older_file(tmp_path):
    def fail(partial):
        assert partial.suffix == ".png"
        partial.write_text("half")
        raise KeyboardInterrupt

    path = tmp_path / "plot.png"
    path.write_text("older")
    with pytest.raises(KeyboardInterrupt), replacing(path) as partial:
        fail(partial)
    assert path.read_text() == "older"
    assert list(tmp_path.iterdir()) == [path]


def test_every_file_of_the_package_is_written_that_way():
    writes = re.compile(r"""\.write_(text|bytes)\(|savefig\(|export_chrome_trace\(|json\.dump\(|open\(.*["'][wax]b?["']""")
    found = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if writes.search(line) and "partial" not in line
    ]
    assert found == []


def test_a_link_stays_one_and_a_file_keeps_its_mode(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("older")
    target.chmod(0o640)
    link.symlink_to(target)
    write_file(link, "newer")
    assert (link.is_symlink(), target.read_text(), stat.S_IMODE(target.stat().st_mode)) == (True, "newer", 0o640)


def test_a_special_file_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_file(pipe, "x")
    assert os.read(reader, 2) == b"x"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_check_leaves_no_file_and_says_what_writing_would(tmp_path):
    check_writable(tmp_path / "plan.json")
    with pytest.raises(FileNotFoundError):
        check_writable(tmp_path / "none" / "plan.json")
    assert list(tmp_path.iterdir()) == []
