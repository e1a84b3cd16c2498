"""Functions that run again in backward for the graph of their forward: the same bits, nothing held, and errors that say so."""

import contextlib
import functools
import gc
import types

import pytest
import torch
from support.tensors import assert_same_bits, leaf

from fgoffload import StateError
from fgoffload.engine.identity import StorageRef
from fgoffload.integrations.megatron import reruns
from fgoffload.integrations.megatron.checkpoints import follow_checkpoints
from fgoffload.integrations.megatron.cpu_support import apply_cpu_support, needs_cpu_support
from fgoffload.integrations.megatron.handing_on import OpenReruns
from fgoffload.integrations.megatron.patches import Patches
from fgoffload.integrations.megatron.random_states import RandomUse
from fgoffload.integrations.megatron.reruns import Rerun

random = pytest.importorskip("megatron.core.tensor_parallel.random")


@pytest.fixture(autouse=True)
def cpu():
    with apply_cpu_support() if needs_cpu_support() else contextlib.nullcontext():
        yield


def normalize(hidden):
    """Is a norm of plain ops, which uses its input twice."""
    return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-5)


def begin(function, *args):
    """Return the forward of what runs again, and what it returned."""
    rerun = Rerun(function, args, name="it")
    with rerun:
        outputs = function(*args)
    rerun.note_outputs(outputs)
    return rerun, outputs


def use(rerun, output, weight):
    """Return a product with `output`, which is emptied behind it and filled before its backward."""
    product = output @ weight
    rerun.empty_outputs()
    product.register_hook(lambda gradient: rerun.run())
    return product


def run(function, *inputs, weight, before_backward=lambda output: None):
    """Run `function` again in backward of a product with `weight`, beside which the first input is used twice more."""
    inputs = tuple(one * 1 for one in inputs)
    rerun, outputs = begin(function, *inputs)
    output = use(rerun, reruns.as_tuple(outputs)[0], weight).sum() + (inputs[0].sin() * inputs[0].cos()).sum()
    before_backward(output)
    torch.rand(3)  # as others draw between forward and backward
    output.backward()
    return output.detach()


def run_plainly(function, *inputs, weight):
    inputs = tuple(one * 1 for one in inputs)
    output = reruns.as_tuple(function(*inputs))[0] @ weight
    output = output.sum() + (inputs[0].sin() * inputs[0].cos()).sum()
    torch.rand(3)
    output.backward()
    return output.detach()


def scale_and_activate(hidden, probabilities):
    gate, up = hidden.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up * probabilities


def return_what_it_saves(hidden):
    return hidden.exp()  # its backward wants its own output


def return_views(hidden):
    both = hidden.exp() * 2
    return both[:, :8], both[:, 8:]


def drop_some(hidden):
    return torch.nn.functional.dropout(hidden, 0.5) * hidden


FUNCTIONS = {
    "a norm of plain ops": (normalize, [(6, 16)], (16, 4)),
    "an activation": (scale_and_activate, [(6, 16), (6, 1)], (8, 4)),
    "its output is saved inside": (return_what_it_saves, [(6, 16)], (16, 4)),
    "views of one storage": (return_views, [(6, 16)], (8, 4)),
    "random numbers": (drop_some, [(6, 16)], (16, 4)),
    "no rows": (normalize, [(0, 16)], (16, 4)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bits_are_those_of_a_training_without(name):
    function, shapes, weights = FUNCTIONS[name]
    results = []
    for train in (run_plainly, run):
        torch.manual_seed(1)
        inputs, weight = [leaf(*shape, seed=seed) for seed, shape in enumerate(shapes)], leaf(*weights, seed=9)
        output = train(function, *inputs, weight=weight)
        # What is drawn behind it is as without, too.
        results.append([output, weight.grad, *(one.grad for one in inputs), torch.rand(3)])
    assert_same_bits(*results)


def test_between_forward_and_backward_only_the_inputs_are_there():
    saved = []

    def watched(hidden, probabilities):
        gate, up = hidden.chunk(2, -1)
        active = torch.nn.functional.silu(gate)
        product = active * up
        result = product * probabilities
        saved.extend(StorageRef(one) for one in (active, product))
        results.append(result.detach())
        return result

    results, seen = [], []

    def look(output):
        gc.collect()
        seen.extend([[one.is_freed for one in saved], [one.untyped_storage().nbytes() for one in results]])

    run(watched, leaf(6, 16), leaf(6, 1), weight=leaf(8, 4), before_backward=look)
    assert seen == [[True, True], [0]]


def test_a_graph_that_is_dropped_frees_everything_at_once():
    gc.collect()
    gc.disable()
    try:
        hidden = leaf(6, 16) * 1
        references = [StorageRef(hidden)]
        rerun, output = begin(normalize, hidden)
        references.append(StorageRef(output))
        product = output @ leaf(16, 4)
        product.register_hook(lambda gradient, rerun=rerun: rerun.run())
        del hidden, output, product, rerun
        assert [one.is_freed for one in references] == [True, True]
    finally:
        gc.enable()


class Raises:
    """Raises in one of its runs, counted from 0."""

    def __init__(self, function, run):
        self._function, self._remaining = function, run

    def __call__(self, *inputs):
        self._remaining -= 1
        if self._remaining == -1:
            raise MemoryError
        return self._function(*inputs)


@pytest.mark.parametrize("calls_run", [True, False], ids=["by its hook", "by what is asked for"])
def test_a_backward_that_is_tried_again_after_the_second_run_raised_computes_the_same(calls_run):
    hidden, weight, expected = leaf(6, 16), leaf(16, 4), [leaf(6, 16), leaf(16, 4)]
    (normalize(expected[0] * 1) @ expected[1]).sum().backward()
    given, function = hidden * 1, Raises(normalize, 1)
    rerun, output = begin(function, given)
    product = output @ weight
    if calls_run:
        rerun.empty_outputs()
        product.register_hook(lambda gradient: rerun.run())
    loss = product.sum()
    with pytest.raises(MemoryError):
        loss.backward(retain_graph=True)
    hidden.grad = weight.grad = None
    loss.backward()
    assert_same_bits([hidden.grad, weight.grad], [one.grad for one in expected])


def test_a_leaf_of_the_function_stays_and_gets_its_gradient():
    factor, expected = leaf(16, seed=3), leaf(16, seed=3)
    hidden = leaf(6, 16) * 1
    (hidden.detach() * expected.sin()).sum().backward()
    rerun, output = begin(lambda one: one * factor.sin(), hidden)
    with torch.no_grad():
        assert rerun._dropped.count(None) == 1  # the leaf that the sine saves
    output.sum().backward()
    assert_same_bits([factor.grad], [expected.grad])


def test_a_second_backward_of_the_same_graph_computes_the_same():
    hidden, weight, calls = leaf(6, 16), leaf(16, 4), []

    def counted(given):
        calls.append(1)
        return normalize(given)

    given = hidden * 1
    rerun, output = begin(counted, given)
    product = use(rerun, output, weight)
    first = torch.autograd.grad(product.sum(), [hidden, weight], retain_graph=True)
    second = torch.autograd.grad(product.sum(), [hidden, weight])
    assert_same_bits(first, second)
    assert len(calls) == 2


def make_unlike(*functions):
    """Return a function that is another one in each run."""
    remaining = iter(functions)
    return lambda hidden: next(remaining)(hidden)


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        (
            (normalize, lambda one: one * 2),
            r"a recompute of it saved 0 tensors and returned 1, where forward saved \d and returned 1",
        ),
        (
            (torch.sin, lambda one: one[:3].sin()),
            r"a recompute of it saved \[3, 16\] of torch.float32 where forward saved \[6, 16\]",
        ),
        (
            (torch.sin, lambda one: one.sin().double()),
            r"returned torch.float64 over 768 bytes where forward returned torch.float32 over 384",
        ),
    ],
    ids=["how many", "of what shape", "how much"],
)
def test_a_function_that_does_something_else_is_refused(functions, message):
    with pytest.raises(StateError, match=message):
        run(make_unlike(*functions), leaf(6, 16), weight=leaf(16, 4))


def test_an_input_that_was_changed_is_refused():
    given = leaf(6, 16) * 1
    rerun, _ = begin(torch.sin, given)
    with torch.no_grad():
        given.add_(1)
    with pytest.raises(StateError, match="that a recompute of it saved for backward was changed in place"):
        rerun.run()


def test_what_the_function_changes_after_it_was_saved_is_refused():
    def change(hidden):
        result = hidden.exp()
        result.mul_(3)
        return result * 1

    with pytest.raises(StateError, match=r"shape \[6, 16\] that a recompute of it saved was changed in place behind it"):
        run(change, leaf(6, 16), weight=leaf(16, 4))


def test_a_weight_that_was_changed_is_refused():
    weight = torch.nn.Parameter(torch.ones(16))
    given = leaf(6, 16) * 1
    _, output = begin(lambda one: one * weight, given)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(StateError, match="changed in place"):
        output.sum().backward()


# Whose checkpoints do so.


def make_offload(*, recomputes):
    """Return what checkpoints ask of the integration."""
    actions = types.SimpleNamespace(recomputes=recomputes)
    return types.SimpleNamespace(actions=actions, keep_recomputed=list, open_reruns=OpenReruns())


def run_checkpoint(*, recomputes, fp8_is_on=False, **attributes):
    """Return the name of the node of what Megatron's checkpoint returns, where the plan recomputes or not."""
    offload = make_offload(recomputes=recomputes)
    checkpoint = random.CheckpointWithoutOutput()
    vars(checkpoint).update(attributes)
    with Patches() as patches:
        follow_checkpoints(patches, lambda: offload)
        with contextlib.ExitStack() as stack:
            if fp8_is_on:
                state = types.SimpleNamespace(is_fp8_enabled=lambda: True, get_fp8_recipe=lambda: None)
                state_before = random.FP8GlobalStateManager
                random.FP8GlobalStateManager = state
                stack.callback(setattr, random, "FP8GlobalStateManager", state_before)
            output = checkpoint.checkpoint(torch.sin, leaf(3) * 1)
        return type(output.grad_fn).__name__


MEGATRONS, OURS = "CheckpointWithoutOutputFunctionBackward", "SinBackward0"


@pytest.mark.parametrize(
    ("conditions", "node"),
    [
        ({"recomputes": True}, OURS),
        ({"recomputes": False}, MEGATRONS),
        ({"recomputes": True, "fp8_is_on": True}, MEGATRONS),
        ({"recomputes": True, "fp8_is_on": True, "fp8": False}, OURS),
        ({"recomputes": True, "ckpt_manager": types.SimpleNamespace(add_checkpoint=lambda one: None)}, MEGATRONS),
    ],
    ids=["a plan", "none", "FP8", "FP8 elsewhere", "several together"],
)
def test_checkpoints_of_a_plan_run_for_one_graph_and_others_as_megatron_has_them(conditions, node):
    assert run_checkpoint(**conditions) == node


@pytest.mark.parametrize("where", ["below a checkpoint", "without gradients"])
def test_where_regions_are_inert_megatrons_own_runs(where):
    offload = make_offload(recomputes=True)
    checkpoints = []

    def run_below(hidden):
        checkpoints.append(random.CheckpointWithoutOutput())
        return checkpoints[-1].checkpoint(torch.sin, hidden)

    with Patches() as patches:
        follow_checkpoints(patches, lambda: offload)
        if where == "without gradients":
            with torch.no_grad():
                run_below(leaf(3))
        else:
            torch.utils.checkpoint.checkpoint(run_below, leaf(3) * 1, use_reentrant=False)
    assert checkpoints
    assert all("_fgoffload_rerun" not in vars(one) for one in checkpoints)


def train_twice(make_function, random_use):
    """Return what two steps compute with functions that `make_function` returns, each made anew, and what is drawn behind."""
    torch.manual_seed(1)
    inputs, weight, results = leaf(6, 16), leaf(16, 4, seed=9), []
    for _ in range(3):
        function = make_function()
        if random_use is None:
            output = function(inputs * 1) @ weight
        else:
            hidden = inputs * 1
            rerun = Rerun(function, (hidden,), name="it", random_use=random_use)
            with rerun:
                made = function(hidden)
            rerun.note_outputs(made)
            output = use(rerun, made, weight)
        torch.rand(3)
        output.sum().backward()
        results += [output.detach(), torch.rand(3)]
    return [*results, inputs.grad, weight.grad]


DROPOUT = torch.nn.Dropout(0.5)
DRAWING = {
    "a function": lambda: lambda hidden: drop_some(hidden),
    "a module": lambda: DROPOUT,
    "a partial": lambda: functools.partial(torch.nn.functional.dropout, p=0.5),
}


@pytest.mark.parametrize("name", DRAWING)
def test_what_draws_random_numbers_draws_the_same_again_each_time(name):
    plain, again = (train_twice(DRAWING[name], one) for one in (None, RandomUse()))
    assert_same_bits(plain, again)
