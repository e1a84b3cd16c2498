"""Tests that gradient digests cover every bit and do not depend on threads."""

import hashlib

import torch

from fgoffload.trainer.gradients import digest_tensor, digest_tensors


def make_tensors(count: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    # Later tensors are smaller, so threads finish in a different order than they start.
    return {f"parameter {index}": torch.randn(count - index, 1000, generator=generator) for index in range(count)}


def test_digests_keep_the_order_and_names_of_their_tensors():
    tensors = make_tensors(40)
    digests = digest_tensors(tensors)
    assert list(digests) == list(tensors)
    assert digests == {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}


def test_flipping_one_bit_changes_only_that_tensors_digest():
    tensors = make_tensors(5)
    before = digest_tensors(tensors)
    tensors["parameter 3"].view(torch.int32)[1, 7] ^= 1
    after = digest_tensors(tensors)
    assert [name for name in tensors if before[name] != after[name]] == ["parameter 3"]


def test_digests_depend_on_the_sign_of_zero_but_not_on_strides():
    assert digest_tensor(torch.tensor([0.0])) != digest_tensor(torch.tensor([-0.0]))
    square = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    assert digest_tensor(square.t()) == digest_tensor(square.t().contiguous()) != digest_tensor(square)
