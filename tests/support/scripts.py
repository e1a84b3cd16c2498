"""Loads the scripts of `examples/benchmarks` as modules."""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parents[2] / "examples" / "benchmarks"


@contextlib.contextmanager
def load_script(name: str) -> Iterator[ModuleType]:
    """Load the script `name` as a module. Inside the context, it and its neighbours can be imported by name."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(BENCHMARKS))
        del sys.modules[name]
