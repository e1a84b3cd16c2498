"""Offload for ms-swift, as an external plugin.

    PLUGIN=$(python -c 'from fgoffload.integrations.ms_swift import PLUGIN; print(PLUGIN)')
    swift sft --external_plugins "$PLUGIN" ...

ms-swift puts the folder of a plugin first in `sys.path`, so no module in this folder has the name of another project's module.
"""

from pathlib import Path

PLUGIN = str(Path(__file__).with_name("fgoffload_plugin.py"))
"""Path for `--external_plugins`."""
