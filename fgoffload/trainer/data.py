"""Provides training data without a tokenizer or a download: the bytes of a text, or random tokens.

The default text is the source of Python's standard library.
"""

import abc
import os
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from fgoffload.errors import ConfigError
from fgoffload.trainer.training_arguments import TrainingArguments
from fgoffload.units import MIB

MAX_TEXT_BYTES = 4 * MIB
"""Maximum number of bytes to load. Later text is ignored."""


class Microbatch(NamedTuple):
    """Inputs of one forward pass. All tensors have the shape `[b, s]` (sequences, tokens)."""

    tokens: torch.Tensor
    """Model input, int64."""
    labels: torch.Tensor
    """Next token at each position, int64."""
    loss_mask: torch.Tensor
    """Weight of each token's loss, float32. All weights are 1, because the text has no padding."""
    position_ids: torch.Tensor
    """Positions, int64, starting at 0 in every sequence."""


class TokenSource(abc.ABC):
    """Source of a training run's microbatches."""

    def check_length(self, seq_length: int) -> None:  # noqa: B027 - random tokens are never too few
        """Raise ConfigError if the text is too short for one sequence."""

    @abc.abstractmethod
    def draw_rows(self, generator: random.Random, sequences: int, length: int) -> torch.Tensor:
        """Return int64 tokens `[sequences, length]` that depend only on the state of `generator`."""

    def get_microbatch(
        self, arguments: TrainingArguments, *, step: int, microbatch: int, data_parallel_rank: int = 0, split: str = ""
    ) -> Microbatch:
        """Return a microbatch of whole sequences. For a given source, it depends only on the arguments.

        Steps and microbatches are counted from 0. Each data-parallel rank and each split gets different text.
        """
        self.check_length(arguments.seq_length)
        # `random` hashes a string seed with SHA-512, so no two microbatches share a seed. torch's random state is unchanged.
        place = f"{split}{arguments.seed}/{step}/{microbatch}"
        length = _draw_length(arguments, place)
        rows = self.draw_rows(random.Random(f"{place}/{data_parallel_rank}"), arguments.micro_batch_size, length + 1)
        return Microbatch(
            tokens=rows[:, :-1].contiguous(),
            labels=rows[:, 1:].contiguous(),
            loss_mask=torch.ones(len(rows), length, dtype=torch.float32, device=rows.device),
            position_ids=torch.arange(length, device=rows.device).expand(len(rows), length).contiguous(),
        )


class RandomTokens(TokenSource):
    """Random tokens from the whole vocabulary, drawn once and kept on the device. Every step reuses them.

    Experts then receive about equal numbers of tokens. All training runs that share this source must have the same shapes.
    """

    def __init__(self, *, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._drawn: dict[tuple[int, int, str], Microbatch] = {}

    def draw_rows(self, generator: random.Random, sequences: int, length: int) -> torch.Tensor:
        """Return random tokens on the device."""
        seeded = torch.Generator().manual_seed(generator.getrandbits(63))
        return torch.randint(self._vocab_size, (sequences, length), generator=seeded).to(self._device)

    def get_microbatch(
        self, arguments: TrainingArguments, *, step: int, microbatch: int, data_parallel_rank: int = 0, split: str = ""
    ) -> Microbatch:
        """Return a microbatch, which is the same in every step."""
        key = microbatch, data_parallel_rank, split
        if key not in self._drawn:
            self._drawn[key] = super().get_microbatch(
                arguments, step=0, microbatch=microbatch, data_parallel_rank=data_parallel_rank, split=split
            )
        return self._drawn[key]


class TextData(TokenSource):
    """Text in memory, with one token per byte. Errors refer to the text as `name`."""

    def __init__(self, text: bytes, *, name: str) -> None:
        self.name = name
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    @classmethod
    def load(cls, path: Path | None = None) -> "TextData":
        """Load at most `MAX_TEXT_BYTES` from a file, or from all files in a folder, sorted by name.

        Without `path`, load the source of Python's standard library.

        Raises:
            ConfigError: `path` does not exist, cannot be read, or is empty.
        """
        if path is None:
            files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
            return cls(_read(iter(files)), name="Python standard library")
        fix = "Use a text file or a folder of text files, or remove --data."
        if not (path.is_file() or path.is_dir()):
            raise ConfigError(f"--data {path} {'is not a regular file' if os.path.exists(path) else 'does not exist'}. {fix}")
        try:
            text = _read(iter([path]) if path.is_file() else _find_files(path))
        except OSError as error:
            raise ConfigError(f"--data {error.filename} cannot be read: {error.strerror}. {fix}") from error
        if not text:
            raise ConfigError(f"--data {path} is empty. {fix}")
        return cls(text, name=str(path))

    def __len__(self) -> int:
        """Return the number of bytes."""
        return self._bytes.numel()

    def check_length(self, seq_length: int) -> None:
        """Raise ConfigError if the text is too short for one sequence and its last label."""
        if len(self) < seq_length + 1:
            raise ConfigError(
                f"--data {self.name} has {len(self)} bytes, but --seq-length {seq_length} needs {seq_length + 1}. "
                "Use a longer text or a shorter sequence."
            )

    def draw_rows(self, generator: random.Random, sequences: int, length: int) -> torch.Tensor:
        """Return sequences that start at random positions in the text, as a CPU tensor."""
        starts = [generator.randrange(len(self) + 1 - length) for _ in range(sequences)]
        return torch.stack([self._bytes[start : start + length] for start in starts]).to(torch.int64)


def _draw_length(arguments: TrainingArguments, place: str) -> int:
    """Return the sequence length of a microbatch, which is the same on all ranks."""
    if not arguments.has_variable_lengths:
        return arguments.seq_length
    multiple = arguments.sequence_shares
    shortest = max(multiple, arguments.seq_length // 2)
    return multiple * random.Random(f"length {place}").randint(-(-shortest // multiple), arguments.seq_length // multiple)


def _find_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_file():
            yield path
        elif path.is_dir() and not path.is_symlink():  # a link to a parent folder would recurse forever
            yield from _find_files(path)


def _read(files: Iterator[Path]) -> bytes:
    """Return the first `MAX_TEXT_BYTES` of `files`."""
    text = bytearray()
    for path in files:
        with path.open("rb") as file:
            text += file.read(MAX_TEXT_BYTES - len(text))
        if len(text) >= MAX_TEXT_BYTES:
            break
    return bytes(text)
