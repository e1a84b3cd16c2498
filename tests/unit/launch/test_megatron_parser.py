"""Tests reading flags with Megatron-LM's own parser."""

import argparse
import sys
from types import ModuleType

from fgoffload.integrations.megatron.launch.megatron_parser import read_megatron_flags


def make_parser():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--num-layers", type=int, required=True)
    parser.add_argument("--backend", type={"flash": 1}.__getitem__)  # raises KeyError, which argparse does not catch
    return parser


def install(monkeypatch, parse_args):
    for name in ("megatron.training", "megatron.training.arguments"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    if parse_args is not None:
        sys.modules["megatron.training.arguments"].parse_args = parse_args


def test_flags_are_read_with_megatrons_parser_without_parsing_the_command_line(monkeypatch):
    parsed = []

    def parse_args(extra_args_provider=None, ignore_unknown_args=False):  # noqa: FBT002 - Megatron-LM's signature
        parsed.append(extra_args_provider(make_parser()))

    install(monkeypatch, parse_args)
    assert read_megatron_flags(["--num-layers", "3", "--unknown"])["num_layers"] == 3
    assert parsed == []
    for rejected in (["--unknown"], ["--num-layers", "2", "--backend", "x"]):
        assert read_megatron_flags(rejected) is None


def test_without_megatron_lm_or_its_parser_no_flags_are_read(monkeypatch):
    assert read_megatron_flags(["--num-layers", "3"]) is None  # the wheel's `megatron.training` is not used
    install(monkeypatch, None)
    assert read_megatron_flags(["--num-layers", "3"]) is None
