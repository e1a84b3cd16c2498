"""Sets up the processes of a training run: groups, device, seeds, and Megatron's process-wide state."""

import contextlib
import os
import random
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import torch

from fgoffload.environment import keep_environment
from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.patching.cpu_support import has_transformer_engine, needs_cpu_support
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.planner.timing.profile import CPU
from fgoffload.trainer.limits import refuse_what_is_not_built
from fgoffload.trainer.training_arguments import TrainingArguments

ATTENTION_BACKENDS = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
"""Variables that Megatron's model sets for Transformer Engine. The next model raises if they name another backend."""


def join_processes(*, rank: int, world_size: int, local_rank: int, store: Path | None = None) -> None:
    """Create the process group of all launched processes, and select this process's GPU.

    Args:
        rank: Rank of this process, from 0.
        world_size: Number of processes.
        local_rank: Rank among the processes of this machine, from 0, which is also the number of its GPU.
        store: A file that does not exist yet, through which the processes connect. None uses `MASTER_ADDR` and `MASTER_PORT`,
            which `torchrun` sets.

    Raises:
        ConfigError: The machine has no GPU of that number, or the environment has no address.
    """
    if not needs_cpu_support():
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"LOCAL_RANK {local_rank} exceeds the {torch.cuda.device_count()} GPU(s) of this machine. "
                "Start one process per GPU: torchrun --nproc-per-node gpu."
            )
        torch.cuda.set_device(local_rank)
        # NVLS may sum in any order. All other algorithms have a fixed order, which bitwise comparison needs.
        os.environ.setdefault("NCCL_ALGO", "^NVLS")
    try:
        shared = None if store is None else torch.distributed.FileStore(str(store), world_size)  # type: ignore[attr-defined]
        torch.distributed.init_process_group(_choose_backend(), store=shared, rank=rank, world_size=world_size)
    except ValueError as error:
        raise ConfigError(
            f"the processes cannot connect: {error}. Start them with torchrun, which sets the address."
        ) from error


def initialize_parallel(arguments: TrainingArguments) -> None:
    """Create Megatron's process groups: for this process alone, or within the existing process group.

    A launcher's variables (`WORLD_SIZE`, `RANK`, `MASTER_ADDR`) are ignored, since a single process must not wait for
    others. `join_processes` reads them.

    Raises:
        ConfigError: The sizes do not fit the number of processes, or this version does not support them.
    """
    parallel_state = load_module("megatron.core.parallel_state")
    if not torch.distributed.is_initialized():
        # An in-process store needs no free port, and reads nothing from the environment.
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group(_choose_backend(), store=store, rank=0, world_size=1)
    world_size = torch.distributed.get_world_size()
    if world_size != arguments.world_size:
        raise ConfigError(
            f"{arguments.source}: the arguments are for {arguments.world_size} process(es), and the process group has "
            f"{world_size}. Call torch.distributed.init_process_group in {arguments.world_size} process(es) first."
        )
    refuse_what_is_not_built(arguments)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=arguments.tensor_parallel_size,
        pipeline_model_parallel_size=arguments.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=arguments.virtual_pipeline_size,
        context_parallel_size=arguments.context_parallel_size,
        expert_model_parallel_size=arguments.expert_parallel_size,
        expert_tensor_parallel_size=arguments.expert_tensor_parallel_size,
        create_gloo_process_groups=False,  # for checkpoints, which this package does not write
    )


def destroy_parallel() -> None:
    """Destroy Megatron's process groups, and the process group itself."""
    load_module("megatron.core.parallel_state").destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def get_device() -> torch.device:
    """Return the device of the models: the CPU, or the current GPU."""
    return torch.device("cpu") if needs_cpu_support() else torch.device("cuda", torch.cuda.current_device())


def name_device() -> str:
    """Return the driver's name of this process's device, or `CPU`."""
    return CPU if needs_cpu_support() else torch.cuda.get_device_name()


def get_data_parallel_rank() -> int:
    """Return the number of this process's copy of the model, from 0."""
    return int(load_module("megatron.core.parallel_state").get_data_parallel_rank())


def seed_everything(arguments: TrainingArguments) -> None:
    """Seed all random states like Megatron-LM. If graphs are captured, the generators are ones that graphs can capture.

    Pipeline stages draw different weights. Through Megatron's tracker, tensor- and expert-parallel ranks draw different parts
    of one weight, but identical shared weights. All copies of the model draw identical weights.
    """
    parallel_state = load_module("megatron.core.parallel_state")
    rank_seed = arguments.seed + 100 * int(parallel_state.get_pipeline_model_parallel_rank())
    random.seed(rank_seed)
    torch.manual_seed(rank_seed)
    load_module("megatron.core.tensor_parallel.random").model_parallel_cuda_manual_seed(
        rank_seed,
        te_rng_tracker=arguments.uses_te_rng_tracker,
        use_cudagraphable_rng=arguments.captures_graphs,
        force_reset_rng=True,
    )
    torch.manual_seed(rank_seed)


def clear_megatron_buffers() -> None:
    """Clear the process-wide state of Megatron and Transformer Engine: scratch memory, losses by layer, FP8 scales."""
    parallel_state = load_module("megatron.core.parallel_state")
    if parallel_state.model_parallel_is_initialized():
        parallel_state.get_global_memory_buffer().buffer.clear()
    get_router_losses().clear()
    load_module("megatron.core.transformer.multi_token_prediction").MTPLossLoggingHelper.tracker.clear()
    if has_transformer_engine():
        load_module("megatron.core.tensor_parallel.random").FP8GlobalStateManager.reset()


@contextlib.contextmanager
def use_deterministic_algorithms() -> Iterator[None]:
    """Make torch and Transformer Engine use deterministic kernels. torch warns if it has none for an operator."""
    was_enabled = torch.are_deterministic_algorithms_enabled()
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # Deterministic matrix products need this before the first CUDA matrix product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    # At 0, Transformer Engine only uses attention kernels whose backward adds in a fixed order.
    variable = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
    try:
        with keep_environment((variable,)):
            os.environ[variable] = "0"
            yield
    finally:
        torch.use_deterministic_algorithms(mode=was_enabled, warn_only=was_warn_only)


def get_router_losses() -> MutableMapping[str, Any]:
    """Return Megatron's own mapping of router losses, not a copy, so that callers can clear it."""
    utils = load_module("megatron.core.transformer.moe.moe_utils")
    # The development branch keeps them in an object, and the old function returns a copy.
    find_tracker = getattr(utils, "get_moe_metrics_tracker", None)
    losses: MutableMapping[str, Any] = find_tracker().metrics if find_tracker else utils.get_moe_layer_wise_logging_tracker()
    return losses


def _choose_backend() -> str:
    return "gloo" if needs_cpu_support() else "nccl"
