"""Ways to treat a layer by rule of thumb: some free much for little, and more is moved by them than the least that would do.

The search begins with some of them in ladders, and programs have all of them to choose from.
"""

from collections.abc import Sequence

from fgoffload.planner.solving.choices import Choice, Configuration, Mode

_CHEAP_S_PER_BYTE = 2e-12
"""Running again what takes no longer than this for each byte that it frees is done in all layers: a copy takes ten times as
long, 20e-12 each way at 50 GB/s."""


def list_ways(modes: Sequence[Mode]) -> list[Configuration]:
    """Return what a kind of layer may do, by rule of thumb: keep all; run cheap things again; move all beside; and wider ways.

    Then each part alone does what is worth it, all parts run again as much as they can with copies and without, and each wider
    mode with and without what moves beside it.
    """
    plain = modes[0]
    cheap = tuple(_pick_cheap(part) for part in plain.parts)
    most = tuple(_pick_most(part) for part in plain.parts)
    ways = [
        Configuration(mode=plain, chosen=tuple(part[0] for part in plain.parts)),
        Configuration(mode=plain, chosen=cheap),
        Configuration(mode=plain, chosen=most),
    ]
    for place, part in enumerate(plain.parts):
        for choice in _pick_efficient(part):
            if choice not in (part[0], cheap[place]):
                ways.append(Configuration(mode=plain, chosen=(*cheap[:place], choice, *cheap[place + 1 :])))
    ways.append(Configuration(mode=plain, chosen=tuple(_pick_least(part, moves=False) for part in plain.parts)))
    ways.append(Configuration(mode=plain, chosen=tuple(_pick_least(part, moves=True) for part in plain.parts)))
    for mode in modes[1:]:
        ways.append(make_wide(mode))
        ways.append(Configuration(mode=mode, chosen=tuple(_pick_most(part) for part in mode.parts)))
    return ways


def make_wide(mode: Mode) -> Configuration:
    """Return a mode that runs widely again, with what is cheap to run again beside it."""
    return Configuration(mode=mode, chosen=tuple(_pick_cheap(part) for part in mode.parts))


def _pick_cheap(part: Sequence[Choice]) -> Choice:
    """Return what frees most of a part without a copy, and without a recompute that takes long for what it frees."""
    return min((choice for choice in part if not choice.moved_bytes and _is_cheap(choice)), key=_list_burdens)


def _pick_most(part: Sequence[Choice]) -> Choice:
    """Return what frees most of a part, copies or not, without a recompute that takes long for what it frees."""
    return min((choice for choice in part if _is_cheap(choice)), key=_list_burdens)


def _pick_efficient(part: Sequence[Choice]) -> list[Choice]:
    """Return the choices that no other is better than in bytes kept, recompute and copies.

    Of choices that are equal in these all are there: some tensors are copied earlier, and wanted later, than others.
    """
    costs = {choice: (choice.kept_bytes, choice.recompute_s, choice.moved_bytes) for choice in part}
    return [choice for choice, own in costs.items() if not any(_is_below(other, own) for other in costs.values())]


def _is_below(one: tuple[float, float, float], other: tuple[float, float, float]) -> bool:
    # Without a loop: rules of thumb compare each choice of a part with all others.
    return one[0] <= other[0] and one[1] <= other[1] and one[2] <= other[2] and one != other


def _pick_least(part: Sequence[Choice], *, moves: bool) -> Choice:
    """Return what frees most of a part, however long it runs again for that; with the fewest copies, or without any."""
    able = (choice for choice in part if moves or not choice.moved_bytes)
    return min(able, key=lambda choice: (choice.kept_bytes, choice.moved_bytes, choice.recompute_s))


def _is_cheap(choice: Choice) -> bool:
    return choice.recompute_s <= _CHEAP_S_PER_BYTE * max(-choice.kept_bytes, 0)


def _list_burdens(choice: Choice) -> tuple[float, ...]:
    return (choice.kept_bytes, choice.recompute_s, choice.moved_bytes)
