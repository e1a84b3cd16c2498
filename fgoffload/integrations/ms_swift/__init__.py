"""Offload for ms-swift, as an external plugin.

    PLUGIN=$(python -c 'from fgoffload.integrations.ms_swift import PLUGIN; print(PLUGIN)')
    swift sft --external_plugins "$PLUGIN" ...

ms-swift prepends a plugin's folder to `sys.path`, so no file in this folder may have the name of another module.
"""

from pathlib import Path

PLUGIN = str(Path(__file__).with_name("fgoffload_plugin.py"))
"""Path for `--external_plugins`."""
