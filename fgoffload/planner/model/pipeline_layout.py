"""Parses Megatron's `--pipeline-model-parallel-layout`: a string with the layers of each virtual pipeline stage.

`E` is the embedding, `t` a decoder layer, `m` a layer of multi-token prediction, `L` the loss, and `|` separates stages. `t*3`
is `ttt`, `(tt|)*2` is `tt|tt|`, and commas are ignored:

    >>> parse_layout("Et|(tt|)*2,tmL")
    ('Et', 'tt', 'tt', 'tmL')

Source: `PipelineParallelLayerLayout` of megatron-core 0.16.1. `tests/unit/planner/model/test_parallelism.py` runs both parsers.
"""

import re

from fgoffload.errors import ConfigError

LONGEST_LAYOUT = 10_000
"""Maximum number of letters in a layout. Longer layouts, from nested repetitions, could fill memory."""

_PIECE = re.compile(r"\((?P<group>[^()]*)\)\*(?P<group_count>\d{1,4})|(?P<one>[EtmL|])(?:\*(?P<one_count>\d{1,4}))?")


def parse_layout(layout: str) -> tuple[str, ...]:
    """Return the letters of each virtual stage, in forward order."""
    return tuple(_repeat(layout.replace(",", ""), layout).split("|"))


def check_layout(layout: str, *, num_layers: int, mtp_num_layers: int, pipeline_parallel_size: int) -> None:
    """Reject a layout that does not match the model, or that Megatron does not support."""
    stages = parse_layout(layout)
    limit = "the allowed number"
    counts = (("E", limit, 1), ("t", "num_layers", num_layers), ("m", "mtp_num_layers", mtp_num_layers), ("L", limit, 1))
    for letter, name, count in counts:
        if (found := "".join(stages).count(letter)) != count:
            raise ConfigError(
                f"pipeline_layout {layout!r} has {found} x {letter}, but {name} is {count}. Use {count} x {letter}."
            )
    if not stages[0].startswith("E") or not stages[-1].endswith("L"):
        raise ConfigError(
            f"pipeline_layout {layout!r} must begin with the embedding E and end with the loss L, for example 'Et|tL'."
        )
    if "t" in "".join(stages).partition("m")[2]:
        raise ConfigError(
            f"pipeline_layout {layout!r} has a layer t after a layer m of multi-token prediction. Put all m after the last t."
        )
    _check_prediction(layout, stages, pipeline_parallel_size)


def _repeat(text: str, layout: str) -> str:
    pieces, position = [], 0
    while position < len(text):
        match = _PIECE.match(text, position)
        if match is None:
            raise ConfigError(
                f"pipeline_layout {layout!r} is invalid at {text[position : position + 8]!r}. Use E, t, m, L and |, "
                "and repetitions such as t*3 and (tt|)*29."
            )
        if match["one"]:
            pieces.append(match["one"] * int(match["one_count"] or 1))
        else:
            pieces.append(_repeat(match["group"], layout) * int(match["group_count"]))
        if sum(map(len, pieces)) > LONGEST_LAYOUT:
            raise ConfigError(f"pipeline_layout {layout!r} has more than {LONGEST_LAYOUT} letters. Use fewer repetitions.")
        position = match.end()
    return "".join(pieces)


def _check_prediction(layout: str, stages: tuple[str, ...], pipeline_parallel_size: int) -> None:
    """Reject multi-token prediction in several stages, or in a stage that is not a rank's last. Megatron supports neither."""
    with_prediction = [number for number, letters in enumerate(stages) if "m" in letters]
    last = len(stages) - pipeline_parallel_size
    if with_prediction and (len(with_prediction) > 1 or with_prediction[0] < last):
        raise ConfigError(
            f"pipeline_layout {layout!r} has m in stage {with_prediction[0]} of {len(stages)}: Megatron requires all layers of "
            f"multi-token prediction in the last stage of one rank. Put all m in one stage from {last} to {len(stages) - 1}."
        )
