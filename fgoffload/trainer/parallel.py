"""Sets up the processes of a training run: groups, device, seeds, and Megatron's global state."""

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
from fgoffload.trainer.training_arguments import TrainingArguments

ATTENTION_BACKENDS = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
"""Environment variables that Megatron's model sets for Transformer Engine. A later model with another backend rejects them."""


def join_processes(*, rank: int, world_size: int, local_rank: int, store: Path | None = None) -> None:
    """Create the process group of all launched processes, and select GPU number `local_rank`.

    The processes connect through the file `store`, which must not exist yet, or through the address that `torchrun` sets.

    Raises:
        ConfigError: The machine has no GPU with that number, or the environment contains no address.
    """
    if not needs_cpu_support():
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"LOCAL_RANK {local_rank} is too high: this machine has only {torch.cuda.device_count()} GPU(s). "
                "Start one process per GPU: torchrun --nproc-per-node gpu."
            )
        torch.cuda.set_device(local_rank)
        # Bitwise comparison needs a fixed order of summation, which NVLS does not guarantee.
        os.environ.setdefault("NCCL_ALGO", "^NVLS")
    try:
        shared = None if store is None else torch.distributed.FileStore(str(store), world_size)  # type: ignore[attr-defined]
        torch.distributed.init_process_group(_choose_backend(), store=shared, rank=rank, world_size=world_size)
    except ValueError as error:
        raise ConfigError(
            f"the processes cannot connect: {error}. Start them with torchrun, which sets the address."
        ) from error


def initialize_parallel(arguments: TrainingArguments) -> None:
    """Create Megatron's process groups within the existing process group, or for this process alone if none exists.

    This ignores launcher variables such as `WORLD_SIZE` and `RANK`. To use them, call `join_processes` first.

    Raises:
        ConfigError: The arguments are for a different number of processes.
    """
    parallel_state = load_module("megatron.core.parallel_state")
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group(_choose_backend(), store=store, rank=0, world_size=1)
    world_size = torch.distributed.get_world_size()
    if world_size != arguments.world_size:
        raise ConfigError(
            f"{arguments.source}: the arguments are for {arguments.world_size} process(es), but the process group has "
            f"{world_size}. Call torch.distributed.init_process_group in {arguments.world_size} process(es) first."
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=arguments.tensor_parallel_size,
        pipeline_model_parallel_size=arguments.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=arguments.virtual_pipeline_size,
        context_parallel_size=arguments.context_parallel_size,
        expert_model_parallel_size=arguments.expert_parallel_size,
        expert_tensor_parallel_size=arguments.expert_tensor_parallel_size,
        create_gloo_process_groups=False,  # only needed for checkpoints, which this package does not write
    )


def destroy_parallel() -> None:
    """Destroy all process groups."""
    load_module("megatron.core.parallel_state").destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def get_device() -> torch.device:
    """Return the current GPU, or the CPU if there is no GPU."""
    return torch.device("cpu") if needs_cpu_support() else torch.device("cuda", torch.cuda.current_device())


def name_device() -> str:
    """Return the driver's name for this process's GPU, or `CPU`."""
    return CPU if needs_cpu_support() else torch.cuda.get_device_name()


def seed_everything(arguments: TrainingArguments) -> None:
    """Seed all random states like Megatron-LM: differently per pipeline stage, but identically for all copies of the model."""
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
    """Clear the global state of Megatron and Transformer Engine: scratch memory, per-layer losses, and FP8 scales."""
    parallel_state = load_module("megatron.core.parallel_state")
    if parallel_state.model_parallel_is_initialized():
        parallel_state.get_global_memory_buffer().buffer.clear()
    get_router_losses().clear()
    load_module("megatron.core.transformer.multi_token_prediction").MTPLossLoggingHelper.tracker.clear()
    if has_transformer_engine():
        load_module("megatron.core.tensor_parallel.random").FP8GlobalStateManager.reset()


@contextlib.contextmanager
def use_deterministic_algorithms() -> Iterator[None]:
    """Make torch and Transformer Engine use deterministic kernels. For ops that have none, torch only warns."""
    was_enabled = torch.are_deterministic_algorithms_enabled()
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # cuBLAS reads this variable at the first matrix product. Its results are deterministic only with this setting.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    # With 0, Transformer Engine only uses attention kernels with a deterministic backward.
    variable = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
    try:
        with keep_environment((variable,)):
            os.environ[variable] = "0"
            yield
    finally:
        torch.use_deterministic_algorithms(mode=was_enabled, warn_only=was_warn_only)


def get_router_losses() -> MutableMapping[str, Any]:
    """Return Megatron's own mapping of router losses, so that callers can clear it."""
    utils = load_module("megatron.core.transformer.moe.moe_utils")
    # In Megatron's development branch, `get_moe_layer_wise_logging_tracker` returns a copy.
    find_tracker = getattr(utils, "get_moe_metrics_tracker", None)
    losses: MutableMapping[str, Any] = find_tracker().metrics if find_tracker else utils.get_moe_layer_wise_logging_tracker()
    return losses


def _choose_backend() -> str:
    return "gloo" if needs_cpu_support() else "nccl"
