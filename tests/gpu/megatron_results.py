"""Formats the results of a row of the support matrix as a table line."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

MAY_OFFLOAD_NOTHING = ("attn_proj", "router", "shared_expert", "expert_fc2", "moe_combine", "mlp_norm")
"""Tags that may offload nothing, since an earlier tag saves the same storage or a recompute owns it."""

COLUMNS = ("row", "offloaded", "attention", "reproducible", "equal")
HEADINGS = ("row", "offloaded tags", "attention", "reproducible", "equal")

Line = dict[str, str]
"""A cell for each of `COLUMNS`."""


def find_kernels(log: str) -> list[str]:
    """Return the attention kernels in a log of Transformer Engine, without duplicates.

    With `NVTE_DEBUG=1` and level 1 it logs the kernel for each new attention configuration:
    `Running with FusedAttention backend (sub-backend 1)`. Level 2 also logs the candidates, in a different format.
    """
    return sorted(set(re.findall(r"\bRunning with (\w+) backend\b", log)))


def make_result_line(name: str, ranks: Sequence[Mapping[str, Any]], *, expected_kernel: str, log: str) -> Line:
    """Return the line of a row whose processes all finished.

    Args:
        name: Name of the row.
        ranks: Results of each process.
        expected_kernel: The only attention kernel that may run. FP8 rows have FP8 linears and the same attention; fp32 only
            has the unfused kernel.
        log: Output of all processes.
    """
    kernels = find_kernels(log)
    tags = ranks[0]["tags"]
    idle = [tag for tag in tags if not any(rank["offloaded"].get(tag) for rank in ranks)]
    faults = []
    if not all(rank["reproducible"] for rank in ranks):
        faults.append("the baseline is not reproducible")
    if not all(rank["equal"] for rank in ranks):
        faults.append(f"results differ: {[rank['differ'] for rank in ranks]}")
    if unexpected := [tag for tag in idle if tag not in MAY_OFFLOAD_NOTHING]:
        faults.append(f"nothing was offloaded of {' '.join(unexpected)}")
    if kernels != [expected_kernel]:
        faults.append(f"attention ran with {' and '.join(kernels) or 'an unknown kernel'}, not {expected_kernel}")
    return {
        "row": name,
        "offloaded": f"{len(tags) - len(idle)} of {len(tags)}",
        "attention": " ".join(kernels) or "-",
        "reproducible": "yes" if all(rank["reproducible"] for rank in ranks) else "no",
        "equal": _escape(f"no: {'; '.join(faults)}") if faults else "yes",
    }


def make_line(name: str, outcome: str) -> Line:
    """Return the line of a row without results: it failed or did not run."""
    return {"row": name, "offloaded": "-", "attention": "-", "reproducible": "-", "equal": _escape(outcome)}


def is_failure(line: Line) -> bool:
    """Return whether a line is neither equal nor unsupported by this Megatron."""
    return line["equal"] != "yes" and not is_unsupported(line)


def is_unsupported(line: Line) -> bool:
    """Return whether this Megatron does not support the row of a line."""
    return line["equal"].startswith("unsupported: ")


def summarize(lines: Sequence[Line], version: str) -> str:
    """Return one sentence with the number of equal rows."""
    unsupported = sum(map(is_unsupported, lines))
    equal = sum(line["equal"] == "yes" for line in lines)
    more = f", {unsupported} unsupported" if unsupported else ""
    return f"Megatron-Core {version}: {equal} of {len(lines) - unsupported} rows are bitwise identical{more}."


def format_table(lines: Sequence[Line], version: str) -> str:
    """Return the table in Markdown, below a summary."""
    rows = [HEADINGS, ("---",) * len(HEADINGS), *(tuple(line[name] for name in COLUMNS) for line in lines)]
    return "\n".join([summarize(lines, version), "", *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _escape(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")
