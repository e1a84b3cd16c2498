import argparse
import sys
from types import ModuleType

import pytest

from fgoffload.integrations.megatron.launch.call_sites import MegatronParser, find_call_sites, find_megatron_parser, has_module

TAGS = ("core_attn", "router", "attn_proj")
MEGATRONS = ("core_attn", "attn_proj")


def make_parser(*, leave_out=()):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--num-layers", type=int, required=True)
    parser.add_argument("--transformer-impl", choices=["local", "transformer_engine"], default="transformer_engine")
    for flag, options in (
        ("--fine-grained-activation-offloading", {"action": "store_true"}),
        ("--offload-modules", {"nargs": "+"}),
        ("--min-offloaded-tensor-size", {"type": int}),
    ):
        if flag not in leave_out:
            parser.add_argument(flag, **options)
    return parser


def find(*, parser=None, words=("--num-layers", "2"), environment=None, has_module=lambda name: True, tags=TAGS):
    return find_call_sites(tags, 16, MegatronParser(parser or make_parser()), words, environment or {}, has_module=has_module)


def test_the_script_gets_the_flags_that_it_takes_with_the_tags_that_megatron_accepts():
    found = find()
    assert found.tags == MEGATRONS
    # The parser itself has to understand them before any word of the script.
    values = make_parser().parse_args([*found.flags, "--num-layers", "2"])
    assert values.fine_grained_activation_offloading
    assert values.offload_modules == list(MEGATRONS)
    assert values.min_offloaded_tensor_size == 16
    assert str(found) == "The script gets Megatron-LM's own flags for core_attn attn_proj."


def test_the_flags_do_not_swallow_a_word_of_the_script():
    parser = make_parser()
    parser.add_argument("file")
    flags = find(parser=parser, words=("x.txt", "--num-layers", "2")).flags
    assert parser.parse_args([*flags, "x.txt", "--num-layers", "2"]).file == "x.txt"


def test_a_parser_without_a_minimum_size_does_not_get_it():
    parser = make_parser(leave_out=("--min-offloaded-tensor-size",))
    found = find(parser=parser)
    assert "--fine-grained-activation-offloading" in found.flags
    assert "--min-offloaded-tensor-size" not in found.flags


def test_tags_of_ours_alone_leave_megatrons_flag_off():
    found = find(tags=("router",))
    assert (found.tags, found.flags) == ((), ())
    assert str(found) == "Megatron-Core has no call site of its own for these tags."


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        *(
            ({"parser": make_parser(leave_out=(flag,))}, f"its Megatron-LM does not know {flag}")
            for flag in ("--offload-modules", "--fine-grained-activation-offloading")
        ),
        (
            {"words": ("--num-layers", "2", "--transformer-impl", "local")},
            "Megatron-LM rejects them with --transformer-impl local",
        ),
        (
            {"environment": {"NVTE_CPU_OFFLOAD_V1": "0"}},
            "Megatron-LM rejects them with NVTE_CPU_OFFLOAD_V1=0",
        ),
        (
            {"has_module": lambda name: name != "pynvml"},
            "Megatron-LM then needs pynvml to bind processes to CPUs (pip install nvidia-ml-py)",
        ),
        (
            {"has_module": lambda name: name == "pynvml"},
            "Megatron-LM then needs cuda.bindings to bind processes to CPUs (pip install cuda-bindings)",
        ),
    ],
)
def test_offload_is_set_in_the_config_alone_if_megatron_would_refuse_its_flags(given, reason):
    found = find(**given)
    assert (found.tags, found.flags, found.reason) == (MEGATRONS, (), reason)
    assert f"The script does not get Megatron-LM's own offload flags, because {reason}. Offload works" in str(found)


def test_offload_is_set_in_the_config_alone_without_a_parser():
    found = find_call_sites(TAGS, 16, None, (), {})
    assert (found.flags, found.reason) == ((), "there is no Megatron-LM next to the script")


def test_a_value_that_the_parser_cannot_stand_is_left_for_the_script_too():
    parser = make_parser()
    parser.add_argument("--backend", type={"flash": 1}.__getitem__)  # raises KeyError, which argparse lets through
    assert find(parser=parser, words=("--num-layers", "2", "--backend", "x")).flags


def install(monkeypatch, parse_args):
    for name in ("megatron.training", "megatron.training.arguments"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    if parse_args is not None:
        sys.modules["megatron.training.arguments"].parse_args = parse_args


def test_megatrons_parser_is_taken_before_it_parses(monkeypatch):
    parsed = []

    def parse_args(extra_args_provider=None, ignore_unknown_args=False):  # noqa: FBT002 - Megatron-LM's signature
        parser = extra_args_provider(make_parser())
        parsed.append(parser)

    install(monkeypatch, parse_args)
    parser = find_megatron_parser()
    assert parsed == []
    assert parser.knows("--transformer-impl")
    assert not parser.knows("--offload-window")
    assert parser.find_values(["--num-layers", "3", "--unknown"]).num_layers == 3


def test_without_megatron_lm_or_its_parser_there_is_none(monkeypatch):
    assert find_megatron_parser() is None  # no wheel's `megatron.training` is asked, where it has one
    install(monkeypatch, None)
    assert find_megatron_parser() is None


def test_a_module_is_looked_for_without_being_imported():
    assert has_module("json")
    assert has_module("unittest.mock")
    assert not has_module("no_such_module")
    assert not has_module("no_such_module.inner")
    assert not has_module("json.decoder.inner")
