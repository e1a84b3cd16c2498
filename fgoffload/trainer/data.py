"""Provides text as training data, one token per byte: no tokenizer, no download, the same microbatches in every run.

The default text is the source of Python's own standard library, which every machine has. If only times are measured, tokens
can be random.
"""

import abc
import math
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

LARGEST_TEXT_BYTES = 4 * MIB
"""Maximum bytes to read. A demonstration needs far less."""

FP8_ROWS = 16
"""Number that must divide the row counts of FP8 matrix products. Source: Transformer Engine."""


class Microbatch(NamedTuple):
    """Inputs of one forward pass. Shapes are `[b, s]`: sequences, tokens."""

    tokens: torch.Tensor
    """Model input, int64."""
    labels: torch.Tensor
    """Successor of each token, int64."""
    loss_mask: torch.Tensor
    """Mask of counted losses, float32: 1 everywhere, since text has no padding."""
    position_ids: torch.Tensor
    """Positions, int64, from 0 in every sequence."""


class TokenSource(abc.ABC):
    """Source of a training run's microbatches."""

    @abc.abstractmethod
    def check_length(self, seq_length: int) -> None:
        """Check that there is enough text for one sequence.

        Raises:
            ConfigError: The text is too short.
        """

    @abc.abstractmethod
    def draw_rows(self, draw: random.Random, sequences: int, length: int) -> torch.Tensor:
        """Return int64 tokens, `[sequences, length]`, which only depend on the state of `draw`."""

    def get_microbatch(
        self, arguments: TrainingArguments, *, step: int, microbatch: int, data_parallel_rank: int = 0, split: str = ""
    ) -> Microbatch:
        """Return a microbatch of whole sequences. The same source and arguments give identical bits.

        Args:
            arguments: The training.
            step: Number of the step, from 0.
            microbatch: Number of the microbatch in the step, from 0.
            data_parallel_rank: Data-parallel rank. Each copy of the model sees different text.
            split: Name of the split. Each split has different text.

        Raises:
            ConfigError: The text is shorter than a sequence.
        """
        self.check_length(arguments.seq_length)
        # Python hashes a string seed with SHA-512, so no two microbatches share a seed. torch's random state is unchanged.
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
    """Random tokens from the whole vocabulary, drawn once. Every step has the same microbatches, already on the device.

    So no step draws or copies tokens, experts receive about equal numbers of tokens, and all steps have the same gradients. All
    trainings must have the same shapes.
    """

    def __init__(self, *, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._drawn: dict[tuple[int, int, str], Microbatch] = {}

    def check_length(self, seq_length: int) -> None:
        """Do nothing: random tokens do not run out."""

    def draw_rows(self, draw: random.Random, sequences: int, length: int) -> torch.Tensor:
        """Return random tokens on the device."""
        generator = torch.Generator().manual_seed(draw.getrandbits(63))
        return torch.randint(self._vocab_size, (sequences, length), generator=generator).to(self._device)

    def get_microbatch(
        self, arguments: TrainingArguments, *, step: int, microbatch: int, data_parallel_rank: int = 0, split: str = ""
    ) -> Microbatch:
        """Return a microbatch of whole sequences, the same in every step."""
        key = microbatch, data_parallel_rank, split
        if key not in self._drawn:
            self._drawn[key] = super().get_microbatch(
                arguments, step=0, microbatch=microbatch, data_parallel_rank=data_parallel_rank, split=split
            )
        return self._drawn[key]


class TextData(TokenSource):
    """A text in memory that is cut into microbatches.

    Args:
        text: At least two bytes, which are copied.
        name: Name of the text, for messages and errors.

    Raises:
        ConfigError: The text is too short for one token and its successor.
    """

    def __init__(self, text: bytes, *, name: str) -> None:
        if len(text) < 2:
            raise ConfigError(f"--data {name} has {len(text)} bytes. Give a text of at least one sequence.")
        self.name = name
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    @classmethod
    def load(cls, path: Path | None = None) -> "TextData":
        """Load the text at `path`.

        Args:
            path: A file, or a folder whose files are read in name order, subfolders included. None takes the Python standard
                library. At most `LARGEST_TEXT_BYTES` are read.

        Raises:
            ConfigError: `path` does not exist, or has nothing to read.
        """
        if path is None:
            return cls(_read(_find_library_files()), name="Python standard library")
        other = "Give a text file or a folder of them, or leave --data out."
        if not (path.is_file() or path.is_dir()):
            raise ConfigError(f"--data {path} {'is not a regular file' if os.path.exists(path) else 'does not exist'}. {other}")
        try:
            text = _read(iter([path]) if path.is_file() else _find_files(path))
        except OSError as error:
            why = f"{error.filename} cannot be read: {error.strerror}"
            raise ConfigError(f"--data {why}. Make it readable or leave it out.") from error
        if not text:
            raise ConfigError(f"--data {path} is empty. {other}")
        return cls(text, name=str(path))

    def __len__(self) -> int:
        """Return the number of bytes."""
        return self._bytes.numel()

    def check_length(self, seq_length: int) -> None:
        """Check that there is enough text for one sequence.

        Raises:
            ConfigError: The text is shorter than a sequence and its last label.
        """
        if len(self) < seq_length + 1:
            raise ConfigError(
                f"--data {self.name} has {len(self)} bytes and --seq-length {seq_length} needs {seq_length + 1}. "
                "Give a longer text or a shorter sequence."
            )

    def draw_rows(self, draw: random.Random, sequences: int, length: int) -> torch.Tensor:
        """Return sequences that begin anywhere in the text, on the CPU."""
        starts = [draw.randrange(len(self) + 1 - length) for _ in range(sequences)]
        return torch.stack([self._bytes[start : start + length] for start in starts]).to(torch.int64)


def _draw_length(arguments: TrainingArguments, place: str) -> int:
    """Return the sequence length of the microbatch at `place`, equal on all ranks: all of it, or from half of it on."""
    if not arguments.has_variable_lengths:
        return arguments.seq_length
    multiple = arguments.sequence_shares
    if arguments.transformer.get("fp8"):
        multiple = math.lcm(multiple, FP8_ROWS * multiple)
    shortest = max(multiple, arguments.seq_length // 2)
    return multiple * random.Random(f"length {place}").randint(-(-shortest // multiple), arguments.seq_length // multiple)


def _find_library_files() -> Iterator[Path]:
    # Installed packages, tests and optional parts differ between machines; the rest comes with every Python.
    left_out = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3", "ensurepip"}
    for folder, folders, files in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = sorted(set(folders) - left_out)
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def _find_files(folder: Path) -> Iterator[Path]:
    """Yield the regular files under `folder` in name order. Each folder is listed only when it is reached."""
    for path in sorted(folder.iterdir()):
        if path.is_file():
            yield path
        # Do not follow links: a link to a parent folder would never end.
        elif path.is_dir() and not path.is_symlink():
            yield from _find_files(path)


def _read(files: Iterator[Path]) -> bytes:
    """Return the first `LARGEST_TEXT_BYTES` of `files`. Later files are neither opened nor read."""
    text = bytearray()
    for path in files:
        with path.open("rb") as file:
            text += file.read(LARGEST_TEXT_BYTES - len(text))
        if len(text) >= LARGEST_TEXT_BYTES:
            break
    return bytes(text)
