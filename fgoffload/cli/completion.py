"""`fgoffload completion`: prints a script that completes commands, flags and model names in bash or zsh."""

import argparse
from collections.abc import Mapping, Sequence

from fgoffload.cli.shipped_models import list_models
from fgoffload.errors import ConfigError

NAME = "completion"
SUMMARY = "print a completion script for bash or zsh"
DESCRIPTION = "Prints a script for your shell that completes commands, flags and model names."
USAGE = "fgoffload completion bash|zsh"
EXAMPLE = "fgoffload completion bash"
NOTES = "To install it for bash, add this line to ~/.bashrc:\n  source <(fgoffload completion bash)"

SHELLS: Mapping[str, str] = {"bash": "", "zsh": "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n"}
"""Commands at the start of the script, keyed by shell. zsh must load its support for bash completion."""

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
    """Print the script for the shell in `options`."""
    if words:
        raise ConfigError(f"unknown option {words[0]!r}. Usage: {USAGE}.")
    print(SHELLS[options.shell] + write_script(options.flags), end="")
    return 0


def write_script(flags: Mapping[str, Sequence[str]]) -> str:
    """Return a bash script that completes commands and their `flags`."""
    models = [path.stem for path in list_models()]
    positional = dict.fromkeys(("train", "plan", "profile", "bench"), models) | {NAME: list(SHELLS)}
    words = {command: [*own, *positional.get(command, ())] for command, own in flags.items()} | {"help": list(flags)}
    cases = [f"            {command}) words='{' '.join(own)}' ;;" for command, own in words.items()]
    return _SCRIPT.format(commands=" ".join([*words, "--help", "--version"]), cases="\n".join(cases))
