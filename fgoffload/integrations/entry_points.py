"""Puts a function of ours in place of another project's, wherever that project has imported it."""

import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any

from fgoffload.errors import IntegrationError

logger = logging.getLogger(__name__)


def replace_function(path: str, function: Callable[..., Any], *, versions: str) -> None:
    """Put `function` in place of the one at `path`, in its module and in modules of that project that have imported its name.

    Modules that import it later get ours. A second call does no harm.

    Args:
        path: Dotted, as in `verl.utils.activation_offload.enable_activation_offloading`.
        function: Takes what the original takes.
        versions: Of the project, in which `path` was found.

    Raises:
        IntegrationError: There is no such function.
    """
    module_path, _, name = path.rpartition(".")
    package = path.split(".")[0]
    try:
        original = getattr(importlib.import_module(module_path), name)
    except (ImportError, AttributeError) as error:
        raise IntegrationError(f"{path} does not exist here. It was found in {package} {versions}: {error}") from error
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] == package and vars(module).get(name) is original:
            setattr(module, name, function)
    logger.info("fgoffload takes the place of %s.", path)
