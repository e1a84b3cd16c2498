"""Tests the one-way rule of imports. Parts import only from parts to their left:

units, errors, environment, output_files <- text_files, config, tags, plan, memory_tiers, transfer_schedule <- {engine, planner}
    <- {integrations, doctor} <- trainer <- benchmark <- cli.

Within the planner: ranks <- {model <- operations <- memory <- timing <- model_ranks, simulation <- solving} <-
{profiled_ranks, planning}.
"""

import ast
import dataclasses
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

BELOW_ENGINE = ("errors", "units", "defaults", "tags", "memory_tiers", "transfer_schedule", "transfer_config", "plan", "config")
ABOVE_ENGINE = (*BELOW_ENGINE, "environment", "engine", "planner", "integrations")
MAY_IMPORT = {
    "errors": (),
    "units": ("errors",),
    "defaults": ("units",),
    "output_files": (),
    "text_files": ("errors", "units"),
    "memory_tiers": (),
    "transfer_schedule": ("errors", "units", "defaults", "memory_tiers"),
    "tags": ("errors", "units"),
    "watched": (),
    "cuda_graphs": ("tags",),
    "environment": (),
    "plan": ("errors", "units", "text_files", "tags", "transfer_schedule"),
    "config": ("errors", "units", "defaults", "tags", "transfer_schedule", "plan"),
    "transfer_config": ("errors", "units", "defaults", "transfer_schedule"),
    "engine": (*BELOW_ENGINE, "engine"),
    "planner": (*BELOW_ENGINE, "output_files", "text_files", "watched", "cuda_graphs", "planner"),
    "integrations": (*ABOVE_ENGINE, "text_files", "watched", "cuda_graphs"),
    "doctor": ("errors", "units", "engine", "doctor"),
    "trainer": (*ABOVE_ENGINE, "cuda_graphs", "trainer"),
    "benchmark": (*ABOVE_ENGINE, "output_files", "doctor", "trainer", "benchmark"),
    "cli": (*ABOVE_ENGINE, "cuda_graphs", "output_files", "text_files", "doctor", "trainer", "benchmark", "cli", "__init__"),
    "__init__": (*BELOW_ENGINE, "integrations"),
    "__main__": ("cli",),
}
"""The parts that each part of the package may import."""

PLANNER_MAY_IMPORT = {
    "checks": (),
    "host_overhead": ("ranks", "timing", "simulation"),
    "tried_plan": (),
    "ranks": ("checks", "ranks"),
    "model": ("checks", "ranks", "model"),
    "operations": ("checks", "model", "operations"),
    "memory": ("checks", "ranks", "model", "operations", "memory"),
    "timing": ("checks", "ranks", "model", "operations", "memory", "timing"),
    "model_ranks": ("checks", "ranks", "model", "operations", "memory", "timing"),
    "simulation": ("checks", "ranks", "simulation"),
    "solving": ("checks", "ranks", "simulation", "solving"),
    "training_facts": ("model",),
    "profiled_ranks": ("ranks", "timing", "simulation", "host_overhead"),
    "entry": ("checks", "ranks", "model", "timing", "model_ranks", "training_facts", "simulation", "solving"),
    "__init__": ("model", "timing", "model_ranks", "entry"),
}
"""The parts that each part of the planner may import. Simulator and solver are independent of models and devices."""

RULES = {"fgoffload": MAY_IMPORT, "fgoffload.planner": PLANNER_MAY_IMPORT}
"""The rules of each package. A part is a folder or a file of the package."""

FRAMEWORKS = ("megatron", "swift", "transformer_engine", "transformers", "trl", "verl")
FRAMEWORK_PARTS = ("integrations",)
TORCH_PARTS = ("engine", "integrations", "doctor", "trainer", "benchmark", "cli")


@dataclasses.dataclass(frozen=True)
class Import:
    line: int
    name: str
    """The absolute dotted name."""


def find_violations(source: str, module: str) -> list[str]:
    """Return one line for each forbidden import in the `source` of `module`, such as `fgoffload.engine.group`."""
    for package, may_import in RULES.items():
        if is_inside(module, package) and get_part(module, package) not in may_import:
            return [f"{module}: part {get_part(module, package)!r} of {package} has no rule; add it to RULES"]
    return [
        f"{module}:{found.line} imports {found.name}" for found in read_imports(source, module) if not is_allowed(module, found)
    ]


def is_allowed(module: str, found: Import) -> bool:
    part, root = get_part(module, "fgoffload"), found.name.split(".")[0]
    if root == "fgoffload":
        return all(
            get_part(found.name, package) in may_import[get_part(module, package)]
            for package, may_import in RULES.items()
            if is_inside(module, package) and is_inside(found.name, package)
        )
    if root == "torch":
        return part in TORCH_PARTS
    return root not in FRAMEWORKS or part in FRAMEWORK_PARTS


def is_inside(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def get_part(module: str, package: str) -> str:
    below = module[len(package) + 1 :]
    return below.split(".")[0] or "__init__"


def read_imports(source: str, module: str) -> Iterator[Import]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: -node.level]
                base = ".".join([*parents, base] if base else parents)
            # `from fgoffload import engine` imports the part, `from fgoffload import OffloadConfig` the package.
            parts = RULES.get(base, {})
            yield from (
                Import(node.lineno, name)
                for name in dict.fromkeys(f"{base}.{alias.name}" if alias.name in parts else base for alias in node.names)
            )


def find_modules(package: Path) -> Iterator[tuple[Path, str]]:
    """Yield each source file under `package` with its dotted module name, which ends in `__init__` for a package."""
    for path in sorted(package.rglob("*.py")):
        yield path, ".".join(path.relative_to(package.parent).with_suffix("").parts)


PACKAGE = Path(__file__).parents[2] / "fgoffload"
FILES = list(find_modules(PACKAGE))
MODULES = [module for _, module in FILES]


def test_modules_import_only_lower_layers():
    assert [line for path, module in FILES for line in find_violations(path.read_text(encoding="utf-8"), module)] == []


@pytest.mark.parametrize("package", RULES)
def test_rules_cover_exactly_the_parts_of_each_package(package):
    assert {get_part(module, package) for module in MODULES if is_inside(module, package)} == RULES[package].keys()


@pytest.mark.parametrize("package", RULES)
def test_rules_have_no_cycles(package):
    graphlib.TopologicalSorter({part: set(below) - {part} for part, below in RULES[package].items()}).prepare()


def test_module_imports_have_no_cycles():
    names = {module.removesuffix(".__init__"): path for path, module in FILES}
    imports = {name: set() for name in names}
    for name, path in names.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                found = {f"{node.module}.{alias.name}" for alias in node.names}
                imports[name] |= {one if one in names else node.module for one in found} & names.keys()
    graphlib.TopologicalSorter(imports).prepare()  # includes imports for type checking and inside functions


def test_private_names_of_torch_are_used_in_one_file():
    private = re.compile(r"\btorch\.(\w+\.)*_[a-zA-Z]\w*")
    users = {path.name for path, _ in FILES for _ in private.finditer(path.read_text(encoding="utf-8"))}
    assert users == {"torch_internals.py"}
