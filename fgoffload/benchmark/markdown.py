"""Tables of the pages that a benchmark writes."""

from collections.abc import Iterable, Sequence


def format_rows(headings: Sequence[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Return the lines of a Markdown table. A bar inside of a cell would end it, and becomes a slash."""
    lines = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    return lines + [f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |" for cells in rows]
