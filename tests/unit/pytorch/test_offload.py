"""`fgoffload.offload`: chosen modules of any tree, equal to the bit, in any way in which they are called."""

import contextlib
import copy
import dataclasses
import gc
import pickle
import threading
import time
import types

import pytest
import torch
from support.models import (
    ALL,
    ATTN_BYTES,
    LAYERS,
    MLP_BYTES,
    PATTERNS,
    ROW_BYTES,
    WIDTH,
    check_equal,
    copy_gradients,
    get_gradients,
    make_inputs,
    make_net,
)
from support.sites import has_hooks
from torch import nn
from torch.utils.checkpoint import checkpoint

import fgoffload
from fgoffload import ConfigError, HostMemory, StateError, TransferConfig
from fgoffload.engine import CpuDevice, DelayedCpuDevice, KeptReason
from fgoffload.engine.identity import StorageRef
from fgoffload.integrations.pytorch import devices, owner


def count_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("make_device", [lambda: None, DelayedCpuDevice], ids=["cpu", "delayed"])
def test_gradients_are_equal_to_the_bit_and_the_bytes_are_those_that_the_modules_save(make_device):
    net, inputs = make_net(), make_inputs()
    expected = get_gradients(net, lambda: net(inputs))
    with fgoffload.offload(net, PATTERNS, ALL, device=make_device()) as handle:
        check_equal(expected, get_gradients(net, lambda: net(inputs)))
        tags = handle.stats().tags
    assert (tags["attn"].groups, tags["attn"].d2h_bytes) == (LAYERS, LAYERS * ATTN_BYTES)
    assert (tags["mlp"].groups, tags["mlp"].d2h_bytes) == (LAYERS, LAYERS * MLP_BYTES)
    assert tags["mlp"].h2d_bytes + tags["mlp"].recalled_bytes == LAYERS * MLP_BYTES
    assert not has_hooks()


def test_saves_outside_of_the_regions_do_not_hold_what_regions_let_go():
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Tanh()

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            output = self.inner(hidden * 2)  # saves its output
            self.storage = StorageRef(output)
            return output.view(-1).sin().sum()  # saves a view of the same storage, outside

    model, inputs = Shares(), make_inputs().requires_grad_()
    with fgoffload.offload(model, ["inner"], ALL) as handle:
        loss = model(inputs)
        assert model.storage.is_freed
        loss.backward()
        moved = handle.stats().tags["inner"]
    assert (moved.d2h_bytes, moved.held_elsewhere_bytes) == (ROW_BYTES, 0)


def test_microbatches_count_the_forwards_since_the_last_stats(caplog):
    net, inputs = make_net(), make_inputs()
    caplog.set_level("DEBUG", logger="fgoffload")
    with fgoffload.offload(net, ["layers.0.attn"], ALL) as handle:
        with torch.no_grad():
            net(inputs)
        losses = [net(inputs), net(inputs)]
        sum(losses).backward()
        handle.stats()
        net(inputs).backward()
    labels = [line.message.split(":")[0] for line in caplog.records if line.message.startswith("offload layers")]
    assert labels == ["offload layers.0.attn mb=0", "offload layers.0.attn mb=1", "offload layers.0.attn mb=0"]


def test_a_forward_without_grad_touches_no_state():
    net = make_net()
    with fgoffload.offload(net, PATTERNS, ALL) as handle:
        with torch.no_grad():
            net(make_inputs())
        with torch.inference_mode():
            net(make_inputs())
        assert handle.engine is None
        assert handle.stats().tags == {}


@dataclasses.dataclass
class Output:
    extra: int
    hidden: torch.Tensor


WRAP = {
    "tuple": lambda hidden: (torch.ones(1), [hidden]),
    "dict": lambda hidden: {"loss": None, "hidden": hidden},
    "dataclass": lambda hidden: Output(3, hidden),
}
UNWRAP = {
    "tuple": lambda output: output[1][0],
    "dict": lambda output: output["hidden"],
    "dataclass": lambda output: output.hidden,
}


class Wraps(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, *, batch: dict[str, torch.Tensor]) -> object:
        return WRAP[self.kind](self.linear(batch["hidden"]).sin())


class Unwraps(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = Wraps(kind)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output = UNWRAP[self.inner.kind](self.inner(batch={"hidden": hidden}))
        self.marks = [len(tensor._backward_hooks or ()) for tensor in (hidden, output)]
        return output.sum()


@pytest.mark.parametrize("kind", WRAP)
def test_outputs_may_be_tuples_dicts_and_dataclasses_and_inputs_keywords(kind):
    model, inputs = Unwraps(kind), make_inputs().requires_grad_()
    expected = get_gradients(model, lambda: model(inputs * 2))
    with fgoffload.offload(model, ["inner"], ALL) as handle:
        check_equal(expected, get_gradients(model, lambda: model(inputs * 2)))
        stats = handle.stats()
    assert stats.tags["inner"].d2h_bytes == 2 * ROW_BYTES
    assert model.marks == [1, 1]  # by which backward tells where it is


def test_a_module_that_runs_twice_in_one_forward_is_two_groups():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.inner(self.inner(hidden)).sum()

    torch.manual_seed(0)
    model, inputs = Twice(), make_inputs()
    expected = get_gradients(model, lambda: model(inputs))
    with fgoffload.offload(model, ["inner"], ALL) as handle:
        check_equal(expected, get_gradients(model, lambda: model(inputs)))
        moved = handle.stats().tags["inner"]
    # The input, the first output, which both save, and the second output.
    assert (moved.groups, moved.d2h_bytes, moved.shared_bytes) == (2, 3 * ROW_BYTES, ROW_BYTES)


def test_regions_within_regions_give_the_same_bits():
    net, inputs = make_net(), make_inputs()
    expected = get_gradients(net, lambda: net(inputs))
    with fgoffload.offload(net, {"layers.*": "layer", "layers.*.mlp": "mlp", "layers.*.attn.*": "part"}, ALL) as handle:
        check_equal(expected, get_gradients(net, lambda: net(inputs)))
        assert set(handle.stats().tags) == {"layer", "mlp", "part"}


def test_a_module_that_is_called_outside_of_the_models_forward_is_a_forward_by_itself():
    net, inputs = make_net(), make_inputs()
    expected = get_gradients(net, lambda: net.layers[1].mlp(inputs).sum())
    with fgoffload.offload(net, PATTERNS, ALL) as handle:
        check_equal(expected, get_gradients(net, lambda: net.layers[1].mlp(inputs).sum()))
        assert handle.stats().tags["mlp"].d2h_bytes == MLP_BYTES
        net.layers[0].norm(inputs)  # no region
    assert not has_hooks()


def test_parts_that_are_called_one_by_one_can_be_said_to_be_one_forward():
    net, inputs = make_net(), make_inputs()

    def run() -> torch.Tensor:
        hidden = inputs
        for layer in net.layers:
            hidden = layer(hidden)
        return hidden.sum()

    expected = get_gradients(net, run)
    misses = {}
    with fgoffload.offload(net, PATTERNS, ALL) as handle:
        for is_one in (False, True):
            with handle.forward() if is_one else torch.enable_grad():
                loss = run()
            net.zero_grad()
            loss.backward()
            check_equal(expected, copy_gradients(net))
            misses[is_one] = handle.stats().prefetch_misses
    assert misses[True] == 3  # the last group, whose three storages are wanted at once
    assert misses[False] > misses[True]


def test_two_threads_may_train_with_one_handle():
    nets = [make_net(0)]
    nets.append(copy.deepcopy(nets[0]))
    batches = [make_inputs(seed) for seed in range(8)]
    expected = [torch.autograd.grad(nets[0](batch), list(nets[0].parameters())) for batch in batches]
    found: dict[int, list[torch.Tensor]] = {}
    barrier = threading.Barrier(2, timeout=30)
    with fgoffload.offload(nets[0], PATTERNS, ALL, device=DelayedCpuDevice()) as handle:

        def train(part: int) -> None:
            barrier.wait()
            for index in range(part, 8, 2):
                found[index] = torch.autograd.grad(nets[0](batches[index]), list(nets[0].parameters()))

        threads = [threading.Thread(target=train, args=(part,)) for part in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        stats = handle.stats()
    assert stats.tags["attn"].groups == 8 * LAYERS
    for index, gradients in enumerate(expected):
        check_equal(gradients, found[index])


def test_two_handles_on_two_models_do_not_know_each_other():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net(1)
            self.tail = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.net(self.tail(hidden))

    model, inputs = Outer(), make_inputs()
    expected = get_gradients(model, lambda: model(inputs))
    names = ["tail", "net.layers.*.norm"]
    with fgoffload.offload(model, names, ALL) as one, fgoffload.offload(model.net, PATTERNS, ALL) as other:
        check_equal(expected, get_gradients(model, lambda: model(inputs)))
        assert set(one.stats().tags) == {"tail", "norm"}
        assert set(other.stats().tags) == {"attn", "mlp"}


class Fails(nn.Module):
    def __init__(self, kind: type[BaseException]) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        raise self.kind(f"somebody's own, in {hidden.sin().shape}")


def test_an_exception_in_a_region_leaves_no_hooks_and_the_next_step_is_right():
    net, inputs = make_net(), make_inputs()
    expected = get_gradients(net, lambda: net(inputs))
    with fgoffload.offload(net, {**PATTERNS, "layers.1": "layer"}, ALL) as handle:
        net.layers[1].mlp[1] = Fails(ValueError)
        with pytest.raises(ValueError, match="somebody's own"):
            net(inputs)
        assert not has_hooks()
        net.layers[1].mlp[1] = nn.GELU()
        check_equal(expected, get_gradients(net, lambda: net(inputs)))
        assert handle.engine.arena.used_bytes == 0


def test_an_exception_that_the_model_handles_itself_leaves_the_rest_of_forward_right():
    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Tanh(), Fails(ValueError))
            self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            try:
                return self.first(hidden).sum()
            except ValueError:
                return self.second(hidden).sum()  # runs while the exception is being handled

    model, inputs = Tries(), make_inputs().requires_grad_()
    expected = get_gradients(model, lambda: model(inputs * 2))
    with fgoffload.offload(model, ["first", "second"], ALL) as handle:
        check_equal(expected, get_gradients(model, lambda: model(inputs * 2)))
        tags = handle.stats().tags
    assert tags["second"].d2h_bytes == 2 * ROW_BYTES
    assert tags["first"].d2h_bytes == 0  # nobody wants it back
    assert not has_hooks()


def test_an_interrupt_that_the_model_handles_itself_leaves_no_hooks_behind_the_forward():
    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Tanh(), Fails(KeyboardInterrupt))
            self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            with contextlib.suppress(KeyboardInterrupt):
                self.first(hidden)
            return self.second(hidden).sum()

    model, inputs = Tries(), make_inputs()
    expected = get_gradients(model, lambda: model(inputs * 2))
    with fgoffload.offload(model, ["first", "second"], ALL):
        for _ in range(2):
            check_equal(expected, get_gradients(model, lambda: model(inputs * 2)))
            assert not has_hooks()


def test_a_hook_of_somebody_else_that_raises_before_ours_ran_is_passed_on():
    net, inputs = make_net(), make_inputs()
    expected = get_gradients(net, lambda: net(inputs))

    def fail(module: nn.Module, args: object) -> None:
        raise ValueError("somebody's own")

    hook = net.layers[1].mlp.register_forward_pre_hook(fail)
    with fgoffload.offload(net, PATTERNS, ALL):
        with pytest.raises(ValueError, match="somebody's own"):
            net(inputs)
        assert not has_hooks()
        hook.remove()
        check_equal(expected, get_gradients(net, lambda: net(inputs)))


def test_remove_undoes_what_a_keyboard_interrupt_has_left():
    net, inputs = make_net(), make_inputs()
    handle = fgoffload.offload(net, {**PATTERNS, "layers.1": "layer"}, ALL)
    net.layers[1].mlp[1] = Fails(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        net(inputs)
    assert has_hooks()  # torch does not call hooks for it
    handle.close()
    assert not has_hooks()


@pytest.mark.parametrize("is_whole", [True, False], ids=["model", "part"])
def test_a_tensor_that_a_region_saved_and_that_was_changed_in_place_is_refused(is_whole):
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Tanh())

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.inner(hidden)

    model, hidden = Changes(), make_inputs().requires_grad_() * 2

    def change(module: nn.Module, args: object, output: torch.Tensor) -> None:
        output.detach().add_(1)

    model.inner.register_forward_hook(change)
    with (
        fgoffload.offload(model, ["inner"], ALL),
        pytest.raises(StateError, match=r"layers\.0\.inner mb=0 .* changed in place"),
    ):
        (model if is_whole else model.inner)(hidden)
    assert not has_hooks()


def test_remove_takes_all_hooks_off_and_a_second_call_does_no_harm():
    net, inputs = make_net(), make_inputs()
    handle = fgoffload.offload(net, PATTERNS, ALL)
    assert count_hooks(net) == 2 + 2 * 2 * LAYERS
    loss = net(inputs)
    handle.remove()
    assert count_hooks(net) == 0
    loss.backward()  # a graph that exists keeps working
    handle.remove()
    handle.close()
    handle.close()
    assert handle.last_stats is not None


def test_close_gives_all_host_memory_back():
    net = make_net()
    handle = fgoffload.offload(net, PATTERNS, ALL)
    net(make_inputs()).backward()
    assert handle.engine.arena.reserved_bytes > 0
    handle.close()
    assert handle.engine.arena.reserved_bytes == 0


def test_a_copy_of_an_offloaded_model_runs_its_own_weights():
    net, inputs = make_net(), make_inputs()
    with fgoffload.offload(net, PATTERNS, ALL):
        other = copy.deepcopy(net)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(2)
        found = get_gradients(other, lambda: other(inputs))
        assert all(parameter.grad is None for parameter in net.parameters())
    for module in other.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    check_equal(get_gradients(other, lambda: other(inputs)), found)


def test_a_model_that_is_offloaded_already_is_refused():
    net = make_net()
    with fgoffload.offload(net, PATTERNS, ALL), pytest.raises(ConfigError, match="Net is offloaded already"):
        fgoffload.offload(net, PATTERNS, ALL)
    fgoffload.offload(net, PATTERNS, ALL).close()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_in_a_model_are_left_alone_and_their_inputs_may_move(use_reentrant):
    class Checkpoints(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
            self.outer = nn.Identity()

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                hidden = checkpoint(layer, hidden, use_reentrant=use_reentrant)
            return hidden.sum()

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Checkpoints()

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.net(hidden)

    torch.manual_seed(0)
    model, inputs = Holds(), make_inputs().requires_grad_()
    expected = get_gradients(model, lambda: model(inputs * 2))
    with fgoffload.offload(model, {"net": "net", "net.layers.*": "inside"}, ALL) as handle:
        check_equal(expected, get_gradients(model, lambda: model(inputs * 2)))
        tags = handle.stats().tags
    assert tags["net"].d2h_bytes == 2 * ROW_BYTES
    assert "inside" not in tags


def test_the_users_filter_and_the_minimum_size_are_obeyed():
    net, inputs = make_net(), make_inputs()
    config = dataclasses.replace(ALL, min_offloaded_bytes=ROW_BYTES + 1, keep=lambda tensor: tensor.shape[-1] == WIDTH)
    expected = get_gradients(net, lambda: net(inputs))
    with fgoffload.offload(net, PATTERNS, config) as handle:
        check_equal(expected, get_gradients(net, lambda: net(inputs)))
        tags = handle.stats().tags
    assert tags["mlp"].d2h_bytes == LAYERS * 8 * ROW_BYTES
    assert tags["mlp"].kept_bytes == {KeptReason.FILTERED.value: LAYERS * ROW_BYTES}
    assert tags["attn"].d2h_bytes == 0


def test_what_is_not_enabled_puts_no_hooks_anywhere():
    net = make_net()
    config = TransferConfig(enabled=False)
    with fgoffload.offload(net, PATTERNS, config) as handle:
        assert count_hooks(net) == 0
        net(make_inputs()).backward()
        assert handle.engine is None
        assert not handle.offload_tensor(torch.ones(8)).is_on_host


def test_parameters_on_the_meta_device_do_not_decide_where_the_engine_is():
    with torch.device("meta"):
        net = make_net()
    with fgoffload.offload(net, PATTERNS, ALL) as handle:
        net.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(0.01)
        net(make_inputs()).backward()
        assert handle.stats().d2h_bytes == LAYERS * (ATTN_BYTES + MLP_BYTES)


def test_a_device_that_torch_does_not_know_is_refused():
    with fgoffload.offload(make_net(), PATTERNS, ALL, device="gpu0") as handle, pytest.raises(ConfigError, match="'gpu0'"):
        handle.get_engine()


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("window_bytes", -1, "window_bytes -1 is below 0"),
        ("prefetch_bytes", -5, "prefetch_bytes -5 is below 0"),
        ("min_offloaded_bytes", -1, "min_offloaded_bytes -1 is below 0"),
        ("host_budget_bytes", 0, "host_budget_bytes 0 leaves no host memory"),
        ("enabled", "yes", "enabled 'yes' is neither True nor False"),
        ("keep", 3, "keep 3 cannot be called"),
        ("host_memory", "pinned", "host_memory 'pinned' is not a HostMemory"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_its_own_name(field, value, says):
    with pytest.raises(ConfigError, match=says):
        TransferConfig(**{field: value})


def test_nothing_of_a_step_waits_for_the_cyclic_collector():
    net, inputs = make_net(), make_inputs()
    with fgoffload.offload(net, {**PATTERNS, "layers.*": "layer"}, ALL) as handle:
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                net(inputs).backward()
            kinds = {type(found).__name__ for found in gc.get_objects() if str(type(found).__module__).startswith("fgoffload")}
        finally:
            gc.enable()
        assert handle.engine.arena.used_bytes == 0
    assert not kinds & {"Forward", "SavingRegion", "Region", "Lane", "Group", "SavedStorage", "Handle", "KeptHandle", "_Call"}


def test_a_whole_model_can_be_pickled_after_remove_and_its_state_always():
    net = make_net()
    handle = fgoffload.offload(net, PATTERNS, ALL)
    pickle.dumps(net.state_dict())
    handle.remove_hooks()
    pickle.dumps(net)


def test_the_engine_is_made_for_the_accelerator_that_parameters_or_inputs_lie_on(monkeypatch):
    asked = []
    monkeypatch.setattr(devices, "find_device", lambda kind, **_: asked.append(kind) or CpuDevice())
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: contextlib.nullcontext())
    on_cpu = torch.ones(1)
    on_gpu = types.SimpleNamespace(device=torch.device("cuda", 1))
    on_meta = torch.ones(1, device="meta")
    for tensors in ([on_cpu, on_meta], [on_cpu, on_gpu], [on_meta, on_gpu, on_cpu], []):
        devices.make_device(None, tensors=tensors, host_memory=HostMemory.PINNED)
    devices.make_device("cuda:1", tensors=[on_cpu], host_memory=HostMemory.PINNED)
    assert asked == ["cpu", "cuda", "cuda", "cpu", "cuda"]


def test_the_models_parameters_and_what_its_forward_is_given_decide_on_the_device(monkeypatch):
    seen = []
    monkeypatch.setattr(owner, "make_device", lambda choice, *, tensors, host_memory: seen.extend(tensors) or CpuDevice())
    net, inputs = make_net(), make_inputs()
    with fgoffload.offload(net, PATTERNS, ALL):
        net.layers[0].mlp(inputs)  # a part alone: the whole model decides all the same
    assert {id(tensor) for tensor in seen} == {id(inputs), *map(id, net.parameters())}


def test_two_threads_that_begin_at_once_make_one_engine(monkeypatch):
    made = []

    def make_slowly(choice, *, tensors, host_memory) -> CpuDevice:
        made.append(choice)
        time.sleep(0.05)
        return CpuDevice()

    monkeypatch.setattr(owner, "make_device", make_slowly)
    with fgoffload.offload(make_net(), PATTERNS, ALL) as handle:
        threads = [threading.Thread(target=handle.get_engine) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert len(made) == 1
