"""Tests that code that works in plain torch is bitwise identical with offload, and shares no additional memory."""

import contextlib

import pytest
import torch
from support.models import ALL
from support.sites import DelayedCpuDevice
from torch import nn
from torch.nn import functional

import fgoffload
from fgoffload import StateError
from fgoffload.engine import CpuDevice, KeptReason

pytestmark = pytest.mark.quick

N = 64
DEVICES = pytest.mark.parametrize("make_device", [CpuDevice, DelayedCpuDevice])


def make_block(device=None, **options):
    return fgoffload.saved_tensors(ALL, device=device or "cpu", **{"group_bytes": 1, **options})


def run_both(step, make_device=CpuDevice):
    """Check that `step` is bitwise identical in a block that offloads every tensor, and return the offloaded bytes."""
    plain = step(contextlib.nullcontext())
    block = make_block(make_device())
    offloaded = [step(block) for _ in range(2)]
    offloaded_bytes = block.stats().d2h_bytes
    block.close()
    for found in offloaded:
        assert len(plain) == len(found)
        assert all(map(torch.equal, plain, found))
    return offloaded_bytes


class Product(torch.autograd.Function):
    """`(weight * other).sum()`, whose gradients are the saved tensors themselves."""

    @staticmethod
    def forward(ctx, weight, other):
        ctx.save_for_backward(weight, other)
        return (weight * other).sum()

    @staticmethod
    def backward(ctx, gradient):
        weight, other = ctx.saved_tensors
        return other, weight if ctx.needs_input_grad[1] else None


@DEVICES
@pytest.mark.parametrize("is_block", [True, False])
def test_a_saved_tensor_is_not_copied_before_its_op_has_run(is_block, make_device):
    # rrelu saves its noise before writing it, and does not increment the version.
    class Noisy(nn.Module):
        def forward(self, x):
            return functional.rrelu(functional.rrelu(x * 2, training=True).sin(), training=True).cos()

    def step(context=None):
        torch.manual_seed(0)
        x = torch.linspace(-1, 1, N * N).view(N, N).requires_grad_()
        with context or contextlib.nullcontext():
            loss = model(x).sum()
        loss.backward()
        return x.grad

    model = nn.Sequential(Noisy())
    plain = step()
    if is_block:
        handle = make_block(make_device())
        found = step(handle)
    else:
        config = fgoffload.TransferConfig(min_offloaded_bytes=0, prefetch_bytes=4 * N, host_budget_bytes=1 << 24)
        handle = fgoffload.offload(model, ["0"], config, device=make_device())  # offloads the region in parts of 64 elements
        found = step()
    stats = handle.stats()
    assert stats.d2h_bytes >= 4 * 4 * N * N
    assert sum(tag.groups for tag in stats.tags.values()) >= 4
    assert torch.equal(plain, found)
    handle.close()


def share_memory(one, other):
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@DEVICES
@pytest.mark.parametrize(
    ("is_kept", "group_bytes"), [(True, 1), (False, 1), (False, 1 << 20)], ids=["kept", "offloaded", "offloaded together"]
)
def test_gradients_share_no_memory_that_they_do_not_share_in_plain_torch(is_kept, group_bytes, make_device):
    def run(context):
        weight, other, third = (nn.Parameter(torch.full((N, N), float(value))) for value in (1, 2, 3))
        buffer, twin = torch.full((N, N), 4.0), torch.full((N, N), 5.0)
        with context:
            loss = Product.apply(weight, other)  # both gradients are parameters
            loss = loss + Product.apply(third, buffer)
            fourth, fifth, sixth = (nn.Parameter(torch.ones(N, N)) for _ in range(3))
            loss = loss + Product.apply(fourth, twin.detach()) + Product.apply(fifth, twin) + Product.apply(sixth, twin)
            activation = nn.Parameter(torch.ones(N, N)) * 1
            seventh, eighth = nn.Parameter(torch.ones(N, N)), nn.Parameter(torch.ones(N, N))
            loss = loss + Product.apply(seventh, activation) + Product.apply(eighth, activation)
            whole = torch.full((N + 1, N), 6.0)
            ninth, tenth = nn.Parameter(torch.ones(N, N)), nn.Parameter(torch.ones(N, N))
            piece = whole[1:]
            loss = loss + Product.apply(ninth, piece) + Product.apply(tenth, piece)
            loss = loss + (torch.ones(N + 1, N, requires_grad=True) * whole).sum()
            loss = loss + torch.ones(N, N, requires_grad=True).sin().sum()  # ends the previous group
        loss.backward()
        leaves = [weight, other, third, fourth, fifth, sixth, seventh, eighth, ninth, tenth]
        held = [*leaves, buffer, twin, activation, whole, piece]
        gradients = [leaf.grad for leaf in leaves]
        pairs = {
            (index, number)
            for index, gradient in enumerate(gradients)
            for number, tensor in enumerate([*held, *gradients])
            if tensor is not gradient and share_memory(gradient, tensor)
        }
        return gradients, pairs

    expected, expected_pairs = run(contextlib.nullcontext())
    keep = (lambda tensor: True) if is_kept else None
    config = fgoffload.TransferConfig(min_offloaded_bytes=0, host_budget_bytes=1 << 24, keep=keep)
    block = fgoffload.saved_tensors(config, device=make_device(), group_bytes=group_bytes)
    found, pairs = run(block)
    assert all(map(torch.equal, expected, found))
    assert pairs <= expected_pairs
    assert (block.stats().d2h_bytes == 0) is is_kept
    block.close()


class OverwriteLogits(torch.autograd.Function):
    """Writes its gradient over its input, as Liger's cross entropy does, without a version change."""

    @staticmethod
    def forward(ctx, logits):
        loss = logits.logsumexp(-1).sum()
        logits.detach().numpy()[:] = logits.detach().softmax(-1).numpy()
        ctx.save_for_backward(logits.detach())
        return loss

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0] * gradient


@DEVICES
def test_a_second_save_after_a_write_without_a_version_change_offloads_the_new_bytes(make_device):
    inputs = torch.linspace(-1, 1, N * N).view(N, N)

    def step(context):
        x = inputs.clone().requires_grad_()
        with context:
            logits = x * 2
            log = logits.cosh()  # only for a log: saves the logits, but is not part of the loss
            _ = log.sin()  # the next op: the previous save is offloaded now
            loss = OverwriteLogits.apply(logits)
            _ = loss.sin()
        loss.backward()
        return [x.grad]

    assert run_both(step, make_device) > 0


@DEVICES
def test_an_unchanged_storage_that_is_saved_again_is_offloaded_once(make_device):
    def step(context):
        x = torch.linspace(-1, 1, N * N).view(N, N).requires_grad_()
        with context:
            h = x * 2
            loss = (h.sin().cos() + h.exp().cosh()).sum()
        loss.backward()
        return [x.grad]

    assert run_both(step, make_device) == 2 * 3 * 4 * N * N  # `h`, its sine, and its exponential, which two ops save


class Scale(torch.autograd.Function):
    """`x * scale`; if `backward_mode` is "write", its backward writes the gradient over the saved scale."""

    @staticmethod
    def forward(ctx, x, scale, backward_mode):
        ctx.backward_mode = backward_mode
        ctx.save_for_backward(scale)
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        (scale,) = ctx.saved_tensors
        return scale.mul_(gradient) if ctx.backward_mode == "write" else scale * gradient, None, None


@DEVICES
def test_a_backward_may_overwrite_a_saved_tensor_that_an_earlier_backward_used(make_device):
    def step(context):
        x = torch.linspace(-1, 1, N * N).view(N, N).requires_grad_()
        with context:
            hidden = Scale.apply(x, scale := x.detach() * 2, "write")
            loss = Scale.apply(hidden, scale, "read").sin().sum()
            del scale
        torch.autograd.grad(loss, hidden, retain_graph=True)
        return torch.autograd.grad(loss, x, create_graph=True)

    assert run_both(step, make_device) > 0


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda v: f(v).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones_like(x))[0],
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "grad of grad": lambda f, x: torch.func.grad(lambda v: torch.func.grad(lambda w: f(w).sum())(v).sum())(x),
    "hessian": lambda f, x: torch.func.hessian(lambda v: f(v).sum())(x[0]),
    "jvp of jvp": lambda f, x: torch.func.jvp(
        lambda v: torch.func.jvp(f, (v,), (torch.ones_like(v),))[1], (x,), (torch.ones_like(x),)
    )[1],
    "vmap of jvp": lambda f, x: torch.func.vmap(lambda v: torch.func.jvp(f, (x,), (v,))[1])(torch.stack([x, x])),
    "vmap": lambda f, x: torch.func.vmap(f)(x),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # from torch's own jvp
@pytest.mark.parametrize("name", TRANSFORMS)
def test_torch_func_works_inside_and_around_a_model_and_in_a_block(name):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            hidden = self.a(x)
            return self.b(hidden.tanh() + TRANSFORMS[name](torch.sin, x.detach()).sum())

    def step(model, context):
        model.zero_grad()
        with context:
            loss = model(x).square().sum()
            if name != "vmap":
                loss = loss + TRANSFORMS[name](lambda v: model.b(model.a(v).tanh()).sin(), x).sum().square()
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in model.parameters())]

    x = torch.linspace(-1, 1, 32).view(4, 8)
    plain = step(Model(), contextlib.nullcontext())
    model, block = Model(), make_block()
    handle = fgoffload.offload(model, ["a", "b"], ALL)
    for _ in range(2):
        assert all(map(torch.equal, plain, step(model, contextlib.nullcontext())))
    handle.close()
    assert all(map(torch.equal, plain, step(Model(), block)))
    block.close()


def test_host_memory_allocated_in_inference_mode_can_be_used_for_training():
    model = nn.Sequential(nn.Linear(N, N), nn.GELU())
    handle = fgoffload.offload(model, ["*"], ALL)
    x = torch.ones(N, N)
    with torch.inference_mode():
        offloaded = handle.offload_tensor(model(x))
        assert offloaded.is_on_host
        offloaded.reload()
        del offloaded
    model(x).sum().backward()
    assert handle.stats().h2d_bytes > 0
    handle.close()


def test_attributes_of_a_saved_tensor_are_restored():
    class Scaled(torch.Tensor):
        pass

    class Scales(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            saved = [x.detach().sign().as_subclass(Scaled), x.detach().cos()]
            for number, tensor in enumerate(saved):
                tensor.scale = number + 2.0
            ctx.save_for_backward(*saved)
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            return gradient * sum(tensor.scale for tensor in ctx.saved_tensors)

    def step(context):
        x = torch.ones(N, N, requires_grad=True)
        with context:
            loss = Scales.apply(x).sin().sum()
        loss.backward()
        return [x.grad]

    assert run_both(step) > 0


def test_an_in_place_change_of_a_saved_tensor_raises_only_if_backward_uses_it():
    def run(context, *, is_used):
        x = torch.linspace(-1, 1, N * N).view(N, N).requires_grad_()
        with context:
            exponential = x.exp()
            exponential.detach().mul_(2)
            loss = (x * x).sum() + (exponential.sum() if is_used else 0)
        loss.backward()
        return x.grad

    block = make_block(DelayedCpuDevice(), group_bytes=1 << 20)
    assert torch.equal(run(contextlib.nullcontext(), is_used=False), run(block, is_used=False))
    assert block.stats().tags["saved"].kept_bytes == {KeptReason.CHANGED.value: 4 * N * N}
    with pytest.raises(StateError, match="changed in place"):
        run(block, is_used=True)
    block.close()


def test_a_long_region_is_offloaded_and_reloaded_in_parts():
    class Long(nn.Module):
        def forward(self, x):
            for _ in range(12):
                x = x.sin()
            return x

    size_bytes = 4 * N * N
    config = fgoffload.TransferConfig(
        min_offloaded_bytes=0, window_bytes=2 * size_bytes, prefetch_bytes=4 * size_bytes, host_budget_bytes=1 << 24
    )
    model = nn.Sequential(Long())
    handle = fgoffload.offload(model, ["0"], config)
    (model(torch.ones(N, N, requires_grad=True) * 2)).sum().backward()
    tag = handle.stats().tags["Long"]
    assert tag.groups == 12
    assert tag.prefetch_misses <= 1
    handle.close()
