"""Counts the bytes of a linear layer's saved input, which is quantized if the layer computes in fp8.

Under every recipe, the linear saves one fp8 copy of its input and the scales of the copy, to compute the weight gradient:

| recipe | data | scales |
|---|---|---|
| none | 2 bytes per element | |
| `delayed`, `tensorwise` | 1 byte per element | one fp32 number |
| `blockwise` | 1 byte per element | one fp32 number per channel and 128 rows |
| `mxfp8` | 1 byte per element | one byte per channel and 32 rows, padded to multiples of 128 channels and 4 row blocks |

`delayed` and `tensorwise` linears that gather their input again in backward save the row-wise copy instead, which has the same
size. Blockwise scales also pad channels to a multiple of 4. We ignore this, because fp8 linears have a multiple of 4 channels.

Source: Transformer Engine 2.20.2: `Linear`, `LayerNormLinear` and `GroupedLinear`, which discard the row-wise data, and
`get_scale_shape` of the quantizers in `quantizer.cpp`. `tests/gpu/test_megatron_bytes.py` measures the bytes.
"""

from fgoffload.planner.model.layer_shape import Fp8Recipe
from fgoffload.planner.operations.ops import BF16, FP8, FP32

_BLOCK_ROWS = 128
_MXFP8_BLOCK_ROWS = 32  # rows that share a scale


def count_input_bytes(recipe: Fp8Recipe | None, *, rows: int, channels: int) -> int:
    """Return the bytes that a linear saves for its input `[rows, channels]`."""
    elements = rows * channels
    if recipe is None:
        return BF16 * elements
    if recipe == "blockwise":
        return FP8 * elements + FP32 * -(-rows // _BLOCK_ROWS) * channels
    if recipe == "mxfp8":
        return FP8 * elements + _round_up(rows // _MXFP8_BLOCK_ROWS, 4) * _round_up(channels, 128)
    return FP8 * elements + FP32


def get_input_element_bytes(recipe: Fp8Recipe | None) -> int:
    """Return the bytes per element of a linear's saved input."""
    return BF16 if recipe is None else FP8


def pad_rows(recipe: Fp8Recipe | None, rows: int) -> int:
    """Return the rows of one expert after padding to a multiple of 16 in fp8, or of 32 in mxfp8.

    Source: `get_align_size_for_quantization` of Transformer Engine; `TEGroupedMLP` of megatron-core 0.16.1 pads each expert.
    """
    return rows if recipe is None else _round_up(rows, 32 if recipe == "mxfp8" else 16)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
