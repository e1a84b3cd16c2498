"""`fgoffload completion`: a script that lets bash or zsh complete commands, flags and names of models."""

import argparse
import re
from collections.abc import Mapping, Sequence

from fgoffload.cli.options import suggest
from fgoffload.cli.shipped_models import list_models
from fgoffload.errors import ConfigError

NAME = "completion"
SUMMARY = "print a completion script for bash or zsh"
DESCRIPTION = "Prints a script that lets your shell complete commands, flags and names of models."
USAGE = "fgoffload completion bash|zsh"
EXAMPLE = "fgoffload completion bash"
NOTES = "Add this to ~/.bashrc: source <(fgoffload completion bash)"
EXAMPLE_VALUES: Mapping[str, str] = {}
RUNS_A_SCRIPT = False

SHELLS: Mapping[str, str] = {"bash": "", "zsh": "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n"}
"""Supported shells, with what each must load first: zsh takes bash's completion functions."""

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
    parser.add_argument("shell", metavar="SHELL", nargs="?", help=" or ".join(SHELLS))


def run(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Print the script for the shell."""
    if options.shell not in SHELLS or words:
        typed = " ".join([*([options.shell] if options.shell else []), *words])
        meant = suggest(typed, tuple(SHELLS))
        raise ConfigError(f"SHELL {typed!r} is not one of: {', '.join(SHELLS)}.{meant} Give one, as in: {EXAMPLE}.")
    print(SHELLS[options.shell] + write_script(options.format_helps()), end="")
    return 0


def write_script(helps: Mapping[str, str]) -> str:
    """Return a completion script for bash.

    Args:
        helps: Help text of each command, which names all flags.
    """
    models = " ".join(model.name for model in list_models())
    cases = []
    for command, text in helps.items():
        words = re.findall(r"^  (?:-h, )?(--[a-z-]+)", text, re.MULTILINE)
        if "ARGUMENTS.sh" in text or "MODEL" in text:
            words.append(models)
        if command == NAME:
            words += SHELLS
        cases.append(f"            {command}) words='{' '.join(words)}' ;;")
    cases.append(f"            help) words='{' '.join(helps)}' ;;")
    return _SCRIPT.format(commands=" ".join([*helps, "help", "--help", "--version"]), cases="\n".join(cases))
