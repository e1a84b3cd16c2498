"""Provides text as training data, one token per byte: no tokenizer, no download, the same microbatches in every run.

The default text is the source of Python's own standard library, which every machine has. If only times are measured, tokens
can be random.
"""

import dataclasses
import math
import os
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch

from fgoffload.errors import ConfigError
from fgoffload.trainer.training_arguments import TrainingArguments
from fgoffload.units import MIB

LARGEST_TEXT_BYTES = 4 * MIB
"""Maximum bytes to read. A demonstration needs far less."""

FP8_ROWS = 16
"""Number that must divide the row counts of FP8 matrix products. Source: Transformer Engine."""


@dataclasses.dataclass(frozen=True, slots=True)
class Microbatch:
    """Inputs of one forward pass. Shapes are `[b, s]`: sequences, tokens."""

    tokens: torch.Tensor
    """Model input, int64."""
    labels: torch.Tensor
    """Successor of each token, int64."""
    loss_mask: torch.Tensor
    """Mask of counted losses, float32: 1 everywhere, since text has no padding."""
    position_ids: torch.Tensor
    """Positions, int64, from 0 in every sequence."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Options for cutting microbatches from a text."""

    seq_length: int
    """Tokens of a sequence."""
    micro_batch_size: int
    """Sequences of a microbatch."""
    seed: int
    """Seed of the offsets into the text."""
    data_parallel_rank: int = 0
    """Data-parallel rank. Each rank reads at different offsets."""
    shortest: int | None = None
    """Shortest length. Each microbatch has its own length up to `seq_length`, equal on all ranks. None for fixed lengths."""
    length_multiple: int = 1
    """Divisor of all lengths."""
    split: str = ""
    """Name of the split. Each split reads at different offsets."""

    @classmethod
    def read(cls, arguments: TrainingArguments, *, data_parallel_rank: int, is_evaluation: bool) -> "Batches":
        """Return the options of a training: whole sequences, the same on all ranks of a model copy.

        Args:
            arguments: The training.
            data_parallel_rank: Data-parallel rank; each copy of the model sees different text.
            is_evaluation: Whether to use text that no training step uses.
        """
        multiple = arguments.sequence_shares
        if arguments.transformer.get("fp8"):
            multiple = math.lcm(multiple, FP8_ROWS * multiple)
        return cls(
            seq_length=arguments.seq_length,
            micro_batch_size=arguments.micro_batch_size,
            seed=arguments.seed,
            data_parallel_rank=data_parallel_rank,
            shortest=max(multiple, arguments.seq_length // 2) if arguments.has_variable_lengths else None,
            length_multiple=multiple,
            split="evaluation" if is_evaluation else "",
        )

    def draw_length(self, step: int, microbatch: int) -> int:
        """Return the sequence length of a microbatch."""
        if self.shortest is None:
            return self.seq_length
        draw = random.Random(f"length {self.split}{self.seed}/{step}/{microbatch}")
        multiple = self.length_multiple
        return multiple * draw.randint(-(-self.shortest // multiple), self.seq_length // multiple)


class TokenSource(Protocol):
    """Source of a training's microbatches."""

    def check_length(self, seq_length: int) -> None:
        """Check that there is enough text for one sequence.

        Raises:
            ConfigError: The text is too short.
        """

    def get_microbatch(self, batches: Batches, *, step: int, microbatch: int) -> Microbatch:
        """Return microbatch `microbatch` of step `step`. The same source and arguments give identical bits."""


class RandomTokens:
    """Random tokens from the whole vocabulary, drawn once. Every step has the same microbatches, already on the device.

    So no step draws or copies tokens, experts receive about equal numbers of tokens, and all steps have the same gradients.
    """

    def __init__(self, *, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._drawn: dict[tuple[Batches, int], Microbatch] = {}

    def check_length(self, seq_length: int) -> None:
        """Do nothing: random tokens do not run out."""

    def get_microbatch(self, batches: Batches, *, step: int, microbatch: int) -> Microbatch:
        """Return microbatch `microbatch`, the same in every step."""
        if (batches, microbatch) not in self._drawn:
            # As in `TextData`, each microbatch has its own seed, and torch's random state is unchanged.
            seed = random.Random(f"{batches.split}{batches.seed}/{microbatch}/{batches.data_parallel_rank}").getrandbits(63)
            size = batches.micro_batch_size, batches.draw_length(0, microbatch) + 1
            rows = torch.randint(self._vocab_size, size, generator=torch.Generator().manual_seed(seed))
            self._drawn[batches, microbatch] = _cut(rows.to(self._device))
        return self._drawn[batches, microbatch]


class TextData:
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
            raise ConfigError(f"--data {path} {'is no regular file' if os.path.exists(path) else 'does not exist'}. {other}")
        try:
            text = _read(iter([path]) if path.is_file() else _find_files(path))
        except OSError as error:
            why = f"{error.filename} cannot be read: {error.strerror}"
            raise ConfigError(f"--data {why}. Make it readable or leave it out.") from error
        if not text:
            raise ConfigError(f"--data {path} holds no bytes. {other}")
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

    def get_microbatch(self, batches: Batches, *, step: int, microbatch: int) -> Microbatch:
        """Return microbatch `microbatch` of step `step`, on the CPU.

        Raises:
            ConfigError: The text is shorter than a sequence.
        """
        self.check_length(batches.seq_length)
        # Python hashes a string seed with SHA-512, so no two microbatches share a seed. torch's random state is unchanged.
        draw = random.Random(f"{batches.split}{batches.seed}/{step}/{microbatch}/{batches.data_parallel_rank}")
        length = batches.draw_length(step, microbatch)
        starts = [draw.randrange(len(self) - length) for _ in range(batches.micro_batch_size)]
        rows = torch.stack([self._bytes[start : start + length + 1] for start in starts]).to(torch.int64)
        return _cut(rows)


def _cut(rows: torch.Tensor) -> Microbatch:
    """Split `rows`, `[b, s + 1]`, into the tensors of a microbatch, on the same device."""
    sequences, length = rows.shape[0], rows.shape[1] - 1
    return Microbatch(
        tokens=rows[:, :-1].contiguous(),
        labels=rows[:, 1:].contiguous(),
        loss_mask=torch.ones(sequences, length, dtype=torch.float32, device=rows.device),
        position_ids=torch.arange(length, device=rows.device).expand(sequences, length).contiguous(),
    )


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
