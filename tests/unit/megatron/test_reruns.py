"""Tests recompute within the graph of its forward: bitwise identical, no extra memory or copies, and clear errors."""

import contextlib
import functools
import gc
import weakref

import pytest
import torch
from support.tensors import assert_same_bits, leaf, without_the_cyclic_collector

from fgoffload import StateError
from fgoffload.engine import is_inert
from fgoffload.engine.identity import StorageRef
from fgoffload.engine.place import Place
from fgoffload.integrations.megatron.patching.cpu_support import apply_cpu_support, needs_cpu_support
from fgoffload.integrations.megatron.recompute import reruns
from fgoffload.integrations.megatron.recompute.detached_outputs import DetachedOutputs
from fgoffload.integrations.megatron.recompute.reruns import OpenReruns, RandomUse, Rerun

pytest.importorskip("megatron.core.tensor_parallel.random")

BASELINE, REFILLED, DETACHED = "baseline", "refilled outputs", "detached outputs"
"""No recompute; outputs that are emptied and refilled in backward; outputs that their consumer does not save."""
OUTPUT_BYTES = 6 * 16 * 4


@pytest.fixture(autouse=True)
def cpu():
    with apply_cpu_support() if needs_cpu_support() else contextlib.nullcontext():
        yield


@pytest.fixture
def copied(monkeypatch):
    """Record the bytes of each copy into a storage."""
    sizes, copy = [], torch.UntypedStorage.copy_

    def count(storage, source, *args):
        sizes.append(storage.nbytes())
        return copy(storage, source, *args)

    monkeypatch.setattr(torch.UntypedStorage, "copy_", count)
    return sizes


def normalize(hidden):
    """Apply a norm of plain ops, which uses its input twice."""
    return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-5)


def scale_and_activate(hidden, probabilities):
    gate, up = hidden.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up * probabilities


def return_views(hidden):
    both = hidden.exp() * 2
    return both[:, :8], both[:, 8:]


def apply_dropout(hidden):
    return torch.nn.functional.dropout(hidden, 0.5) * hidden


def multiply(output, weight):
    return output @ weight


def multiply_transposed(output, weight):
    return (weight.T @ output.T).T


def multiply_parts(output, weight):
    """Multiply parts of the output, one of them empty, as experts do with their tokens."""
    return torch.cat([part @ weight for part in torch.split(output, [2, 0, len(output) - 2])])


def multiply_and_save_more(output, weight):
    """Also save tensors derived from the output."""
    return (output.sin() * output.view(3, 2, -1).flatten(0, 1)) @ weight


def begin(function, *inputs, random_use=None):
    """Run the forward of a recompute; return the recompute and the outputs."""
    rerun = Rerun(function, inputs, name="it", random_use=RandomUse() if random_use is None else random_use, known_outputs={})
    with rerun:
        outputs = function(*inputs)
    rerun.record_outputs(outputs)
    return rerun, outputs


def run(function, *shapes, mode, use=multiply, change=lambda output: output, inspect=lambda output: None):
    """Train with `function` recomputed by `mode`; return the loss, the gradients and later random numbers."""
    torch.manual_seed(1)
    leaves = [leaf(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    inputs = tuple(one * 1 for one in leaves)
    rerun, outputs = (None, function(*inputs)) if mode is BASELINE else begin(function, *inputs)
    output = change(reruns.as_tuple(outputs)[0])
    weight = leaf(output.size(-1), 4, seed=9)
    del outputs
    with rerun.detached_outputs() if mode is DETACHED else contextlib.nullcontext():
        product = use(output, weight)
    if rerun is not None:
        rerun.empty_outputs()
        product.register_hook(lambda gradient: rerun.run())
    loss = product.sin().sum() + (inputs[0].sin() * inputs[0].cos()).sum()
    inspect(output)
    del output, product
    torch.rand(3)  # other code draws random numbers between forward and backward
    loss.backward()
    return [loss.detach(), weight.grad, *(one.grad for one in leaves), torch.rand(3)]


@pytest.mark.parametrize("mode", [REFILLED, DETACHED])
@pytest.mark.parametrize(
    ("function", "shapes", "use"),
    [
        (normalize, [(6, 16)], multiply),
        (normalize, [(6, 16)], multiply_transposed),
        (normalize, [(6, 16)], multiply_parts),
        (normalize, [(6, 16)], multiply_and_save_more),
        (normalize, [(0, 16)], multiply),
        (torch.exp, [(6, 16)], multiply),  # its backward needs its own output
        (scale_and_activate, [(6, 16), (6, 1)], multiply),
        (return_views, [(6, 16)], multiply),
        (return_views, [(6, 16)], multiply_parts),
        (apply_dropout, [(6, 16)], multiply),
    ],
)
def test_recompute_is_bitwise_identical_to_the_baseline(function, shapes, use, mode, copied):
    expected = run(function, *shapes, mode=BASELINE, use=use)
    assert_same_bits(run(function, *shapes, mode=mode, use=use), expected)
    # An emptied output is refilled by a copy. A detached one has no storage to refill.
    assert (sum(copied) > 0) == (mode is REFILLED and shapes[0][0] > 0)


@pytest.mark.parametrize("mode", [REFILLED, DETACHED])
@pytest.mark.parametrize("has_run", [False, True])
def test_dropping_the_graph_frees_everything_immediately(has_run, mode):
    gc.collect()
    with without_the_cyclic_collector():
        made = []

        def watched(given):
            result = normalize(given)
            made.append(StorageRef(result))
            return result

        hidden = leaf(6, 16) * 1
        given = StorageRef(hidden)
        rerun, output = begin(watched, hidden)
        with rerun.detached_outputs() if mode is DETACHED else contextlib.nullcontext():
            product = output @ leaf(16, 4)
        rerun.empty_outputs()
        product.register_hook(lambda gradient, rerun=rerun: rerun.run())
        del output
        assert made[0].is_freed is (mode is DETACHED)
        if has_run:
            rerun.run()
        alive = weakref.ref(rerun)
        del hidden, product, rerun
        assert given.is_freed
        assert all(one.is_freed for one in made)
        assert alive() is None


def test_a_forward_that_raises_keeps_no_memory():
    open_reruns = OpenReruns()
    with without_the_cyclic_collector():
        rerun, output = begin(normalize, leaf(6, 16) * 1)
        made = StorageRef(output)
        open_reruns.add(rerun)
        with contextlib.suppress(ArithmeticError), DetachedOutputs(open_reruns.find_outputs(), Place(None, "a test")):
            del output
            raise ArithmeticError
        assert not is_inert()  # foreign hooks would make it inert
        del rerun
        assert made.is_freed
    assert not open_reruns.find_outputs()


@pytest.mark.parametrize(
    "change", [lambda output: output.mul_(1.5), lambda output: output.index_fill_(0, torch.tensor([1]), 2)]
)
def test_an_output_changed_in_place_before_use_is_kept(change, copied):
    sizes = []
    expected = run(normalize, (6, 16), mode=BASELINE, change=change)
    found = run(
        normalize, (6, 16), mode=DETACHED, change=change, inspect=lambda output: sizes.append(output.untyped_storage().nbytes())
    )
    assert_same_bits(found, expected)
    assert (sizes, copied) == ([OUTPUT_BYTES], [])


def test_changing_an_output_in_place_after_use_does_not_change_gradients():
    def use(output, weight):
        product = output @ weight
        output.mul_(2)
        return product

    assert_same_bits(run(normalize, (6, 16), mode=DETACHED, use=use), run(normalize, (6, 16), mode=BASELINE))


def test_a_reference_to_a_detached_output_sees_a_copy(copied):
    detached = []
    found = run(normalize, (6, 16), mode=DETACHED, inspect=lambda output: detached.append(output.detach()))
    assert_same_bits(found, run(normalize, (6, 16), mode=BASELINE))
    assert copied == [OUTPUT_BYTES]
    assert_same_bits(detached, [normalize(leaf(6, 16).detach())])


@pytest.mark.parametrize("mode", [REFILLED, DETACHED])
@pytest.mark.parametrize("calls_run", [True, False], ids=["by its hook", "by the first tensor that backward unpacks"])
def test_every_backward_of_a_graph_recomputes_even_after_an_exception(calls_run, mode):
    hidden, weight, runs = leaf(6, 16), leaf(16, 4), []

    def fail_once(given):
        runs.append(1)
        if len(runs) == 2:
            raise MemoryError
        return normalize(given)

    rerun, output = begin(fail_once, hidden * 1)
    with rerun.detached_outputs() if mode is DETACHED else contextlib.nullcontext():
        product = output @ weight
    if calls_run:
        rerun.empty_outputs()
        product.register_hook(lambda gradient: rerun.run())
    loss = product.sum()
    with pytest.raises(MemoryError):
        loss.backward(retain_graph=True)
    found = [torch.autograd.grad(loss, [hidden, weight], retain_graph=True) for _ in range(2)]
    expected, factor = leaf(6, 16), leaf(16, 4)
    (normalize(expected * 1) @ factor).sum().backward()
    for gradients in found:
        assert_same_bits(gradients, [expected.grad, factor.grad])


# Errors.


def make_changing(*functions):
    """Return a function that behaves differently in each run."""
    remaining = iter(functions)
    return lambda hidden: next(remaining)(hidden)


@pytest.mark.parametrize("mode", [REFILLED, DETACHED])
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: make_changing(normalize, lambda one: one * 2), r"saved 0 tensors and returned 1, but forward saved \d and"),
        (
            lambda: make_changing(torch.sin, lambda one: one[:3].sin()),
            r"saved a tensor of shape \[3, 16\] and type torch.float32, but",
        ),
        (lambda: make_changing(torch.sin, lambda one: one.sin().double()), r"returned torch.float64 of 768 bytes, but"),
        (lambda: lambda hidden: hidden.exp().mul_(3) * 1, r"saved by a recompute of it, was changed in place afterwards"),
    ],
    ids=["number", "shape", "type", "changed in place"],
)
def test_functions_that_recompute_differently_raise(function, message, mode):
    with pytest.raises(StateError, match=message):
        run(function(), (6, 16), mode=mode)


@pytest.mark.parametrize("which", ["input", "weight of the function", "weight of the use"])
def test_in_place_changes_of_saved_tensors_raise(which):
    tensors = {
        "input": leaf(6, 16) * 1,
        "weight of the function": torch.nn.Parameter(torch.ones(16)),
        "weight of the use": leaf(16, 4),
    }
    given, factor, weight = tensors.values()
    rerun, output = begin(lambda one: (one * factor).sin(), given)
    with rerun.detached_outputs():
        product = output @ weight
    rerun.empty_outputs()
    with torch.no_grad():
        tensors[which].add_(1)
    with pytest.raises(StateError, match="that a recompute of it saved for backward was changed in place"):
        product.sum().backward()


DROPOUT = torch.nn.Dropout(0.5)
DRAWING = {
    "a function": lambda: lambda hidden: apply_dropout(hidden),
    "a module": lambda: DROPOUT,
    "a partial": lambda: functools.partial(torch.nn.functional.dropout, p=0.5),
    "no random numbers": lambda: lambda hidden: normalize(hidden),
}


@pytest.mark.parametrize("name", DRAWING)
def test_random_numbers_are_the_same_in_every_recompute(name):
    def train(random_use):
        torch.manual_seed(1)
        inputs, results = leaf(6, 16), []
        for _ in range(3):  # the first forward detects the use of random numbers
            function, hidden = DRAWING[name](), inputs * 1
            output = function(hidden) if random_use is None else begin(function, hidden, random_use=random_use)[1]
            torch.rand(3)
            output.square().sum().backward()
            results += [output.detach(), torch.rand(3)]
        return [*results, inputs.grad]

    assert_same_bits(train(RandomUse()), train(None))
