"""Holds the one-way rule of imports, from the left to the right:

units, errors <- config, tags, plan, policy <- {engine, planner} <- {integrations, doctor} <- benchmark <- cli.
"""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

MAY_IMPORT = {
    "errors": (),
    "units": ("errors",),
    "policy": ("errors", "units"),
    "tags": ("errors", "units"),
    "plan": ("errors", "units", "tags", "policy"),
    "config": ("errors", "units", "tags", "policy", "plan"),
    "transfer_config": ("errors", "units", "policy"),
    "engine": ("errors", "units", "tags", "policy", "plan", "config", "engine"),
    "planner": ("errors", "units", "tags", "policy", "plan", "config", "planner"),
    "integrations": (
        "errors",
        "units",
        "tags",
        "policy",
        "plan",
        "config",
        "transfer_config",
        "engine",
        "planner",
        "integrations",
    ),
    "doctor": ("errors", "units", "engine", "doctor"),
    "benchmark": (
        "errors",
        "units",
        "tags",
        "policy",
        "plan",
        "config",
        "engine",
        "planner",
        "integrations",
        "doctor",
        "benchmark",
    ),
    "cli": (
        "errors",
        "units",
        "tags",
        "policy",
        "plan",
        "config",
        "engine",
        "planner",
        "integrations",
        "doctor",
        "benchmark",
        "cli",
        "__init__",
    ),
    "__init__": ("errors", "units", "tags", "policy", "plan", "config", "transfer_config", "integrations"),
    "__main__": ("cli",),
}
"""By part of the package: the parts that it may import."""

FRAMEWORKS = ("megatron", "transformer_engine", "transformers")
FRAMEWORK_PARTS = ("integrations",)
TORCH_PARTS = ("engine", "integrations", "doctor", "benchmark", "cli")


@dataclasses.dataclass(frozen=True)
class Import:
    line: int
    name: str
    """Dotted, absolute."""


def find_violations(source: str, module: str) -> list[str]:
    """Return one line for each import in `source` that `module`, as in `fgoffload.engine.group`, must not have."""
    part = get_part(module)
    if part not in MAY_IMPORT:
        return [f"{module}: part {part!r} has no rule; add it to MAY_IMPORT"]
    return [
        f"{module}:{found.line} imports {found.name}" for found in read_imports(source, module) if not is_allowed(part, found)
    ]


def is_allowed(part: str, found: Import) -> bool:
    root = found.name.split(".")[0]
    if root == "fgoffload":
        return get_part(found.name) in MAY_IMPORT[part]
    if root == "torch":
        return part in TORCH_PARTS
    return root not in FRAMEWORKS or part in FRAMEWORK_PARTS


def get_part(module: str) -> str:
    names = module.split(".")
    return names[1] if len(names) > 1 else "__init__"


def read_imports(source: str, module: str) -> Iterator[Import]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: -node.level]
                base = ".".join([*parents, base] if base else parents)
            if base == "fgoffload":
                # `from fgoffload import engine` imports the part, `from fgoffload import OffloadConfig` the package.
                yield from (
                    Import(node.lineno, f"fgoffload.{alias.name}" if alias.name in MAY_IMPORT else base) for alias in node.names
                )
            else:
                yield Import(node.lineno, base)


def find_modules(package: Path) -> Iterator[tuple[Path, str]]:
    """Yield each source file under `package` with its dotted module name; a package's own file counts as `__init__`."""
    for path in sorted(package.rglob("*.py")):
        yield path, ".".join(path.relative_to(package.parent).with_suffix("").parts)


PACKAGE = Path(__file__).parents[2] / "fgoffload"
FILES = list(find_modules(PACKAGE))
MODULES = [module for _, module in FILES]


@pytest.mark.parametrize(("path", "module"), FILES, ids=MODULES)
def test_a_module_imports_only_what_lies_below_it(path, module):
    assert find_violations(path.read_text(encoding="utf-8"), module) == []


def test_the_rule_reads_the_modules_of_every_part_that_has_a_folder():
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert {get_part(module) for module in MODULES} >= folders | {"__init__", "config", "errors"}


@pytest.mark.parametrize(
    ("module", "line", "name"),
    [
        ("fgoffload.units", "from fgoffload.config import OffloadConfig", "fgoffload.config"),
        ("fgoffload.config", "import torch", "torch"),
        ("fgoffload.plan", "import torch.nn as nn", "torch.nn"),
        ("fgoffload.engine.group", "from fgoffload.planner.solving.solver import solve", "fgoffload.planner.solving.solver"),
        ("fgoffload.engine.group", "from fgoffload import planner", "fgoffload.planner"),
        ("fgoffload.engine.group", "from fgoffload import OffloadConfig", "fgoffload"),
        ("fgoffload.engine.group", "from ..planner import solver", "fgoffload.planner"),
        ("fgoffload.engine.group", "from .. import planner", "fgoffload.planner"),
        ("fgoffload.planner.solving.solver", "import fgoffload.engine", "fgoffload.engine"),
        ("fgoffload.engine.group", "import megatron.core", "megatron.core"),
        ("fgoffload.cli.train", "from megatron.core import parallel_state", "megatron.core"),
        ("fgoffload.engine.group", "import transformer_engine", "transformer_engine"),
        ("fgoffload.planner.solving.solver", "from transformers import AutoConfig", "transformers"),
        ("fgoffload.integrations.megatron.sites", "from fgoffload.cli import main", "fgoffload.cli"),
        ("fgoffload.doctor.attention", "import transformer_engine", "transformer_engine"),
        ("fgoffload.benchmark.runner", "import megatron.core", "megatron.core"),
        ("fgoffload.benchmark.runner", "from fgoffload.cli import report", "fgoffload.cli"),
        ("fgoffload.integrations.megatron.training", "import fgoffload.benchmark", "fgoffload.benchmark"),
        ("fgoffload.doctor.host", "from fgoffload.integrations.megatron import apply", "fgoffload.integrations.megatron"),
        ("fgoffload.engine.arena", "from fgoffload.doctor import Machine", "fgoffload.doctor"),
        ("fgoffload.tags", "def f():\n    import torch", "torch"),
        ("fgoffload.tags", "try:\n    import torch\nexcept ImportError:\n    pass", "torch"),
    ],
)
def test_an_import_that_goes_the_wrong_way_is_found(module, line, name):
    number = line[: line.index("import")].count("\n") + 1
    assert find_violations(line, module) == [f"{module}:{number} imports {name}"]


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("fgoffload.config", "from fgoffload.tags import Tag"),
        ("fgoffload.engine.group", "import torch\nfrom fgoffload.policy import TransferPolicy"),
        ("fgoffload.engine.group", "from fgoffload.engine.arena import Arena\nfrom . import arena"),
        ("fgoffload.integrations.megatron.sites", "import megatron.core\nfrom fgoffload.engine import OffloadEngine"),
        ("fgoffload.cli.train", "import torch\nfrom fgoffload.integrations.megatron import data\nimport fgoffload"),
        ("fgoffload.engine.group", "import transformers_of_mine, torchlike"),
    ],
)
def test_an_import_that_goes_the_right_way_is_allowed(module, line):
    assert find_violations(line, module) == []


def test_a_part_without_a_rule_is_found():
    assert find_violations("", "fgoffload.extra") == ["fgoffload.extra: part 'extra' has no rule; add it to MAY_IMPORT"]
