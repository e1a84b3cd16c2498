"""Tests that files are written atomically."""

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
    """Limit files to 10 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_keeps_the_old_file_and_leaves_no_other(tmp_path):
    path = tmp_path / "plan.json"
    write_file(path, "older")
    with full_disk(), pytest.raises(OSError, match="File too large"):
        write_file(path, "x" * 100)
    assert path.read_text() == "older"
    assert list(tmp_path.iterdir()) == [path]


def test_an_exception_in_the_body_keeps_the_old_file(tmp_path):
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


def test_the_package_writes_files_only_atomically():
    writes = re.compile(r"""\.write_(text|bytes)\(|savefig\(|export_chrome_trace\(|json\.dump\(|open\(.*["'][wax]b?["']""")
    found = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if writes.search(line) and "partial" not in line
    ]
    assert found == []


def test_symlinks_and_file_modes_are_preserved(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("older")
    target.chmod(0o640)
    link.symlink_to(target)
    write_file(link, "newer")
    assert (link.is_symlink(), target.read_text(), stat.S_IMODE(target.stat().st_mode)) == (True, "newer", 0o640)


def test_a_special_file_is_written_in_place(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_file(pipe, "x")
    assert os.read(reader, 2) == b"x"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_check_writable_raises_like_a_write_and_leaves_no_file(tmp_path):
    check_writable(tmp_path / "plan.json")
    with pytest.raises(FileNotFoundError):
        check_writable(tmp_path / "none" / "plan.json")
    assert list(tmp_path.iterdir()) == []
