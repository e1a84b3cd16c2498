"""`fgoffload completion`: a script with which bash or zsh completes commands, flags and model names."""

import argparse
from collections.abc import Mapping, Sequence

from fgoffload.cli.shipped_models import list_models
from fgoffload.errors import ConfigError

NAME = "completion"
SUMMARY = "print a completion script for bash or zsh"
DESCRIPTION = "Prints a script with which your shell completes commands, flags and model names."
USAGE = "fgoffload completion bash|zsh"
EXAMPLE = "fgoffload completion bash"
NOTES = "Add this to ~/.bashrc: source <(fgoffload completion bash)"

SHELLS: Mapping[str, str] = {"bash": "", "zsh": "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n"}
"""Supported shells, with the commands that must run first: zsh loads bash's completion functions."""

_SCRIPT = """\
_fgoffload() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} words=
    if ((COMP_CWORD == 1)); then
        words='{commands}'
    else
        case ${{COMP_WORDS[1]}} in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -f -W "$words" -- "$current"))
}}
complete -o filenames -F _fgoffload fgoffload
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command to `parser`."""
    parser.add_argument("shell", metavar="SHELL", choices=list(SHELLS), help=" or ".join(SHELLS))


def run(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Print the script for a shell."""
    if words:
        raise ConfigError(f"unknown option {words[0]!r}. Usage: {USAGE}.")
    print(SHELLS[options.shell] + write_script(options.flags), end="")
    return 0


def write_script(flags: Mapping[str, Sequence[str]]) -> str:
    """Return a completion script for bash from the flags of each command."""
    models = [path.stem for path in list_models()]
    positional = dict.fromkeys(("train", "plan", "profile", "bench"), models) | {NAME: list(SHELLS)}
    words = {command: [*own, *positional.get(command, ())] for command, own in flags.items()} | {"help": list(flags)}
    cases = [f"            {command}) words='{' '.join(own)}' ;;" for command, own in words.items()]
    return _SCRIPT.format(commands=" ".join([*words, "--help", "--version"]), cases="\n".join(cases))
