"""Tests storages below the minimum size: the engine does not track them, but detects in-place changes."""

import pytest
import torch
from support.pieces import TwoOfOneAllocation
from support.sites import Sites, check_same_bits, make_engine
from support.tensors import leaf

from fgoffload import StateError

pytestmark = pytest.mark.quick

LIMIT_BYTES = 1024


@pytest.mark.parametrize("is_watched", [False, True])
def test_an_in_place_change_of_a_small_tensor_raises(is_watched):
    engine = make_engine(min_offloaded_bytes=LIMIT_BYTES)
    sites = Sites(engine)
    h = leaf(8) * 2
    if is_watched:
        with sites.watched():
            output = h.sin()
    else:
        output = sites(torch.sin, h)
    with torch.no_grad():
        h.mul_(2)
    with pytest.raises(StateError, match="changed in place"):
        output.sum().backward()


class SaveBoth(torch.autograd.Function):
    """Saves its input as bytes and as fp32, in either order."""

    @staticmethod
    def forward(ctx, octets, tensor, is_wide_first):
        views = (octets.view(torch.float32), octets) if is_wide_first else (octets, octets.view(torch.float32))
        ctx.save_for_backward(*views)
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        assert [saved.untyped_storage().nbytes() for saved in ctx.saved_tensors]
        return None, gradient, None


@pytest.mark.parametrize("is_wide_first", [False, True])
def test_a_storage_saved_as_two_dtypes_is_offloaded_if_one_save_is_large_enough(is_wide_first):
    # 3000 bytes are enough elements as bytes, but too few as fp32.
    engine = make_engine(min_offloaded_numel=1000)
    x = leaf(4)
    sites, octets = Sites(engine), torch.arange(3000).to(torch.uint8)
    output = sites(lambda h: SaveBoth.apply(octets, h, is_wide_first), x * 2)
    output.sum().backward()
    kept = engine.finish_step().tags["core_attn"]
    assert (kept.d2h_bytes, kept.kept_bytes) == (3000, {})
    engine.close()


def make_pieces(size):
    memory = torch.zeros(size + 8).numpy()  # both tensors keep it alive, which torch cannot see
    return torch.from_numpy(memory[:size]), torch.from_numpy(memory[size:])


def test_a_small_storage_is_offloaded_with_the_larger_one_in_its_allocation():
    large = leaf(4096)
    engine = make_engine(min_offloaded_bytes=LIMIT_BYTES)
    check_same_bits(lambda sites: sites(lambda h: TwoOfOneAllocation.apply(h, make_pieces), large * 2), [large], engine)
    stats = engine.finish_step().tags["core_attn"]
    assert stats.d2h_bytes == 4 * (4096 + 8)
    assert stats.kept_bytes == {}
