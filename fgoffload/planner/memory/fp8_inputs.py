"""Bytes of the input that a linear layer saves, in fp8 if the linear computes in fp8.

Under every recipe the linear saves one fp8 copy, from which its weight's gradient is computed, and the scales of the copy:

| recipe | data | scales |
|---|---|---|
| none | 2 bytes an element | |
| `delayed`, `tensorwise` | 1 byte | one number in fp32 |
| `blockwise` | 1 byte | one in fp32 for 128 rows of a channel |
| `mxfp8` | 1 byte | one byte for 32 rows of a channel, up to multiples of 4 and 128 |

`delayed` and `tensorwise` linears that gather their input again in backward save the row-wise copy instead, which has the same
size. Block scales pad channels to a multiple of 4, which the channels of fp8 linears are anyway.

Source: Transformer Engine 2.20.2: `Linear`, `LayerNormLinear` and `GroupedLinear`, which discard the row-wise data, and
`get_scale_shape` of the quantizers in `quantizer.cpp`. `tests/gpu/test_megatron_bytes.py` compares the bytes.
"""

from fgoffload.planner.model.layer_shape import Fp8Recipe
from fgoffload.planner.operations.ops import BF16, FP8, FP32

_BLOCK_ROWS = 128
_MXFP8_BLOCK_ROWS = 32  # rows that share a scale


def count_input_bytes(recipe: Fp8Recipe | None, *, rows: int, channels: int) -> int:
    """Return the bytes of an input `[rows, channels]` that a linear saves for backward."""
    elements = rows * channels
    if recipe is None:
        return BF16 * elements
    if recipe == "blockwise":
        return FP8 * elements + FP32 * -(-rows // _BLOCK_ROWS) * channels
    if recipe == "mxfp8":
        return FP8 * elements + _round_up(rows // _MXFP8_BLOCK_ROWS, 4) * _round_up(channels, 128)
    return FP8 * elements + FP32


def get_input_element_bytes(recipe: Fp8Recipe | None) -> int:
    """Return the bytes per element of the input that a linear saves."""
    return BF16 if recipe is None else FP8


def pad_rows(recipe: Fp8Recipe | None, rows: int) -> int:
    """Return the padded rows of one expert: fp8 products need a multiple of 16, mxfp8 products a multiple of 32.

    Source: `get_align_size_for_quantization` of Transformer Engine; `TEGroupedMLP` of megatron-core 0.16.1 pads each expert.
    """
    if recipe is None:
        return rows
    return _round_up(rows, 32 if recipe == "mxfp8" else 16)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
