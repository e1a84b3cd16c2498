"""Tests reproducible microbatches of text, and the errors of unsuitable text."""

from pathlib import Path

import pytest
import torch

from fgoffload.errors import ConfigError
from fgoffload.trainer.arguments import parse_arguments
from fgoffload.trainer.data import TextData


def make_arguments(*, seq_length=8, micro_batch_size=2, seed=1):
    flags = f"--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length {seq_length} --seed {seed}"
    return parse_arguments([*flags.split(), "--micro-batch-size", str(micro_batch_size)], source="test")


BATCHES = make_arguments()


def test_labels_are_the_next_bytes() -> None:
    batch = TextData(bytes(range(200)), name="x").get_microbatch(BATCHES, step=0, microbatch=0)

    assert batch.tokens.shape == batch.labels.shape == batch.loss_mask.shape == batch.position_ids.shape == (2, 8)
    assert torch.equal(batch.labels, batch.tokens + 1)
    assert torch.equal(batch.position_ids, torch.arange(8).expand(2, 8))
    assert batch.loss_mask.sum() == 16


def test_microbatches_depend_only_on_the_arguments() -> None:
    text = TextData(bytes(range(256)) * 40, name="x")
    first = text.get_microbatch(BATCHES, step=3, microbatch=1).tokens
    torch.manual_seed(5)
    others = [
        text.get_microbatch(BATCHES, step=4, microbatch=1).tokens,
        text.get_microbatch(BATCHES, step=3, microbatch=0).tokens,
        text.get_microbatch(make_arguments(seed=2), step=3, microbatch=1).tokens,
        text.get_microbatch(BATCHES, step=3, microbatch=1, data_parallel_rank=1).tokens,
    ]

    assert torch.equal(first, text.get_microbatch(BATCHES, step=3, microbatch=1).tokens)
    assert not any(torch.equal(first, other) for other in others)


def test_files_of_a_folder_are_read_in_name_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.txt").write_bytes(b"third")
    (tmp_path / "b" / "a.txt").write_bytes(b"second, ")
    (tmp_path / "c.txt").write_bytes(b"fourth")
    (tmp_path / "a.txt").write_bytes(b"first, ")
    text = TextData.load(tmp_path)
    whole = make_arguments(seq_length=len(text) - 1, micro_batch_size=1)

    assert bytes(text.get_microbatch(whole, step=0, microbatch=0).tokens[0].tolist()) == b"first, second, thirdfourt"


def test_a_path_without_text_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ConfigError, match=r"--data .*missing does not exist. Use a text file"):
        TextData.load(tmp_path / "missing")
    for name in ("empty", "empty.txt"):
        with pytest.raises(ConfigError, match=f"--data .*{name} is empty"):
            TextData.load(tmp_path / name)


def test_a_text_shorter_than_one_sequence_is_rejected() -> None:
    with pytest.raises(ConfigError, match="--data x has 8 bytes, but --seq-length 8 needs 9"):
        TextData(b"12345678", name="x").check_length(8)
