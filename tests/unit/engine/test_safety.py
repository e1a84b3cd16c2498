"""What could make results wrong is refused by name; what could leave traces leaves none."""

import pytest
import torch
from support.sites import Sites, check_same_bits, get_gradients, make_engine

from fgoffload import StateError, TransferPolicy
from fgoffload.engine import DelayedCpuDevice, KeptReason, Lane
from fgoffload.plan import Site


def leaf(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_a_tensor_changed_in_place_before_it_leaves_is_refused_with_its_site():
    engine = make_engine()
    sites = Sites(engine, microbatch=3)
    h = leaf(64, 64) * 2
    region = engine.find_region(Site(chunk=0, layer=5, tag="core_attn"), sites.lane)
    region.enter(h)
    with region.saving():
        output = h.sin()
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(StateError, match=r"layers\.5\.core_attn mb=3 saved for backward was changed in place before it left"):
        region.end(output)


def test_a_tensor_changed_in_place_while_its_copy_is_queued_is_refused():
    engine = make_engine(DelayedCpuDevice(), policy=TransferPolicy(window_bytes=1 << 30))
    h = leaf(64, 64) * 2
    output = Sites(engine)(lambda h: h.sin(), h)
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(StateError, match="changed in place before backward took it"):
        output.sum().backward()


def run_with_discarded_output(
    sites: Sites, x: torch.Tensor, w: torch.Tensor, *, announces: bool, is_held: bool
) -> torch.Tensor:
    """A norm whose output is saved by a product, then emptied, and filled again before backward comes to the product.

    So does Megatron's checkpoint without output.
    """
    h = x * 2
    with torch.no_grad():
        normed_bytes = h.detach().softmax(-1)
    normed = torch.empty_like(normed_bytes).copy_(normed_bytes).requires_grad_()
    if sites.engine and announces:
        sites.engine.keep_recomputed([normed])
    output = sites(lambda n: n @ w, normed, tag="qkv_linear", is_held=is_held)
    storage = normed.untyped_storage()
    nbytes = storage.nbytes()
    storage.resize_(0)
    if sites.engine and is_held:
        sites.engine.flush()

    def refill(gradient: torch.Tensor) -> None:
        storage.resize_(nbytes)
        storage.copy_(normed_bytes.untyped_storage())

    output.register_hook(refill)
    return output.sin()


def test_a_storage_that_is_emptied_before_its_copy_is_refused():
    x, w = leaf(64, 64), torch.nn.Parameter(leaf(64, 64, seed=1))
    with pytest.raises(
        StateError, match=r"lost its storage before it left for the host: the storage has 0 bytes, and had 16384"
    ):
        run_with_discarded_output(Sites(make_engine()), x, w, announces=False, is_held=True)


@pytest.mark.parametrize("is_held", [True, False])
def test_a_storage_that_recompute_owns_stays_and_gives_the_same_bits(is_held):
    x, w = leaf(64, 64), torch.nn.Parameter(leaf(64, 64, seed=1))
    engine = make_engine()
    expected = get_gradients(
        lambda sites: run_with_discarded_output(sites, x, w, announces=True, is_held=is_held) + 0 * x, [w], Sites(None)
    )
    found = get_gradients(
        lambda sites: run_with_discarded_output(sites, x, w, announces=True, is_held=is_held) + 0 * x, [w], Sites(engine)
    )
    assert torch.equal(expected[0], found[0])
    assert engine.finish_step().tags["qkv_linear"].d2h_bytes == 0


def test_nested_regions_give_the_same_bits():
    x = leaf(64, 64)

    def forward(sites: Sites) -> torch.Tensor:
        return sites(lambda h: sites(lambda k: k.exp(), h.sin(), tag="moe_act") * h, x * 2, tag="mlp_norm")

    engine = check_same_bits(forward, [x])
    assert set(engine.finish_step().tags) == {"mlp_norm", "moe_act"}
    engine.close()


def test_a_region_that_is_ended_twice_is_refused():
    engine = make_engine()
    region = engine.find_region(Site(chunk=0, layer=0, tag="core_attn"), Lane(chunk=0, microbatch=0))
    region.end(None)
    with pytest.raises(StateError, match=r"layers\.0\.core_attn mb=0 was ended twice"):
        region.end(None)


def test_the_output_of_a_region_may_be_changed_in_place_and_deallocated():
    x = leaf(64, 64)

    def forward(sites: Sites) -> torch.Tensor:
        h = sites(lambda h: torch.nn.functional.silu(h), x * 2)
        h.add_(1)
        assert h._base is None
        return h

    check_same_bits(forward, [x]).close()


class DoublesWhatItSaved(torch.autograd.Function):
    """Changes its saved tensor in place in backward, as fused losses do with theirs."""

    @staticmethod
    def forward(ctx, tensor):
        ctx.save_for_backward(tensor)
        return tensor * tensor

    @staticmethod
    def backward(ctx, gradient):
        (saved,) = ctx.saved_tensors
        saved.mul_(2)
        return saved * gradient


@pytest.mark.parametrize("make_device", [lambda: None, DelayedCpuDevice], ids=["cpu", "delayed"])
def test_a_backward_that_changes_what_another_op_saved_too_is_refused_as_torch_refuses_it(make_device):
    for engine in (None, make_engine(make_device())):
        x = leaf(64, 64)
        output = Sites(engine)(lambda h: h.cos() + DoublesWhatItSaved.apply(h), x * 2)
        with pytest.raises(
            RuntimeError, match="changed in place by a backward" if engine else "modified by an inplace operation"
        ):
            output.sum().backward()


def test_a_kept_graph_whose_saved_tensor_backward_changed_is_refused_as_torch_refuses_it():
    for engine in (None, make_engine()):
        x = leaf(64, 64)
        sites = Sites(engine)
        output = sites(DoublesWhatItSaved.apply, sites(lambda h: h.sin(), x * 2)).sum()
        output.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="changed in place" if engine else "modified by an inplace operation"):
            output.backward()


def test_a_change_in_place_is_said_when_somebody_wants_the_tensor_and_not_before():
    engine = make_engine(DelayedCpuDevice(), policy=TransferPolicy(window_bytes=1 << 30, prefetch_bytes=0))
    h = leaf(64, 64) * 2
    output = Sites(engine)(lambda h: h.sin(), h).sum()
    with torch.no_grad():
        h.add_(1)
    engine.close()  # releases the source, and finds the change; torch too says it only in backward
    with pytest.raises(StateError, match="changed in place before its copy to the host was done"):
        output.backward()


def test_a_storage_that_was_emptied_and_refilled_between_two_saves_is_not_taken_for_the_same():
    x = leaf(64, 64)

    def forward(sites: Sites) -> torch.Tensor:
        h = x * 2
        first = sites(lambda h: h.sin(), h)
        storage, nbytes, address = h.untyped_storage(), h.untyped_storage().nbytes(), h.data_ptr()
        refill = h.detach() + 1
        elsewhere = []
        while storage.data_ptr() in (0, address):  # the same bytes again would not be told from the first ones
            storage.resize_(0)
            elsewhere.append(torch.empty(64, 64))
            storage.resize_(nbytes)
        h.data.copy_(refill)
        second = sites(lambda h: h.cos(), h)
        del first, elsewhere  # the first save is lost, and nobody wants it
        return second

    check_same_bits(forward, [x]).close()


def test_a_storage_that_was_changed_in_place_between_two_saves_is_not_taken_for_the_same():
    x = leaf(64, 64)

    def forward(sites: Sites) -> torch.Tensor:
        h = x * 2
        first = sites(lambda h: h.sin(), h)
        with torch.no_grad():
            h.add_(1)
        second = sites(lambda h: h.cos(), h)
        del first  # the first save is lost, and nobody wants it
        return second

    check_same_bits(forward, [x]).close()


def test_data_that_a_parameter_gets_before_backward_is_used_as_torch_uses_it():
    gradients = []
    for engine in (None, make_engine()):
        x, w = leaf(8, 8), torch.nn.Parameter(torch.eye(8))
        output = Sites(engine)(lambda h, w=w: h @ w, x * 2)
        w.data = torch.eye(8) * 5
        output.sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
    assert gradients[0][0, 0] == 10


def test_a_backward_inside_of_a_region_does_not_end_it():
    x = leaf(64, 64)

    def function(h: torch.Tensor) -> torch.Tensor:
        y = h.sin()
        (gradient,) = torch.autograd.grad(y.sum(), h, retain_graph=True)
        return y * gradient.detach()

    check_same_bits(lambda sites: sites(function, x * 2), [x]).close()


def test_kinds_of_tensors_without_plain_bytes_stay():
    x = leaf(8, 8)

    def function(h: torch.Tensor) -> torch.Tensor:
        return h * torch._efficientzerotensor(8, 8) + h.sin()

    engine = check_same_bits(lambda sites: sites(function, x * 2), [x])
    assert KeptReason.LAYOUT.value in engine.finish_step().tags["core_attn"].kept_bytes
    engine.close()


def test_marks_do_not_pile_up_on_a_leaf():
    x = leaf(64, 64)
    engine = make_engine()
    for _ in range(3):
        Sites(engine)(lambda h: h.sin(), x).sum().backward()
    assert not x._backward_hooks
    engine.close()
