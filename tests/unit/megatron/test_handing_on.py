"""What runs again is handed on: whoever uses it saves nothing, nothing is copied into it, and what is not seen costs a copy."""

import contextlib
import gc
import weakref

import pytest
import torch
from support.tensors import assert_same_bits, leaf, without_the_cyclic_collector

from fgoffload import StateError
from fgoffload.engine.identity import StorageRef
from fgoffload.engine.place import Place
from fgoffload.integrations.megatron.cpu_support import apply_cpu_support, needs_cpu_support
from fgoffload.integrations.megatron.handing_on import HandingOn, OpenReruns
from fgoffload.integrations.megatron.reruns import Rerun

pytest.importorskip("megatron.core.tensor_parallel.random")

PLACE = Place(None, "a test")


@pytest.fixture(autouse=True)
def cpu():
    with apply_cpu_support() if needs_cpu_support() else contextlib.nullcontext():
        yield


@pytest.fixture
def copied(monkeypatch):
    """The bytes of each copy into a storage."""
    sizes, copy = [], torch.UntypedStorage.copy_

    def count(storage, source, *args):
        sizes.append(storage.nbytes())
        return copy(storage, source, *args)

    monkeypatch.setattr(torch.UntypedStorage, "copy_", count)
    return sizes


def normalize(hidden):
    return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-5)


def halve(hidden):
    both = hidden.exp() * 2
    return both[:, :8], both[:, 8:]


def multiply(output, weight):
    return output @ weight


def multiply_turned(output, weight):
    return (weight.T @ output.T).T


def multiply_parts(output, weight):
    """Use parts of the output, one of them empty, as experts use their tokens."""
    return torch.cat([part @ weight for part in torch.split(output, [2, 0, 4])])


def multiply_and_keep_more(output, weight):
    """Save what was made of the output too."""
    return (output.sin() * output.view(3, 2, -1).flatten(0, 1)) @ weight


USES = [multiply, multiply_turned, multiply_parts, multiply_and_keep_more]


def begin(function, hidden):
    rerun = Rerun(function, (hidden,), name="it")
    with rerun:
        outputs = function(hidden)
    rerun.note_outputs(outputs)
    return rerun, outputs[0] if isinstance(outputs, tuple) else outputs


def run(function, use, *, change=lambda output: output, look=lambda output: None, hands_on=True):
    """Return an output and gradients where `function` runs again."""
    hidden, weight = leaf(6, 16), leaf(8 if function is halve else 16, 4, seed=1)
    rerun, output = begin(function, hidden * 1)
    changed = change(output)
    with rerun.handing_on() if hands_on else contextlib.nullcontext():
        product = use(changed, weight)
    rerun.empty_outputs()
    product.register_hook(lambda gradient: rerun.run())
    loss = product.sin().sum()
    look(output)
    del output, changed, product
    loss.backward()
    return [loss.detach(), hidden.grad, weight.grad]


def run_plainly(function, use, *, change=lambda output: output):
    hidden, weight = leaf(6, 16), leaf(8 if function is halve else 16, 4, seed=1)
    outputs = function(hidden * 1)
    loss = use(change(outputs[0] if isinstance(outputs, tuple) else outputs), weight).sin().sum()
    loss.backward()
    return [loss.detach(), hidden.grad, weight.grad]


@pytest.mark.parametrize("function", [normalize, halve])
@pytest.mark.parametrize("use", USES)
def test_bits_stay_and_nothing_is_copied(function, use, copied):
    expected = run_plainly(function, use)
    assert_same_bits(run(function, use), expected)
    assert not copied
    # So it is without.
    assert_same_bits(run(function, use, hands_on=False), expected)
    assert len(copied) == 1


@pytest.mark.parametrize("hands_on", [True, False])
def test_the_storage_of_the_output_is_gone_behind_forward(hands_on):
    made = []

    def note(output):
        made.append(StorageRef(output))
        return output

    hidden, weight = leaf(6, 16), leaf(16, 4, seed=1)
    rerun, output = begin(normalize, hidden * 1)
    note(output)
    with rerun.handing_on() if hands_on else contextlib.nullcontext():
        product = output @ weight
    rerun.empty_outputs()
    del output
    assert [one.is_freed for one in made] == [hands_on]
    product.register_hook(lambda gradient: rerun.run())
    product.sum().backward()
    assert_same_bits([hidden.grad, weight.grad], run_sum()[1:])


def run_sum():
    hidden, weight = leaf(6, 16), leaf(16, 4, seed=1)
    loss = (normalize(hidden * 1) @ weight).sum()
    loss.backward()
    return [loss.detach(), hidden.grad, weight.grad]


def test_an_output_that_was_changed_in_place_before_its_use_is_kept(copied):
    def change(output):
        return output.mul_(1.5)

    sizes = []
    found = run(normalize, multiply, change=change, look=lambda output: sizes.append(output.untyped_storage().nbytes()))
    assert_same_bits(found, run_plainly(normalize, multiply, change=change))
    assert sizes == [6 * 16 * 4]
    assert not copied


def test_who_holds_the_output_finds_a_copy_which_is_there_once(copied):
    held, made = [], []

    def watched(given):
        result = normalize(given)
        made.append(StorageRef(result))
        return result

    def use(output, weight):
        product = output @ weight
        # Of a tensor that the use makes: its hook comes behind the second run, and before the backward of the use.
        product.register_hook(lambda gradient: states.append([one.is_freed for one in made]))
        return product * 1

    states = []
    found = run(watched, use, look=lambda output: held.append(output.detach()))
    assert_same_bits(found, run_plainly(normalize, multiply))
    assert copied == [6 * 16 * 4]
    assert states == [[False, True]]
    assert_same_bits(held, [normalize(leaf(6, 16).detach())])


def test_a_second_backward_of_the_same_graph_computes_the_same():
    hidden, weight, calls = leaf(6, 16), leaf(16, 4), []

    def counted(given):
        calls.append(1)
        return normalize(given)

    rerun, output = begin(counted, hidden * 1)
    with rerun.handing_on():
        product = output @ weight
    rerun.empty_outputs()
    del output
    product.register_hook(lambda gradient: rerun.run())
    first = torch.autograd.grad(product.sum(), [hidden, weight], retain_graph=True)
    second = torch.autograd.grad(product.sum(), [hidden, weight])
    assert_same_bits(first, second)
    assert len(calls) == 2


@pytest.mark.parametrize("has_run", [False, True])
def test_a_graph_that_is_dropped_frees_everything_at_once(has_run):
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
        with rerun.handing_on():
            product = output @ leaf(16, 4)
        rerun.empty_outputs()
        product.register_hook(lambda gradient, rerun=rerun: rerun.run())
        del output
        if has_run:
            rerun.run()
            assert not made[1].is_freed
        alive = weakref.ref(rerun)
        del hidden, product, rerun
        assert given.is_freed
        assert all(one.is_freed for one in made)
        assert alive() is None


@pytest.mark.parametrize("is_parameter", [True, False])
def test_a_weight_that_is_changed_behind_its_use_is_refused(is_parameter):
    weight = torch.nn.Parameter(torch.ones(16, 4)) if is_parameter else leaf(16, 4)
    rerun, output = begin(normalize, leaf(6, 16) * 1)
    with rerun.handing_on():
        product = output @ weight
    rerun.empty_outputs()
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(StateError, match="that a recompute of it saved for backward was changed in place"):
        product.sum().backward()


def test_backward_that_comes_another_way_runs_it_too():
    hidden, weight = leaf(6, 16), leaf(16, 4, seed=1)
    rerun, output = begin(normalize, hidden * 1)
    with rerun.handing_on():
        product = output @ weight
    rerun.empty_outputs()
    product.sum().backward()  # nothing calls `run`
    assert_same_bits([hidden.grad, weight.grad], run_sum()[1:])


def test_reruns_that_are_in_use_together_are_told_apart():
    def train(*, again):
        reruns = OpenReruns()
        hidden, weight = leaf(6, 16), leaf(16, 16, seed=1)
        given, opened = hidden * 1, []

        def make(function, tensor):
            if not again:
                return function(tensor)
            rerun = Rerun(function, (tensor,), name="it", found=reruns.find_made())
            with rerun:
                output = function(tensor)
            rerun.note_outputs(output)
            reruns.open(rerun)
            opened.append(rerun)
            return output

        def use(*tensors):
            with HandingOn(reruns.find_made(), PLACE) if again else contextlib.nullcontext():
                return sum(one @ weight for one in tensors)

        normed = make(normalize, given)
        active = make(torch.sin, use(normed))
        product = use(active, normed)
        for rerun in reversed(opened):
            reruns.close(rerun)
            rerun.empty_outputs()
        assert not reruns.find_made()
        del normed, active
        for rerun in opened:
            product.register_hook(lambda gradient, rerun=rerun: rerun.run())
        product.sum().backward()
        return [hidden.grad, weight.grad]

    assert_same_bits(train(again=True), train(again=False))


def test_below_hooks_of_others_nothing_is_handed_on():
    reruns = OpenReruns()
    rerun, output = begin(normalize, leaf(6, 16) * 1)
    reruns.open(rerun)
    assert list(reruns.find_made()) == [one.key for one in rerun.made.values()]
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one):
        assert not reruns.find_made()
    with torch.no_grad():
        assert not reruns.find_made()
    assert output is not None
