"""Trains Megatron-Core's GPT model with Megatron's schedules and parallelism, and with torch's AdamW.

By default, two trainers with the same arguments and text compute bitwise identical losses and gradients, with and without
offload.
"""

import contextlib
import dataclasses
import gc
import time
from collections.abc import Iterator
from typing import Any

import torch

from fgoffload.config import OffloadConfig
from fgoffload.engine import ActivationLedger
from fgoffload.environment import keep_environment
from fgoffload.errors import StateError
from fgoffload.integrations.megatron.patching.cpu_support import apply_cpu_support, apply_local_layer_support, needs_cpu_support
from fgoffload.integrations.megatron.patching.imports import ignore_expected_warnings, load_module
from fgoffload.trainer import megatron_engine, parallel
from fgoffload.trainer.arguments import build_transformer_config
from fgoffload.trainer.data import TokenSource
from fgoffload.trainer.forward_step import LOSS, ForwardStep
from fgoffload.trainer.gradients import MainGradOptimizer, digest_tensors, get_main_grad, release_graphs, wrap_chunks
from fgoffload.trainer.limits import check_supported
from fgoffload.trainer.models import build_chunks, clear_rotary_caches
from fgoffload.trainer.steps import StepResult
from fgoffload.trainer.training_arguments import TrainingArguments
from fgoffload.trainer.training_graphs import choose_graphs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPolicy:
    """Options of a training run besides its model and data. The defaults are for bitwise comparison."""

    is_deterministic: bool = True
    """Whether to use bitwise reproducible kernels, which are slower."""
    has_optimizer: bool = True
    """Whether to update the parameters with AdamW. Otherwise, a step only runs forward and backward."""
    uses_megatrons_engine: bool = False
    """Whether to offload with Megatron-Core's own engine instead of ours. See `megatron_engine`."""


DEFAULT_POLICY = TrainingPolicy()


class Trainer:
    """A model, its optimizer and its data. Call `parallel.initialize_parallel` first and `close` at the end."""

    def __init__(
        self,
        arguments: TrainingArguments,
        text: TokenSource,
        *,
        offload: OffloadConfig | None,
        policy: TrainingPolicy = DEFAULT_POLICY,
    ) -> None:
        """Build this rank's part of the model. `offload` replaces `arguments.offload`, and None disables offload.

        Raises:
            ConfigError: This version or machine does not support the arguments, or the text is too short.
            IntegrationError: Megatron-Core lacks a required symbol.
            StateError: `initialize_parallel` was not called.
        """
        check_supported(arguments)
        text.check_length(arguments.seq_length)
        if not torch.distributed.is_initialized():
            raise StateError(
                "no process group is initialized. Call initialize_parallel(arguments) of fgoffload.trainer.parallel first."
            )
        self.arguments = arguments
        self.text = text
        self.policy = policy
        self.integration: Any = None
        """Our Megatron-Core integration. None without offload or with Megatron's own engine."""
        self.chunks: list[torch.nn.Module] = []
        """Model chunks of this rank, without the data-parallel wrapper."""
        self.graphs = choose_graphs(arguments)
        self._wrapped_chunks: list[Any] = []
        self._optimizer: MainGradOptimizer | None = None
        self._step = 0
        self._evaluations = 0
        self._consumed_samples = 0
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
        if self.policy.is_deterministic:
            self._cleanup.enter_context(parallel.use_deterministic_algorithms())
        self._cleanup.enter_context(keep_environment(parallel.ATTENTION_BACKENDS))
        self._cleanup.callback(parallel.clear_megatron_buffers)
        if offload is not None and not self.policy.uses_megatrons_engine:
            from fgoffload.integrations import megatron

            # Layers look up the offload interface when they are built.
            self.integration = megatron.apply(offload)
            self._cleanup.callback(self.integration.remove)
        self._device = parallel.get_device()
        parallel.clear_megatron_buffers()
        parallel.seed_everything(arguments)
        config = build_transformer_config(arguments, offload=offload)
        if offload is not None and self.policy.uses_megatrons_engine:
            megatron_engine.prepare(offload, config)
            self._cleanup.callback(megatron_engine.reset)
        # Megatron creates its local norm layers in fp32, so convert the whole model, as Megatron-LM does.
        self.chunks = [chunk.to(self._device, dtype=config.params_dtype) for chunk in build_chunks(arguments, config)]
        with self.graphs.wrapping():
            self._wrapped_chunks = wrap_chunks(self.chunks, config, arguments)
        self.graphs.start(self._wrapped_chunks, config)
        self._forward_step = ForwardStep(arguments, self._device)
        if self.policy.has_optimizer:
            self._optimizer = MainGradOptimizer(self.parameters(), lr=arguments.lr)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Iterate over the parameters of this rank, each once."""
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Iterate over the parameters of this rank, with names such as `0.output_layer.weight`, prefixed by the chunk."""
        for index, chunk in enumerate(self.chunks):
            yield from chunk.named_parameters(prefix=str(index))

    def run_step(self, *, with_digests: bool = True) -> StepResult:
        """Run one optimizer step: forward and backward of all microbatches, then the update."""
        self._check_open()
        for chunk in self._wrapped_chunks:
            chunk.train()
        self.graphs.prepare_step(self._step)  # not timed, because it may capture graphs
        start = time.perf_counter()
        for chunk in self._wrapped_chunks:
            chunk.zero_grad_buffer()
        count = self.arguments.count_microbatches(self._consumed_samples)
        losses = self._run_schedule(count, is_evaluation=False)
        digests: dict[str, str] = {}
        if with_digests:
            # The hashing threads copy on their own streams, so backward must be done. Hashing is not part of the step time.
            self._synchronize()
            hashing = time.perf_counter()
            digests = digest_tensors({name: get_main_grad(parameter) for name, parameter in self.named_parameters()})
            start += time.perf_counter() - hashing
        if self._optimizer is not None:
            self._optimizer.step()
        values = tuple(float(loss) for loss in losses)
        self._synchronize()
        result = StepResult(step=self._step, losses=values, gradient_digests=digests, seconds=time.perf_counter() - start)
        self._step += 1
        self._consumed_samples += count * self.arguments.micro_batch_size * self.arguments.data_parallel_size
        return result

    @torch.no_grad()
    def evaluate(self) -> tuple[float, ...]:
        """Run forward on one global batch in eval mode, and return its losses as in `StepResult.losses`.

        Call this at any time between training steps. Each call uses different text, which no training step uses.
        """
        self._check_open()
        for chunk in self._wrapped_chunks:
            chunk.eval()
        losses = self._run_schedule(self.arguments.num_microbatches, is_evaluation=True)
        self._evaluations += 1
        return tuple(float(loss) for loss in losses)

    @contextlib.contextmanager
    def observe(self, ledger: ActivationLedger) -> Iterator[None]:
        """Count the activations of the `with` block in `ledger`, except tensors that other saved-tensor hooks handle."""
        engine = contextlib.nullcontext() if self.integration is None else self.integration.engine.observe(ledger)
        with engine, ledger.watch():
            yield

    def close(self) -> None:
        """Free the model and undo all patches. A second call does nothing."""
        self._is_closed = True
        self.graphs.close()
        release_graphs(self.chunks)
        clear_rotary_caches(self.chunks)
        self.chunks = []
        self._wrapped_chunks = []
        self._optimizer = None
        self._cleanup.close()
        gc.collect()  # Megatron's modules have reference cycles, and the next trainer needs the memory

    def _check_open(self) -> None:
        if self._is_closed:
            raise StateError("this trainer is closed. Create a new one.")

    def _run_schedule(self, count: int, *, is_evaluation: bool) -> list[torch.Tensor]:
        """Run `count` microbatches through Megatron's schedule and return their mean losses."""
        arguments = self.arguments
        rank = int(load_module("megatron.core.parallel_state").get_data_parallel_rank())
        split, step = ("evaluation", self._evaluations) if is_evaluation else ("", self._step)

        def prepare(microbatch: int) -> dict[str, Any]:
            batch = self.text.get_microbatch(arguments, step=step, microbatch=microbatch, data_parallel_rank=rank, split=split)
            return self._forward_step.prepare(batch)

        # All chunks of a stage read the same microbatches.
        iterators = [map(prepare, range(count)) for _ in self._wrapped_chunks]
        with ignore_expected_warnings():
            reports = self.graphs.get_schedule()(
                forward_step_func=self._forward_step,
                data_iterator=iterators,
                model=self._wrapped_chunks,
                num_microbatches=count,
                seq_length=arguments.seq_length,
                micro_batch_size=arguments.micro_batch_size,
                forward_only=is_evaluation,
            )
        return [report[LOSS] for report in reports]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
