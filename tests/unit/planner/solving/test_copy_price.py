"""The price of copies: for programs after what plans at lower prices came to, for moves by what the link has room for."""

import pytest
from support.toy_ranks import make_toy_layer, make_toy_rank

from fgoffload import Action, TransferPolicy
from fgoffload.planner.ranks.rank_model import LinkModel
from fgoffload.planner.solving.choices import list_configurations, list_modes
from fgoffload.planner.solving.copy_price import CopyPrice, find_link_price
from fgoffload.planner.solving.placement import list_slots


def learn(price, late_s, moved_bytes):
    """Tell `price` of a plan that may be a tenth of a second late."""
    price.learn(late_s, moved_bytes, most_late_s=0.1)
    return price.s_per_byte, price.is_between


def test_a_plan_that_is_late_raises_the_price_by_what_it_is_late_a_byte():
    price = CopyPrice()
    assert learn(price, 6.0, 3) == (2.0, False)
    assert learn(price, 1.0, 4) == (2.25, False)


def test_a_plan_on_time_that_moves_about_as_much_ends_it():
    price = CopyPrice()
    learn(price, 6.0, 3)
    assert learn(price, -1.0, 2) == (2.0, False)
    # What little it is late counts all the same.
    assert learn(price, 0.0625, 2) == (2.03125, False)


def test_a_plan_on_time_that_moves_far_less_is_followed_by_half_the_way_back():
    price = CopyPrice()
    learn(price, 8.0, 8)
    assert learn(price, 8.0, 4) == (3.0, False)
    assert learn(price, 0.0, 1) == (2.0, True)
    # From either end, and never past what is known to be wrong.
    assert learn(price, 0.0, 1) == (1.5, True)
    assert learn(price, 400.0, 4) == (1.75, True)
    assert learn(price, 0.0, 3) == (1.75, False)


def test_without_a_plan_that_was_late_nothing_is_too_high():
    assert learn(CopyPrice(), 0.0, 0) == (0.0, False)


def test_a_plan_that_moves_nothing_and_is_late_all_the_same_has_a_price():
    assert learn(CopyPrice(), 2.0, 0) == (2.0, False)


@pytest.mark.parametrize(("attention_bytes", "price"), [(12, 0.0), (13, 0.0), (14, 0.5)])
def test_a_byte_costs_its_copy_where_a_forward_has_no_room_for_it(attention_bytes, price):
    # Of two layers, 10 s of forward each, at two bytes a second and with a window of 16 bytes: 56 bytes, of which 95% are 53.2.
    layer = make_toy_layer(sizes=(1, attention_bytes, 13, 4, 2))
    link = LinkModel(d2h_bytes_per_s=2.0, h2d_bytes_per_s=2.0, duplex_bytes_per_s=1.0)
    rank = make_toy_rank(
        layers=[[layer, layer]], link=link, policy=TransferPolicy(window_bytes=16, prefetch_bytes=16), min_offloaded_numel=1
    )
    wanted = (("core_attn", Action.OFFLOAD), ("expert_fc1", Action.OFFLOAD))
    moving = next(one for one in list_configurations(list_modes(layer, min_offloaded_numel=1)) if one.actions == wanted)
    assert find_link_price(rank, list_slots(rank), (moving, moving)) == price
