"""Imports Megatron-Core, and hides warnings that users cannot fix."""

import contextlib
import importlib
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from fgoffload.errors import IntegrationError

CPU_OFFLOAD_V1 = "NVTE_CPU_OFFLOAD_V1"
"""Environment variable that Megatron's own offload engine needs. See docs/reference/environment.md."""

_EXPECTED_WARNINGS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "absl.logging is not installed",
    # Raised by the config, about defaults and Transformer Engine's layers.
    "full scope is deprecated",
    "If you are using transformer_engine",
    "moe_ffn_hidden_size is not set",
    # Megatron's own router and linear layers use deprecated calls.
    "Warning: tp_group is None",
    "MLP requires ffn_hidden_size",
    # Megatron-core 0.19 warns if a config is created before torch.distributed is initialized.
    "Could not determine rank from torch.distributed",
    "`torch.distributed.",
)
"""Prefixes of warnings in megatron-core 0.16.1 to 0.19 that no flag causes or prevents."""

_EXPECTED_LOGS = {
    # At import on a machine with a CUDA toolkit and no GPU.
    "torch.utils.cpp_extension": "No CUDA runtime is found",
    # Megatron-core 0.19 warns about the model class that training scripts use.
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
}
"""Prefixes of log lines that are also hidden, keyed by logger name."""

_DEVELOPER_WARNINGS = (DeprecationWarning, FutureWarning, SyntaxWarning)
"""Categories of warnings at import that only Megatron's developers can fix, for example about torch.jit.script."""


@contextlib.contextmanager
def ignore_expected_warnings() -> Iterator[None]:
    """Suppress warnings that Megatron-Core raises regardless of how it is used."""

    def accept(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(tuple(_EXPECTED_LOGS.values()))

    with warnings.catch_warnings(), contextlib.ExitStack() as undo:
        for start in _EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message=re.escape(start))
        for logger in map(logging.getLogger, _EXPECTED_LOGS):
            logger.addFilter(accept)
            undo.callback(logger.removeFilter, accept)
        yield


def require_torch() -> None:
    """Import torch, or raise an IntegrationError with the command that installs it."""
    try:
        importlib.import_module("torch")
    except (ImportError, OSError) as error:  # OSError: a shared library of torch is missing
        raise IntegrationError(
            f"torch cannot be imported: {error}. Install torch 2.9 or newer: pip install 'fgoffload[megatron]'."
        ) from error


def load_module(name: str) -> Any:
    """Import a module of Megatron-Core without warnings, or raise an IntegrationError.

    The return type is Any, because Megatron-Core ships no type information.
    """
    if (loaded := sys.modules.get(name)) is not None:
        return loaded  # every layer's forward calls this function, and changing warning filters is slow
    with ignore_expected_warnings():
        for category in _DEVELOPER_WARNINGS:
            warnings.simplefilter("ignore", category)
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            fix = "Install megatron-core 0.16.1 or newer: pip install 'fgoffload[megatron]'."
            if error.name and error.name != "megatron" and "." not in error.name:  # triton, since 0.18
                fix = f"Megatron-Core needs {error.name}: pip install {error.name}."
            raise IntegrationError(f"{name} cannot be imported: {error}. {fix}") from error
