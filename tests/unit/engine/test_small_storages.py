"""Storages smaller than what leaves go past the engine's bookkeeping, and are guarded as all others are."""

import pytest
import torch
from support.pieces import TwoOfOneAllocation
from support.sites import Sites, check_same_bits, make_engine
from support.tensors import leaf

from fgoffload import StateError
from fgoffload.engine import KeptReason, OffloadEngine

LIMIT_BYTES = 1024


def list_saves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the bytes of each tensor that the engine looks at, filled as it does."""
    sizes: list[int] = []
    original = OffloadEngine.save

    def save(self, tensor, **where):
        sizes.append(tensor.numel() * tensor.element_size())
        return original(self, tensor, **where)

    monkeypatch.setattr(OffloadEngine, "save", save)
    return sizes


def compute(sites: Sites, small: torch.Tensor, large: torch.Tensor) -> torch.Tensor:
    return sites(lambda s, t: s.sin().sum() * t.sin(), small * 2, large * 2)


def test_the_engine_looks_at_what_may_leave_alone(monkeypatch):
    small, large = leaf(8), leaf(4096)
    sizes = list_saves(monkeypatch)
    engine = make_engine(min_offloaded_bytes=LIMIT_BYTES)
    check_same_bits(lambda sites: compute(sites, small, large), [small, large], engine)
    assert set(sizes) == {4 * 4096}
    stats = engine.finish_step().tags["core_attn"]
    # The sine's input and what its sum is multiplied with; each passed once, and the saves of both kinds counted.
    assert stats.kept_bytes == {KeptReason.TOO_SMALL.value: 4 * 8 + 4}
    assert stats.saved_tensors == 4


def test_a_part_of_a_storage_that_is_large_enough_is_looked_at(monkeypatch):
    large = leaf(4096)
    sizes = list_saves(monkeypatch)
    engine = make_engine(min_offloaded_bytes=LIMIT_BYTES)

    def forward(sites: Sites) -> torch.Tensor:
        # 32 views of 512 bytes, which leave together.
        return sites(lambda h: torch.cat([part.sin() for part in h.split(128)]), large * 2)

    check_same_bits(forward, [large], engine)
    assert sizes == [512] * 32
    assert engine.finish_step().tags["core_attn"].d2h_bytes == 4 * 4096


def test_a_filter_sees_small_tensors_too():
    small, large = leaf(8), leaf(4096)
    seen: list[int] = []
    engine = make_engine(min_offloaded_bytes=LIMIT_BYTES, keep=lambda tensor: seen.append(tensor.numel()))
    check_same_bits(lambda sites: compute(sites, small, large), [small, large], engine)
    assert {8, 4096} <= set(seen)


@pytest.mark.parametrize("is_watched", [False, True])
def test_a_change_in_place_of_a_small_tensor_is_found(is_watched):
    engine = make_engine(min_offloaded_bytes=LIMIT_BYTES)
    sites = Sites(engine)
    h = leaf(8) * 2
    if is_watched:
        with sites.watched():
            out = h.sin()
    else:
        out = sites(torch.sin, h)
    with torch.no_grad():
        h.mul_(2)
    with pytest.raises(StateError, match="changed in place"):
        out.sum().backward()


def test_a_storage_of_several_small_saves_counts_once():
    small = leaf(8)
    engine = make_engine(min_offloaded_bytes=LIMIT_BYTES)
    check_same_bits(lambda sites: sites(lambda h: h.sin() + h.cos() + h[:4].exp().sum() * h.tan(), small * 2), [small], engine)
    kept = engine.finish_step().tags["core_attn"].kept_bytes[KeptReason.TOO_SMALL.value]
    # The input of sine, cosine and tangent once; the tangent and the exponential's four keep what they return, and its sum.
    assert kept == 4 * 8 + 4 * 8 + 4 * 4 + 4


def test_a_storage_counts_once_for_each_tag_that_saves_it():
    small = leaf(8)
    engine = make_engine(min_offloaded_bytes=LIMIT_BYTES)

    def forward(sites: Sites) -> torch.Tensor:
        h = small * 2
        return sites(torch.sin, h) + sites(torch.cos, h, tag="attn_proj")

    check_same_bits(forward, [small], engine)
    tags = engine.finish_step().tags
    assert [tags[tag].kept_bytes for tag in ("core_attn", "attn_proj")] == [{KeptReason.TOO_SMALL.value: 4 * 8}] * 2


class SaveBoth(torch.autograd.Function):
    """Saves the bytes of its input as what they are and as fp32, in either order."""

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
def test_of_a_storage_saved_as_two_types_no_save_holds_what_another_lets_leave(is_wide_first):
    # 3000 bytes are enough elements of one type, and of the other only both saves together.
    engine = make_engine(min_offloaded_numel=1000)
    x = leaf(4)
    sites, octets = Sites(engine), torch.arange(3000).to(torch.uint8)
    output = sites(lambda h: SaveBoth.apply(octets, h, is_wide_first), x * 2)
    output.sum().backward()
    kept = engine.finish_step().tags["core_attn"]
    assert (kept.d2h_bytes, kept.kept_bytes) == (3000, {})
    engine.close()


def make_pieces(size):
    memory = torch.zeros(size + 8).numpy()  # which both hold, and torch knows nothing of
    return torch.from_numpy(memory[:size]), torch.from_numpy(memory[size:])


def test_a_small_piece_of_an_allocation_leaves_too_since_it_would_hold_all_of_it():
    large = leaf(4096)
    engine = make_engine(min_offloaded_bytes=LIMIT_BYTES)
    check_same_bits(lambda sites: sites(lambda h: TwoOfOneAllocation.apply(h, make_pieces), large * 2), [large], engine)
    stats = engine.finish_step().tags["core_attn"]
    assert stats.d2h_bytes == 4 * (4096 + 8)
    assert stats.kept_bytes == {}
