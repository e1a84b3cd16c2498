"""Formats the results of a row of the support matrix as a table line."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

MOVES_WITH_ANOTHER = ("attn_proj", "router", "shared_expert", "expert_fc2", "moe_combine", "mlp_norm")
"""Tags that may move nothing of their own, since another tag saves the same storage and comes first, or a recompute owns it."""

COLUMNS = ("row", "moved", "attention", "reproduces", "equal")
HEADINGS = ("row", "tags that moved", "attention", "reproduces itself", "equal")

Line = dict[str, str]
"""A cell for each of `COLUMNS`."""


def find_kernels(log: str) -> list[str]:
    """Return the attention kernels that a log of Transformer Engine names, each once.

    With `NVTE_DEBUG=1` it says at level 1 which one runs, whenever attention is called in a way that it has not seen:
    `Running with FusedAttention backend (sub-backend 1)`. What it weighed before comes at level 2, in other words.
    """
    return sorted(set(re.findall(r"\bRunning with (\w+) backend\b", log)))


def judge_row(name: str, ranks: Sequence[Mapping[str, Any]], *, expected_kernel: str, log: str) -> Line:
    """Return the line of a row whose processes all ended.

    Args:
        name: Of the row.
        ranks: Results of each process.
        expected_kernel: The one attention kernel that may run. FP8 rows have FP8 linears and the same attention; fp32 has none
            but the unfused one.
        log: Output of all processes.
    """
    kernels = find_kernels(log)
    tags = ranks[0]["tags"]
    unmoved = [tag for tag in tags if not any(rank["moved"].get(tag) for rank in ranks)]
    faults = []
    if not all(rank["reproduces"] for rank in ranks):
        faults.append("it does not reproduce itself without offload")
    if not all(rank["equal"] for rank in ranks):
        faults.append(f"bits differ: {[rank['differ'] for rank in ranks]}")
    if unexpected := [tag for tag in unmoved if tag not in MOVES_WITH_ANOTHER]:
        faults.append(f"nothing moved of {' '.join(unexpected)}")
    if kernels != [expected_kernel]:
        faults.append(f"attention ran with {' and '.join(kernels) or 'a kernel that nobody named'}, not {expected_kernel}")
    return {
        "row": name,
        "moved": f"{len(tags) - len(unmoved)} of {len(tags)}",
        "attention": " ".join(kernels) or "-",
        "reproduces": "yes" if all(rank["reproduces"] for rank in ranks) else "no",
        "equal": _escape(f"no: {'; '.join(faults)}") if faults else "yes",
    }


def make_line(name: str, outcome: str) -> Line:
    """Return the line of a row without a result: it failed, or did not run."""
    return {"row": name, "moved": "-", "attention": "-", "reproduces": "-", "equal": _escape(outcome)}


def is_failure(line: Line) -> bool:
    """Return whether a line is neither equal nor of a row that this Megatron cannot take."""
    return line["equal"] != "yes" and not is_refused(line)


def is_refused(line: Line) -> bool:
    """Return whether a line is of a row that this Megatron cannot take."""
    return line["equal"].startswith("refused: ")


def summarize(lines: Sequence[Line], version: str) -> str:
    """Return how many rows are equal, in one sentence."""
    refused = sum(map(is_refused, lines))
    equal = sum(line["equal"] == "yes" for line in lines)
    more = f", {refused} refused" if refused else ""
    return f"Megatron-Core {version}: {equal} of {len(lines) - refused} rows are bitwise identical{more}."


def format_table(lines: Sequence[Line], version: str) -> str:
    """Return the table in Markdown, under the sentence that sums it up."""
    rows = [HEADINGS, ("---",) * len(HEADINGS), *(tuple(line[name] for name in COLUMNS) for line in lines)]
    return "\n".join([summarize(lines, version), "", *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _escape(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")
