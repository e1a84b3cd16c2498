"""Tests that all saved tensors are reloaded bitwise identical, and that each storage is offloaded once."""

import pytest
import torch
from support.sites import DelayedCpuDevice, Sites, check_same_bits, make_engine

pytestmark = pytest.mark.quick

DEVICES = pytest.mark.parametrize("make_device", [lambda: None, DelayedCpuDevice], ids=["cpu", "delayed"])


def leaf(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


def test_views_of_one_storage_with_different_element_sizes_are_reloaded():
    class SaveBoth(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            ctx.save_for_backward(tensor[:8], tensor.view(torch.uint8)[:61])  # ends inside an element of the other view
            return tensor.sin()

        @staticmethod
        def backward(ctx, gradient):
            numbers, octets = ctx.saved_tensors
            return gradient * numbers.sum() * octets.sum()

    x = leaf(64)
    check_same_bits(lambda sites: sites(SaveBoth.apply, x * 2), [x]).close()


def test_a_storage_saved_by_two_groups_is_offloaded_once():
    x, w = leaf(64, 64), torch.nn.Parameter(leaf(64, 64, seed=1))

    def forward(sites: Sites) -> torch.Tensor:
        context = sites(lambda h: h.softmax(-1), x @ w, tag="core_attn")  # saves its output
        return sites(lambda h: h @ w, context, tag="attn_proj")  # saves its input, the same storage

    engine = check_same_bits(forward, [x, w])
    stats = engine.finish_step()
    assert stats.tags["core_attn"].d2h_bytes == 64 * 64 * 4
    assert stats.tags["attn_proj"].d2h_bytes == 0
    assert stats.tags["attn_proj"].shared_bytes == 64 * 64 * 4
    engine.close()


def test_a_view_of_less_than_half_of_its_storage_is_offloaded_alone():
    x = leaf(64, 64)
    engine = check_same_bits(lambda sites: sites(lambda h: h[:, ::4].sin(), x * 2), [x])
    assert engine.finish_step().d2h_bytes == 64 * 16 * 4
    engine.close()


def test_many_small_views_of_one_storage_are_offloaded_as_one():
    x = leaf(64, 64)

    def experts(h: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.sin() for part in h.split([1, 30, 0, 2, 31])])

    engine = make_engine(min_offloaded_numel=64 * 64)
    check_same_bits(lambda sites: sites(experts, x * 2), [x], engine)
    assert engine.finish_step().d2h_bytes == 64 * 64 * 4
    engine.close()


def test_a_save_outside_all_regions_joins_the_group_that_shares_its_storage():
    x, w = leaf(64, 96), leaf(96, 96, seed=1)

    def forward(sites: Sites) -> torch.Tensor:
        with sites.watched():
            mixed = x @ w
            query, value = mixed.chunk(2, dim=-1)
            rotated = query.sin()  # outside: saves the query, half of the mixed storage
            return sites(lambda q, v: q * v, rotated, value)  # saves the value, the other half

    engine = check_same_bits(forward, [x, w])
    stats = engine.finish_step()
    assert stats.d2h_bytes == 64 * 96 * 4 + 64 * 48 * 4  # the mixed storage once, and the rotated query
    assert stats.tags["core_attn"].held_elsewhere_bytes == 0
    engine.close()


@DEVICES
def test_held_back_groups_are_offloaded_at_the_flush_and_bitwise_identical(make_device):
    x = leaf(64, 64)
    engine = make_engine(make_device())
    offloaded_bytes = []

    def forward(sites: Sites) -> torch.Tensor:
        h = sites(lambda h: h.sin(), x * 2, is_held=True)
        h = sites(lambda h: h.exp(), h, is_held=True)
        if sites.engine:
            offloaded_bytes.append(engine._counters.get_tag("core_attn").d2h_bytes)
            engine.flush()
            offloaded_bytes.append(engine._counters.get_tag("core_attn").d2h_bytes)
        return h

    check_same_bits(forward, [x], engine)
    assert offloaded_bytes == [0, 2 * 64 * 64 * 4]
    engine.close()


def test_end_marks_do_not_change_the_order_of_gradient_accumulation():
    # An identity op in the graph would sum the norm's two gradients before the residual's; see [Note: Marks].
    x = leaf(256, 64)
    w = leaf(64, seed=1)

    def norm(h: torch.Tensor) -> torch.Tensor:
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5) * w

    def forward(sites: Sites) -> torch.Tensor:
        h = x * 1.0001
        for _ in range(3):
            h = h + sites(norm, h, tag="attn_norm").sin()
        return h

    check_same_bits(forward, [x, w]).close()
