"""Offload in ms-swift, without a change to it.

    PLUGIN=$(python -c 'from fgoffload.integrations.ms_swift import PLUGIN; print(PLUGIN)')
    swift sft --external_plugins "$PLUGIN" ...

ms-swift puts the folder of a plugin first in `sys.path`, so this folder holds no module whose name another project has.
"""

from pathlib import Path

PLUGIN = str(Path(__file__).with_name("fgoffload_plugin.py"))
"""The file for `--external_plugins`."""
