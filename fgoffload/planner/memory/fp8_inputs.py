"""The bytes that a linear layer keeps of its input, which is in fp8 where the linear works in fp8.

Under every recipe the linear keeps one fp8 copy, the one that its weight's gradient is computed from, and what scales it:

| recipe | data | scales |
|---|---|---|
| none | 2 bytes an element | |
| `delayed`, `tensorwise` | 1 byte | one number in fp32 |
| `blockwise` | 1 byte | one in fp32 for 128 rows of a channel |
| `mxfp8` | 1 byte | one byte for 32 rows of a channel, up to multiples of 4 and 128 |

The copy for forward goes as soon as forward is over. The `delayed` and `tensorwise` linears that gather their input again in
backward keep the row-wise copy instead, which is as large.

The channels of scales in blocks are padded to a multiple of 4, which channels of a linear in fp8 are anyway.

Source: the code of Transformer Engine 2.20.2: `Linear`, `LayerNormLinear` and `GroupedLinear`, which discard the row-wise data,
and `get_scale_shape` of the quantizers in `quantizer.cpp`. `tests/gpu/test_megatron_bytes.py` compares.
"""

from fgoffload.planner.model.layer_shape import Fp8Recipe

_BF16 = 2
_FP8 = 1
_FP32 = 4
"""Bytes of an element."""

_BLOCK_ROWS = 128
_MXFP8_BLOCK_ROWS = 32
"""Rows that share a scale."""


def count_input_bytes(recipe: Fp8Recipe | None, *, rows: int, channels: int) -> int:
    """Return what a linear keeps of an input `[rows, channels]` until its backward.

    Args:
        recipe: As in `--fp8-recipe`, or None for bf16.
        rows: Tokens, or rows of one expert.
        channels: Of each.
    """
    elements = rows * channels
    if recipe is None:
        return _BF16 * elements
    if recipe == "blockwise":
        return _FP8 * elements + _FP32 * -(-rows // _BLOCK_ROWS) * channels
    if recipe == "mxfp8":
        return _FP8 * elements + _round_up(rows // _MXFP8_BLOCK_ROWS, 4) * _round_up(channels, 128)
    return _FP8 * elements + _FP32


def get_input_element_bytes(recipe: Fp8Recipe | None) -> int:
    """Return the bytes of an element of what a linear keeps of its input."""
    return _BF16 if recipe is None else _FP8


def pad_rows(recipe: Fp8Recipe | None, rows: int) -> int:
    """Return the rows that one expert computes with: products in fp8 want a multiple of 16, in mxfp8 of 32.

    Source: `get_align_size_for_quantization` of Transformer Engine; `TEGroupedMLP` of megatron-core 0.16.1 pads each expert.
    """
    if recipe is None:
        return rows
    return _round_up(rows, 32 if recipe == "mxfp8" else 16)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
