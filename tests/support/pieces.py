"""Storages that share one allocation, like Transformer Engine's quantized inputs and their scales."""

import torch


class TwoOfOneAllocation(torch.autograd.Function):
    """Saves its input in a large piece of an allocation, and a factor in a small piece."""

    @staticmethod
    def forward(ctx, h, make_pieces):
        """Return three times `h`. `make_pieces` maps the number of elements to two flat pieces."""
        data, scale = make_pieces(h.numel())
        data.copy_(h)
        scale.fill_(3)
        ctx.save_for_backward(data, scale)
        return h * 3

    @staticmethod
    def backward(ctx, gradient):
        data, scale = ctx.saved_tensors
        return gradient * scale[0] + data, None
