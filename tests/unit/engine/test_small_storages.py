"""Storages smaller than what leaves go past the engine's bookkeeping, and are guarded as all others are."""

import pytest
import torch
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
