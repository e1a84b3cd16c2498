"""Replaces a function of another project, wherever that project has imported it."""

import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any

from fgoffload.errors import IntegrationError

logger = logging.getLogger(__name__)


def replace_function(path: str, function: Callable[..., Any], *, versions: str) -> None:
    """Replace the function at `path` with `function`, in its own module and wherever its project has imported it.

    `path` is a dotted name, as in `verl.utils.activation_offload.enable_activation_offloading`. Later imports get `function`
    too. A second call does nothing. `versions` are the project's versions that contain the function, for the error message.

    Raises:
        IntegrationError: The function does not exist.
    """
    module_path, _, name = path.rpartition(".")
    package = path.split(".")[0]
    try:
        original = getattr(importlib.import_module(module_path), name)
    except (ImportError, AttributeError) as error:
        raise IntegrationError(f"Cannot find {path}: {error}. Install {package} {versions}.") from error
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] == package and vars(module).get(name) is original:
            setattr(module, name, function)
    logger.info("fgoffload replaces %s.", path)
