"""Tests separating our flags from the arguments of a script."""

import argparse

import pytest

from fgoffload.cli import run
from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.arguments import add_fine_grained_offload_args
from fgoffload.integrations.megatron.launch import take_own_flags

ON = ["--fine-grained-activation-offloading", "--offload-modules", "core_attn", "attn_proj"]


def test_our_flags_are_removed_and_the_other_arguments_keep_their_order():
    words = ["--lr", "-1e-3", *ON, "--seed", "1", "--offload-window=1MiB", "--data-path", "x y", "", "-q", "pos", "--z"]
    own = take_own_flags(words)
    assert own.script_words == ("--lr", "-1e-3", "--seed", "1", "--data-path", "x y", "", "-q", "pos", "--z")
    assert own.offload.offload_modules == ("core_attn", "attn_proj")
    assert own.offload.offload_window_bytes == 1024 * 1024
    assert own.remarks == ()


def test_arguments_after_a_double_dash_belong_to_the_script():
    own = take_own_flags(["--seed", "1", "--", *ON, "--", "x"])
    assert (own.offload, own.remarks) == (None, ())
    assert own.script_words == ("--seed", "1", "--", *ON, "--", "x")


def test_without_our_flags_the_script_receives_all_arguments():
    own = take_own_flags(["--seed", "1", "--offload-dir", "x"])
    assert (own.offload, own.script_words, own.remarks) == (None, ("--seed", "1", "--offload-dir", "x"), ())


def test_a_misspelled_flag_is_refused_unless_the_script_has_it():
    for typed in ("--offload-host-bugdet=3GiB", "--offload_host_budget"):
        with pytest.raises(ConfigError, match=r"^--offload.host.bu\w+ is not a flag .* Did you mean --offload-host-budget\?"):
            take_own_flags([typed])
    words = ("--offload_plan", "x", "--", "--offload-plam")
    assert take_own_flags(words, script_text="offload_plan: str").script_words == words


def test_flags_without_the_offload_switch_have_no_effect_and_a_warning():
    own = take_own_flags(["--offload-modules", "core_attn", "--offload-window", "1MiB", "--seed", "1"])
    assert (own.offload, own.script_words) == (None, ("--seed", "1"))
    (remark,) = own.remarks
    assert remark.startswith("--offload-modules --offload-window have no effect without --fine-grained-activation-offloading")


def test_flags_without_effect_on_a_trainer_suggest_the_callback():
    (remark,) = take_own_flags(["--offload-host-budget", "3GiB"], makes_trainers=True).remarks
    assert remark.startswith("--offload-host-budget has no effect on a Trainer. In the script, pass OffloadCallback(config=")
    (remark,) = take_own_flags(["--offload-modules", "model.layers.*"], makes_trainers=True).remarks
    assert remark.endswith("pass OffloadCallback(['model.layers.*']) to the Trainer.")


def test_a_fraction_of_zero_causes_a_warning():
    (remark,) = take_own_flags([*ON, "--activation-offload-fraction", "0"]).remarks
    assert "keeps all sites on the GPU" in remark


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*ON, "--offload-window", "1PB"], "--offload-window '1PB' is not a size"),
        ([*ON, "--offload-prefetch"], "--offload-prefetch expected one argument. Use --offload-prefetch VALUE"),
        ([*ON, "--activation-offload-fraction", "x"], "--activation-offload-fraction 'x' is not a number"),
        (["--fine-grained-activation-offloading", "--offload-modules", "core_atn"], "Did you mean 'core_attn'?"),
        (["--fine-grained-activation-offloading"], "--offload-modules is empty"),
        ([*ON, "--offload-memory-budget", "auto"], "works only with a transformers Trainer"),
        (["--offload-memory-budget", "0"], "--offload-memory-budget 0 leaves no GPU memory"),
        (["--offload-memory-budget", "60"], "--offload-memory-budget '60' has no unit"),
    ],
)
def test_invalid_values_of_our_flags_are_rejected(words, message):
    with pytest.raises(ConfigError) as caught:
        take_own_flags(words)
    assert message in str(caught.value)
    assert str(caught.value).startswith("--")


def test_the_help_lists_every_flag():
    parser = add_fine_grained_offload_args(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    flags = {action.option_strings[0] for action in parser._actions}
    assert {flag.split()[0] for flag in run.OWN_FLAGS} == flags
