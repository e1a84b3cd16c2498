"""A small training on the released Megatron-Core: its GPT model, its pipeline schedules, a plain optimizer.

It exists to run the same training with and without offload and compare every bit. So two trainers with the same arguments and
text compute the same losses and gradients, in one process or in two, and what would break that is refused.
"""

import contextlib
import dataclasses
import functools
import gc
import hashlib
import logging
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import torch

from fgoffload.config import OffloadConfig
from fgoffload.errors import ConfigError, StateError
from fgoffload.integrations.megatron.arguments import TrainingArguments, build_transformer_config
from fgoffload.integrations.megatron.cpu_support import apply_cpu_support, apply_local_layer_support, needs_cpu_support
from fgoffload.integrations.megatron.data import Batches, Microbatch, TextData
from fgoffload.integrations.megatron.imports import ignore_expected_warnings, load_module
from fgoffload.integrations.megatron.models import build_chunks

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step computed."""

    step: int
    """From 0."""
    losses: tuple[float, ...]
    """One for each microbatch, in order; empty on all pipeline stages but the last, which alone computes them."""
    gradient_digests: dict[str, str]
    """By parameter, as `chunk.name`: the SHA-256 of its gradient's bytes. Empty where not asked for."""
    seconds: float
    """From the start of forward until the device had finished the optimizer, digests left out."""


class Trainer:
    """A model, its optimizer and its data. Call `initialize_parallel` first and `close` at the end."""

    def __init__(self, arguments: TrainingArguments, text: TextData, *, offload: OffloadConfig | None) -> None:
        """Build the model.

        Args:
            arguments: The training.
            text: What to train on.
            offload: Offload for this training, or None for none; `arguments.offload` is not looked at, so that one set of
                arguments serves both.

        Raises:
            ConfigError: The arguments ask for what this version does not have, or the text is too short.
            IntegrationError: Megatron-Core lacks a symbol that is needed.
            StateError: `initialize_parallel` was not called.
        """
        _refuse_what_is_not_built(arguments)
        text.check_length(arguments.seq_length)
        if not torch.distributed.is_initialized():
            raise StateError("no process group is initialized. Call Trainer.initialize_parallel(arguments) first.")
        self.arguments = arguments
        self.text = text
        self.integration: Any = None
        self._step = 0
        self._is_closed = False
        self._cleanup = contextlib.ExitStack()
        try:
            self._build(offload)
        except BaseException:
            self.close()
            raise

    def _build(self, offload: OffloadConfig | None) -> None:
        arguments = self.arguments
        self._cleanup.enter_context(apply_cpu_support() if needs_cpu_support() else apply_local_layer_support())
        self._cleanup.enter_context(_use_deterministic_algorithms())
        self._cleanup.enter_context(_keep_environment())
        self._cleanup.callback(_clear_megatron_buffers)
        if offload is not None:
            # Before the model: layers ask for the offload interface while they are built.
            from fgoffload.integrations import megatron

            self.integration = megatron.apply(offload)
            self._cleanup.callback(self.integration.remove)
        self._device = _get_device()
        _clear_megatron_buffers()
        _seed_everything(arguments.seed)
        self._config = build_transformer_config(arguments, offload=offload)
        self.chunks: list[torch.nn.Module] = [
            # The local norms are fp32 whatever the config says; Megatron-LM converts the whole model too.
            chunk.to(self._device, dtype=self._config.params_dtype)
            for chunk in build_chunks(arguments, self._config)
        ]
        self._optimizer = torch.optim.AdamW(self.parameters(), lr=arguments.lr)
        _logger.info(
            "%d parameters in %d model chunk(s) on %s.",
            sum(parameter.numel() for parameter in self.parameters()),
            len(self.chunks),
            self._device,
        )

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Iterate over the parameters of this rank, each once."""
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Iterate over the parameters of this rank with their names: `chunk.name`."""
        for index, chunk in enumerate(self.chunks):
            yield from chunk.named_parameters(prefix=str(index))

    def run_step(self, *, with_digests: bool = True) -> StepResult:
        """Run one optimizer step: all microbatches forward and backward, then the update.

        Args:
            with_digests: Also hash every gradient, after the time is taken.

        Raises:
            StateError: The trainer is closed.
        """
        if self._is_closed:
            raise StateError("this trainer is closed. Build another one.")
        start = time.perf_counter()
        with ignore_expected_warnings():
            losses = self._run_forward_backward()
        self._reduce_tied_embeddings()
        # Gradients are hashed between backward and the update; that time is taken out of the step's.
        hashing = time.perf_counter()
        digests = self._digest_gradients() if with_digests else {}
        start += time.perf_counter() - hashing
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        values = tuple(float(loss) for loss in losses)
        self._synchronize()
        result = StepResult(step=self._step, losses=values, gradient_digests=digests, seconds=time.perf_counter() - start)
        self._step += 1
        return result

    def close(self) -> None:
        """Free the model and put back everything that was replaced. A second call does nothing."""
        self._is_closed = True
        self.chunks = []
        self._optimizer = None  # type: ignore[assignment]
        self._cleanup.close()
        # Megatron's modules hold cycles (a layer and its bound methods), and the next trainer needs the memory.
        gc.collect()

    @staticmethod
    def initialize_parallel(arguments: TrainingArguments) -> None:
        """Make the process groups: for this process by itself, or within the process group that exists already.

        What a launcher left in the environment (`WORLD_SIZE`, `RANK`, `MASTER_ADDR`) is not looked at: a training of one
        process must not wait for others.

        Raises:
            ConfigError: The sizes do not fit the number of processes.
        """
        parallel_state = load_module("megatron.core.parallel_state")
        if not torch.distributed.is_initialized():
            _initialize_distributed()
        world_size = torch.distributed.get_world_size()
        if world_size != arguments.world_size:
            raise ConfigError(
                f"{arguments.source}: the arguments are for {arguments.world_size} process(es), and the process group has "
                f"{world_size}. Call torch.distributed.init_process_group in {arguments.world_size} process(es) first."
            )
        _refuse_what_is_not_built(arguments)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=arguments.tensor_parallel_size,
            pipeline_model_parallel_size=arguments.pipeline_parallel_size,
            virtual_pipeline_model_parallel_size=arguments.virtual_pipeline_size,
            create_gloo_process_groups=False,  # for checkpoints, which are not written here
        )

    @staticmethod
    def destroy_parallel() -> None:
        """Take down what `initialize_parallel` made."""
        load_module("megatron.core.parallel_state").destroy_model_parallel()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def _run_forward_backward(self) -> list[torch.Tensor]:
        """Run all microbatches through Megatron's schedule and return their losses, one element each."""
        arguments = self.arguments
        for chunk in self.chunks:
            chunk.train()
        schedules = load_module("megatron.core.pipeline_parallel")
        reports = schedules.get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=[self._iterate_microbatches() for _ in self.chunks],
            model=self.chunks,
            num_microbatches=arguments.num_microbatches,
            seq_length=arguments.seq_length,
            micro_batch_size=arguments.micro_batch_size,
            forward_only=False,
        )
        return [report["lm loss"] for report in reports]

    def _iterate_microbatches(self) -> Iterator[Microbatch]:
        batches = Batches(
            seq_length=self.arguments.seq_length,
            micro_batch_size=self.arguments.micro_batch_size,
            seed=self.arguments.seed,
        )
        return self.text.iterate_microbatches(batches, step=self._step, count=self.arguments.num_microbatches)

    def _forward_step(self, microbatches: Iterator[Microbatch], chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        batch = next(microbatches)
        tokens, labels, loss_mask, position_ids = (
            tensor.to(self._device) for tensor in (batch.tokens, batch.labels, batch.loss_mask, batch.position_ids)
        )
        # No mask: the local attention makes the causal one itself.
        output = chunk(tokens, position_ids, None, labels=labels)
        return output, functools.partial(_compute_loss, loss_mask)

    def _reduce_tied_embeddings(self) -> None:
        """Add up the gradients of the embedding and of the output layer where they are one weight on two stages."""
        arguments = self.arguments
        if arguments.untie_embeddings_and_output_weights or arguments.pipeline_parallel_size == 1:
            return
        parallel_state = load_module("megatron.core.parallel_state")
        group = parallel_state.get_embedding_group(check_initialized=False)
        if not parallel_state.is_rank_in_embedding_group():
            return
        is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        chunk: Any = self.chunks[0 if is_first else -1]
        torch.distributed.all_reduce(chunk.shared_embedding_or_output_weight().grad, group=group)

    def _digest_gradients(self) -> dict[str, str]:
        return {
            name: digest_tensor(parameter.grad) for name, parameter in self.named_parameters() if parameter.grad is not None
        }

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def digest_tensor(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of the bytes of `tensor`, as hexadecimal digits."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def _compute_loss(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the mean loss of a microbatch, and the same for the report.

    Args:
        loss_mask: `[b, s]`.
        output: The loss of each token, `[b, s]`.
    """
    loss = (output.float() * loss_mask).sum() / loss_mask.sum()
    # Megatron divides the first by the number of microbatches in place.
    return loss, {"lm loss": loss.detach().clone()}


def _refuse_what_is_not_built(arguments: TrainingArguments) -> None:
    given = arguments.transformer
    for flag, is_given, instead in (
        ("data-parallel training", arguments.data_parallel_size > 1, "start as many processes as one copy of the model needs"),
        ("--context-parallel-size above 1", given.get("context_parallel_size", 1) > 1, "leave it at 1"),
        ("--expert-tensor-parallel-size above 1", (given.get("expert_tensor_parallel_size") or 1) > 1, "leave it at 1"),
        ("--expert-model-parallel-size above 1", given.get("expert_model_parallel_size", 1) > 1, "leave it at 1"),
        ("--tensor-model-parallel-size above 1", arguments.tensor_parallel_size > 1, "leave it at 1"),
        ("--fp16, which needs loss scaling,", given.get("fp16", False), "give --bf16"),
        ("--moe-router-enable-expert-bias", given.get("moe_router_enable_expert_bias", False), "leave it out"),
        ("--moe-grouped-gemm, which needs Transformer Engine,", given.get("moe_grouped_gemm", False), "leave it out"),
        (
            "--multi-latent-attention, which needs Transformer Engine,",
            given.get("multi_latent_attention", False),
            "leave it out",
        ),
        ("--masked-softmax-fusion, which needs Apex,", given.get("masked_softmax_fusion", False), "leave it out"),
        ("--mtp-num-layers", bool(given.get("mtp_num_layers")), "leave it out"),
        ("--transformer-impl other than local", given.get("transformer_impl", "local") != "local", "give local"),
    ):
        if is_given:
            raise arguments.source.refuse(f"{flag} is not built yet in this version: {instead}.")
    # The checkpointed MLP returns its bias, a parameter, and autograd then takes the checkpoint for what computed that
    # parameter: the recompute in backward runs into itself until memory is full. Seen with megatron-core 0.16.1.
    recomputes_mlp = given.get("recompute_granularity") == "selective" and "mlp" in (given.get("recompute_modules") or ())
    if recomputes_mlp and given.get("add_bias_linear", True):
        raise arguments.source.refuse(
            "--recompute-modules mlp never ends in backward where linear layers have biases "
            "(megatron-core 0.16.1). Add --disable-bias-linear or leave mlp out."
        )


def _initialize_distributed() -> None:
    # A store of its own needs no port that something else could hold, and reads nothing from the environment.
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo" if needs_cpu_support() else "nccl", store=store, rank=0, world_size=1)


def _get_device() -> torch.device:
    return torch.device("cpu") if needs_cpu_support() else torch.device("cuda", torch.cuda.current_device())


def _seed_everything(seed: int) -> None:
    """Set all random state from `seed`, as Megatron-LM does: each pipeline stage draws weights of its own."""
    parallel_state = load_module("megatron.core.parallel_state")
    rank_seed = seed + 100 * int(parallel_state.get_pipeline_model_parallel_rank())
    random.seed(rank_seed)
    torch.manual_seed(rank_seed)
    load_module("megatron.core.tensor_parallel.random").model_parallel_cuda_manual_seed(rank_seed, force_reset_rng=True)
    torch.manual_seed(rank_seed)


def _clear_megatron_buffers() -> None:
    """Empty what Megatron keeps for the whole process: scratch memory, and the experts' losses by layer number."""
    parallel_state = load_module("megatron.core.parallel_state")
    if parallel_state.model_parallel_is_initialized():
        parallel_state.get_global_memory_buffer().buffer.clear()
    load_module("megatron.core.transformer.moe.moe_utils").get_moe_layer_wise_logging_tracker().clear()


@contextlib.contextmanager
def _use_deterministic_algorithms() -> Iterator[None]:
    """Have torch choose deterministic kernels, and warn where it has none."""
    was_enabled = torch.are_deterministic_algorithms_enabled()
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # Deterministic matrix products need this before CUDA's first one.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=was_enabled, warn_only=was_warn_only)


@contextlib.contextmanager
def _keep_environment() -> Iterator[None]:
    """Undo what Megatron's model writes to the environment: the attention backend, for Transformer Engine to read.

    The next model raises where it finds another backend there than its own.
    """
    names = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
