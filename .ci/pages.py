"""Generates reference tables from code, and prepares the pages for MkDocs.

    python .ci/pages.py    # writes the tables

`make docs` loads this file as an MkDocs hook, and fails if a table differs from the code.
"""

import ast
import dataclasses
import os
import posixpath
import re
import sys
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fgoffload
from fgoffload.cli import COMMANDS, format_helps
from fgoffload.planner.timing.hardware import HARDWARE
from fgoffload.units import format_bytes

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
GENERATED = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
ARGUMENT = re.compile(r"^        (\w+): (.*(?:\n {12}.*)*)", re.MULTILINE)
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
FLAG_VALUES = {
    "offload_modules": " TAG ...",
    "min_offloaded_tensor_size": " ELEMENTS",
    "activation_offload_fraction": " FRACTION",
    "delta_offload_bytes_across_pp_ranks": " BYTES",
    "offload_plan": " FILE",
}


def describe_fields(kind: type) -> Iterator[tuple[str, str, str]]:
    """Yield the name, meaning and default of each field of a dataclass. Meanings are from its docstring."""
    meanings = {name: " ".join(text.split()) for name, text in ARGUMENT.findall(kind.__doc__ or "")}
    for field in dataclasses.fields(kind):
        yield field.name, meanings[field.name], "" if field.default is dataclasses.MISSING else _show(field.name, field.default)


def _show(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and name.endswith("_bytes"):
        return format_bytes(value).replace(".00", "")
    return str(getattr(value, "value", value))


def write_flags() -> Iterator[str]:
    """Yield the rows of the table of Megatron flags."""
    yield "| flag | meaning | default |\n|---|---|---|\n"
    for name, meaning, default in describe_fields(fgoffload.OffloadConfig):
        if name != "tags":
            value = " SIZE" if name.endswith("_bytes") else FLAG_VALUES.get(name, "")
            flag = "--" + name.removesuffix("_bytes").replace("_", "-") + value
            yield f"| `{flag}` | {meaning.replace('_bytes`', '`')} | {default} |\n"


def write_transfer_config() -> Iterator[str]:
    """Yield the rows of the table of `TransferConfig` fields."""
    yield "| field | meaning | default |\n|---|---|---|\n"
    for name, meaning, default in describe_fields(fgoffload.TransferConfig):
        yield f"| `{name}` | {meaning} | {default} |\n"


def write_tag_stats() -> Iterator[str]:
    """Yield the rows of the table of `TagStats` fields. Parses the file, since importing the engine needs torch."""
    tree = ast.parse((ROOT / "fgoffload" / "engine" / "stats.py").read_text(encoding="utf-8"))
    (kind,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TagStats")
    yield "| field of a tag | meaning |\n|---|---|\n"
    for field, text in zip(kind.body, kind.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            yield f"| `{ast.unparse(field.target)}` | {' '.join(ast.literal_eval(text.value).split())} |\n"


def write_hardware() -> Iterator[str]:
    """Yield the rows of the hardware table."""
    yield "| `--gpu` | memory, GiB | memory, TB/s | bf16, TFLOP/s |\n|---|---|---|---|\n"

    def rate(value: float | None, unit: float) -> str:
        return "not public" if value is None else f"{value / unit:.5g}"

    for name, hardware in HARDWARE.items():
        cells = (
            rate(hardware.device_memory_bytes, 2**30),
            rate(hardware.device_memory_bytes_per_s, 1e12),
            rate(hardware.bf16_flop_per_s, 1e12),
        )
        yield f"| `{name}` | {' | '.join(cells)} |\n"


def write_commands() -> Iterator[str]:
    """Yield a section with the help text of each command."""
    with unittest.mock.patch.dict(os.environ, COLUMNS="80"):
        helps = format_helps()
    for command in COMMANDS:
        yield f"## fgoffload {command.NAME}\n\n```\n{helps[command.NAME]}```\n\n"


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "flags": write_flags,
    "transfer_config": write_transfer_config,
    "tag_stats": write_tag_stats,
    "hardware": write_hardware,
    "commands": write_commands,
}


def generate(text: str) -> str:
    """Return a page with regenerated tables."""
    return GENERATED.sub(lambda found: f"{found[1]}{''.join(TABLES[found[2]]())}{found[3]}", text)


def find_stale() -> dict[Path, str]:
    """Return the expected text of each page that is out of date."""
    pages = {path: path.read_text(encoding="utf-8") for path in REFERENCE.glob("*.md")}
    return {path: wanted for path, text in pages.items() if (wanted := generate(text)) != text}


def on_pre_build(config: "MkDocsConfig") -> None:
    """Raise an error if the tables of a page differ from the code."""
    from mkdocs.exceptions import PluginError

    if stale := find_stale():
        raise PluginError(f"{', '.join(path.name for path in stale)} differ from the code. Run: make pages")


def on_files(files: "Files", config: "MkDocsConfig") -> None:
    """Add the images, which are outside the docs folder."""
    from mkdocs.structure.files import File

    for path in sorted((ROOT / "images").iterdir()):
        files.append(File.generated(config, f"images/{path.name}", abs_src_path=str(path)))


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Redirect links to images, and links to files outside docs or to folders, which the site lacks."""
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")

    def redirect(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[2]))
        if "://" in found[2] or (target.startswith("docs/") and not (ROOT / target).is_dir()):
            return found[0]
        if target.startswith("images/"):
            return f"{found[1]}{posixpath.relpath(f'docs/{target}', folder)}{found[4]}"
        return f"{found[1]}{config.repo_url}/blob/main/{target}{found[3] or ''}{found[4]}"

    return LINK.sub(redirect, markdown)


if __name__ == "__main__":
    for page_path, page_text in find_stale().items():
        page_path.write_text(page_text, encoding="utf-8")
        sys.stdout.write(f"{page_path.relative_to(ROOT)}\n")
