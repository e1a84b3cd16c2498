"""Tests Megatron's host waits: groups are held back until the wait, in order, and results are bitwise identical."""

import contextlib
import functools
import itertools
import logging
import types

import pytest
import torch
from support.trainings import ATTENTION_TAGS, DENSE, EXPERT_TAGS, MOE, make_config, make_trainer, train

from fgoffload.integrations.megatron.adapter.dispatchers import permutes_by_mask
from fgoffload.integrations.megatron.host_waits import host_writes, waits
from fgoffload.integrations.megatron.host_waits.stage_exchanges import exchange_shapes
from fgoffload.integrations.megatron.host_waits.waits import DISPATCHERS
from fgoffload.integrations.megatron.patching.imports import load_module

pytestmark = pytest.mark.usefixtures("parallel")

ALLTOALL = "--moe-token-dispatcher-type alltoall"
TAGS = (*ATTENTION_TAGS, "expert_fc1", "moe_act")
USES_MASK = pytest.mark.skipif(not permutes_by_mask(), reason="megatron-core 0.17 and newer sort without a host wait")
USES_SORT = pytest.mark.skipif(permutes_by_mask(), reason="megatron-core before 0.17 waits for a mask")


def record_step(flags, caplog, wait):
    """Return the events in the forward of one microbatch: offloaded groups, and the `wait` of each layer."""
    class_name, method = wait
    logger = logging.getLogger("test")
    with make_trainer(f"{flags} --global-batch-size 2", make_config(*TAGS)) as trainer:
        dispatcher = getattr(load_module(DISPATCHERS), class_name)
        inner = getattr(dispatcher, method).__wrapped__  # Megatron's own, inside our wrapper

        def log_wait(self, *args):
            result = inner(self, *args)
            logger.debug("wait")
            return result

        for layer in trainer.chunks[0].decoder.layers:
            layer.mlp.experts.register_forward_pre_hook(lambda *_: logger.debug("wait is over, experts begin"))
        with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.DEBUG):
            replace_inner(getattr(dispatcher, method), log_wait, patch)
            trainer.run_step()
    lines = [record.getMessage() for record in caplog.records]
    return [
        line.split(":")[0].split(" mb")[0].removeprefix("offload layers.")
        for line in lines
        if line.startswith(("offload layers", "wait"))
    ]


def replace_inner(wrapper, value, patch):
    """Make `wrapper`, a closure, call `value` instead of the wrapped function."""
    index = wrapper.__code__.co_freevars.index("original")
    patch.setattr(wrapper.__closure__[index], "cell_contents", value)


@pytest.mark.parametrize(
    ("flags", "wait"),
    [
        (MOE, ("MoEAllGatherTokenDispatcher", "dispatch_postprocess")),
        pytest.param(f"{MOE} {ALLTOALL}", ("MoEAlltoAllTokenDispatcher", "dispatch_preprocess"), marks=USES_MASK),
    ],
)
def test_groups_that_end_before_a_wait_are_offloaded_right_after_it_in_order(flags, wait, caplog):
    events = record_step(flags, caplog, wait)
    experts = ["moe_act"] * 4
    attention = ["qkv_linear", "core_attn", "attn_proj", "attn_norm"]  # in the order in which their groups end
    for layer in range(2):
        held = [f"{layer}.{tag}" for tag in attention]
        later = [f"{layer}.{tag}" for tag in (*experts, "expert_fc1", "mlp_norm")]
        expected = ["wait", *held, "wait is over, experts begin", *later]
        assert events[: len(expected)] == expected
        events = events[len(expected) :]
    assert events == []


@USES_SORT
def test_no_group_is_held_back_if_the_dispatcher_does_not_wait(caplog):
    with (
        make_trainer(f"{MOE} {ALLTOALL} --global-batch-size 2", make_config("core_attn")) as trainer,
        caplog.at_level(logging.DEBUG),
    ):
        inner = trainer.chunks[0].decoder.layers[0].mlp
        inner.register_forward_pre_hook(lambda *_: logging.getLogger("test").debug("mlp"))
        trainer.run_step()
    lines = [record.getMessage() for record in caplog.records]
    offloaded = next(index for index, line in enumerate(lines) if line.startswith("offload layers.0.core_attn"))
    assert offloaded < lines.index("mlp")


def test_groups_are_held_back_until_the_last_of_two_waits(monkeypatch):
    dispatcher, events = load_module(DISPATCHERS).MoEFlexTokenDispatcher, []
    for method in ("dispatch_preprocess", "dispatch_postprocess"):
        monkeypatch.setattr(dispatcher, method, lambda self, method=method: events.append(method))
    with make_trainer(MOE, make_config("core_attn")) as trainer:  # the trainer wraps the waits
        monkeypatch.setattr(type(trainer.integration.holding), "flush", lambda self: events.append("flush"))
        one = object.__new__(dispatcher)
        one.config = types.SimpleNamespace(moe_hybridep_pad_uneven_dispatch_inputs=True)
        one.dispatch_preprocess()
        one.dispatch_postprocess()
    assert events == ["dispatch_preprocess", "dispatch_postprocess", "flush"]


def test_the_step_after_an_exception_with_held_groups_is_correct():
    expected, _ = train(MOE)
    with make_trainer(MOE, make_config(*ATTENTION_TAGS, *EXPERT_TAGS)) as trainer:
        state = torch.get_rng_state()
        router = trainer.chunks[0].decoder.layers[1].mlp.router

        def fail(*_):
            raise ValueError("user error")

        hook = router.register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="user error"):
            trainer.run_step()
        hook.remove()
        assert not trainer.integration.holding.is_on  # or a layer without a wait would hold its groups too
        torch.set_rng_state(state)
        results = [trainer.run_step() for _ in range(2)]
    assert [(result.losses, result.gradient_digests) for result in results] == expected


class Exchange:
    """A communicator of one stage that records its requests and host waits."""

    def __init__(self, monkeypatch, *, batch_p2p_sync):
        module = load_module("megatron.core.pipeline_parallel.p2p_communication")
        self.events = []
        self.config = load_module("megatron.core.model_parallel_config").ModelParallelConfig(batch_p2p_sync=batch_p2p_sync)
        self.communicator = object.__new__(module.P2PCommunicator)
        self.communicator.__dict__.update(config=self.config, pp_group=None, next_rank=0, prev_rank=0)
        monkeypatch.setattr(module, "_batched_p2p_ops", lambda **_: [types.SimpleNamespace(wait=self.record("request"))])

    def record(self, event):
        return lambda *_: self.events.append(event)

    def run(self):
        stream = types.SimpleNamespace(synchronize=self.record("stream"))
        with pytest.MonkeyPatch.context() as patch:  # on top of the trainer's CPU replacements
            patch.setattr(torch.cuda, "synchronize", self.record("device"))
            patch.setattr(torch.cuda, "current_stream", lambda: stream)
            self.communicator._communicate(
                tensor_send_next=None, tensor_send_prev=None, recv_prev=False, recv_next=False, tensor_shape=None
            )


PADDED = f"{MOE} {ALLTOALL} --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"


@pytest.mark.parametrize(
    ("flags", "batch_p2p_sync", "expected"),
    [
        (DENSE, True, ["request", "stream"]),
        (DENSE, False, ["request"]),
        (PADDED, True, ["request", "stream"]),
        (MOE, True, ["request"]),
        (MOE, False, ["request"]),
    ],
    ids=["dense", "dense, no wait", "padded experts", "experts", "experts, no wait"],
)
def test_stage_exchanges_wait_for_their_stream_only_if_no_layer_waits(flags, batch_p2p_sync, expected, monkeypatch):
    exchange = Exchange(monkeypatch, batch_p2p_sync=batch_p2p_sync)
    with make_trainer(flags, make_config("core_attn")) as trainer:  # the trainer wraps the waits
        trainer.run_step()
        exchange.run()
    assert exchange.events == expected
    assert exchange.config.batch_p2p_sync == batch_p2p_sync


@pytest.mark.parametrize("transfers", list(itertools.product([False, True], repeat=4)))
def test_stages_exchange_the_same_shapes_as_in_megatron(transfers, monkeypatch):
    events = []

    def exchange(operations):
        for operation, shape, rank, group in operations:
            if operation is torch.distributed.irecv:
                shape.copy_(torch.tensor([rank, 2, 3]))  # from the sender
            events.append((operation.__name__, shape.tolist(), rank, group))
        return [types.SimpleNamespace(wait=lambda: events.append("request"))]

    communicator = Exchange(monkeypatch, batch_p2p_sync=True).communicator
    communicator.__dict__.update(pp_group="group", next_rank=11, prev_rank=10)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.distributed, "P2POp", lambda *operation: operation)
    monkeypatch.setattr(torch.distributed, "batch_isend_irecv", exchange)
    sends_next, sends_previous, *receives = transfers
    sent = (torch.empty(5, 6, 7) if sends_next else None, torch.empty(8, 9, 10) if sends_previous else None)
    expected, by_megatron = communicator._communicate_shapes(*sent, *receives), events.copy()
    events.clear()
    found = exchange_shapes(communicator, *sent, *receives, device=torch.device("cpu"))
    assert [list(shape) for shape in found] == [list(shape) for shape in expected]
    assert events == by_megatron
    assert bool(events) == any(transfers)


class Pages:
    """Fakes host pages that a GPU writes."""

    def __init__(self):
        self.written = []

    def write(self, tensor):
        self.written.append(tensor)
        return tensor + 100


@pytest.mark.parametrize(
    ("as_numpy", "is_copying", "dtype"), list(itertools.product([False, True], [False, True], [torch.int64, torch.float32]))
)
def test_counts_bypass_the_copy_engine_only_during_offload_copies(as_numpy, is_copying, dtype):
    pages, copied = Pages(), []

    def original(tensor, as_numpy, record_stream):
        copied.append((as_numpy, record_stream))
        return tensor.numpy() if as_numpy else tensor

    offload = types.SimpleNamespace(engine=types.SimpleNamespace(is_copying_out=lambda: is_copying))
    move = functools.partial(waits._move_to_cpu, lambda: offload, pages, original)
    counts = torch.tensor([3, 4], dtype=dtype)
    found = move(counts, as_numpy=as_numpy)
    bypasses = is_copying and dtype is torch.int64
    assert isinstance(found, torch.Tensor) is not as_numpy
    assert list(found) == ([103, 104] if bypasses else [3, 4])
    assert len(pages.written) == bypasses
    assert copied == ([] if bypasses else [(as_numpy, False)])


@pytest.mark.parametrize("positions", [16, 32])
def test_packed_sequence_lengths_are_read_once_and_rotary_results_are_unchanged(positions, monkeypatch):
    module = load_module("megatron.core.models.common.embeddings.rope_utils")
    bounds = torch.tensor([0, 16, 24, 32], dtype=torch.int32)
    heads, angles = torch.randn(32, 2, 8), torch.randn(positions, 1, 1, 8)
    group = types.SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    expected = module._apply_rotary_pos_emb_thd(heads, bounds, angles, cp_group=group)
    events = []
    monkeypatch.setattr(host_writes, "write_to_host", lambda tensor: events.append("write") or tensor.clone())
    stream = types.SimpleNamespace(synchronize=lambda: events.append("wait for the stream"))
    with make_trainer(DENSE, make_config("core_attn")), pytest.MonkeyPatch.context() as patch:  # the trainer wraps the waits
        patch.setattr(torch.cuda, "current_stream", lambda: stream)
        found = module._apply_rotary_pos_emb_thd(heads, bounds, angles, cp_group=group)
    assert torch.equal(found, expected)
    assert events == ["write", "wait for the stream"]


@pytest.mark.parametrize(("loss", "is_rejected"), [(1.0, False), (float("nan"), True)])
def test_non_finite_losses_are_rejected_as_without_offload(loss, is_rejected):
    module = load_module("megatron.core.rerun_state_machine")
    machine = module.RerunStateMachine(mode=module.RerunMode.DISABLED)
    expectation = pytest.raises(RuntimeError, match="found NaN") if is_rejected else contextlib.nullcontext()
    with make_trainer(DENSE, make_config("core_attn")), expectation:  # the trainer wraps the waits
        machine.validate_result(result=torch.tensor(loss), rejection_func=torch.isnan, message="found NaN")
