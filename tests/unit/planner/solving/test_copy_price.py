"""The price that programs get for copies, after what plans at lower prices came to."""

from fgoffload.planner.solving.copy_price import CopyPrice


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
