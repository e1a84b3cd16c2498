"""Adds `OffloadCallback` to each `Trainer` of an unchanged script.

This module does not import transformers, so that scripts without a trainer do not wait for that import.
"""

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

_MODULE = "transformers.trainer"


@contextlib.contextmanager
def offload_trainers(memory: str | int | None = None) -> Iterator[list[str]]:
    """Add an `OffloadCallback` to every trainer created in the `with` block. Yield a list that collects their class names."""
    made: list[str] = []

    def patch(module: ModuleType) -> None:
        original = module.Trainer.__init__

        @functools.wraps(original)
        def make(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            _add_callback(self, made, memory)

        module.Trainer.__init__ = make

    finder = _Finder(patch)
    if _MODULE in sys.modules:
        patch(sys.modules[_MODULE])
    sys.meta_path.insert(0, finder)
    try:
        yield made
    finally:
        sys.meta_path.remove(finder)
        if _MODULE in sys.modules:
            trainer = sys.modules[_MODULE].Trainer
            trainer.__init__ = trainer.__init__.__wrapped__


def _add_callback(trainer: Any, made: list[str], memory: str | int | None) -> None:
    from fgoffload.integrations.transformers.callback import OffloadCallback

    name = type(trainer).__name__
    is_first = name not in made and trainer.is_world_process_zero()
    made.append(name)
    if any(isinstance(callback, OffloadCallback) for callback in trainer.callback_handler.callbacks):
        if memory is not None and is_first:
            logger.warning(
                "The script's %s has its own OffloadCallback, so --offload-memory-budget does not apply to it.", name
            )
        return
    OffloadCallback(memory=memory).add_to(trainer)
    if is_first:
        logger.info("Activation offload: OffloadCallback was added to the script's %s.", name)


class _Finder(importlib.abc.MetaPathFinder):
    """Import hook that calls `patch` with the trainer's module after the module is imported."""

    def __init__(self, patch: Callable[[ModuleType], None]) -> None:
        self._patch = patch

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of the trainer's module, or None for other modules."""
        if name != _MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_patch(module: ModuleType) -> None:
                load(module)
                self._patch(module)

            spec.loader.exec_module = load_and_patch  # type: ignore[method-assign]
        return spec
