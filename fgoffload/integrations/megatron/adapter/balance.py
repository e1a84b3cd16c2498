"""`--delta-offload-bytes-across-pp-ranks`: each pipeline rank offloads so many bytes of a step less than the one before it.

Earlier ranks have more microbatches in flight under 1F1B, so they need the memory and later ones do not. What a site moves is
known when the first step is over, in which every site moves; from the second step on the rank's last sites of forward stay, in
all microbatches alike, as many as have the bytes that the rank offloads less. Megatron's own engine keeps the first layers of
the first microbatches instead; see docs/reference/megatron_engine.md.
"""

from collections.abc import Mapping

from fgoffload.plan import Site


def choose_kept(moved_bytes: Mapping[Site, int], *, less_bytes: int) -> list[Site]:
    """Return the sites that stay so that `less_bytes` fewer leave in a step: whole sites, so by less than one site more.

    Args:
        moved_bytes: What each site moved in a step, all microbatches, in the order of forward.
        less_bytes: Bytes. Where all sites together have fewer, all stay.
    """
    kept = []
    for site in reversed(tuple(moved_bytes)):
        if less_bytes <= 0:
            break
        # One that moved nothing stays too: it saves what a site before it moved, and would move that in its place.
        kept.append(site)
        less_bytes -= moved_bytes[site]
    return kept
