"""Tests that `reset` ends a step only after a training forward: Megatron also calls it at other times."""

from support.megatron_stub.training import LAYERS, with_offload


def test_reset_before_the_first_forward_ends_no_step():
    with with_offload("core_attn") as training:
        training.layers.finish_schedule()
        assert repr(training.offload) == "<MegatronOffload (tags: core_attn), no finished step>"
        training.forward().sum().backward()
        assert repr(training.offload).endswith(
            "no finished step: without Megatron's schedules, call finish_step() after backward>"
        )
        training.step()
        assert repr(training.offload).endswith(" offloaded in the last step>")
        assert training.offload.last_step.tags["core_attn"].groups == 3 * LAYERS


def test_reset_after_a_step_or_warm_up_keeps_the_last_step():
    with with_offload("core_attn") as training:
        training.step()
        step = training.offload.last_step
        training.layers.finish_schedule()
        assert training.offload.last_step is step
        interface = training.layers.off_interface
        interface.disable_offload()
        training.forward().sum().backward()
        interface.enable_offload()
        training.layers.finish_schedule()
        assert training.offload.last_step is step
