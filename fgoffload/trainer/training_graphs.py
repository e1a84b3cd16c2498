"""Captures the CUDA graphs of a training run with Megatron-Core's own code, and releases them at the end.

Megatron keeps graphs, their inputs and their memory pool in global state, so a trainer must release them before the next
trainer can capture. Only this file uses Megatron's private names for graphs.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fgoffload.cuda_graphs import FULL_ITERATION, LOCAL, TRANSFORMER_ENGINE
from fgoffload.engine.torch_internals import clear_cublas_workspaces
from fgoffload.errors import IntegrationError
from fgoffload.integrations.collectives import gather
from fgoffload.integrations.megatron.patching.imports import ignore_expected_warnings, load_module
from fgoffload.trainer.training_arguments import TrainingArguments

_logger = logging.getLogger(__name__)

_LAYER_GRAPHS = "megatron.core.transformer.cuda_graphs"
_STEP_GRAPH = "megatron.core.full_cuda_graph"


class Graphs:
    """Runs all steps eagerly. Its subclasses capture graphs."""

    def __init__(self, arguments: TrainingArguments) -> None:
        self._arguments = arguments
        self._chunks: Sequence[Any] = ()
        self._config: Any = None

    @property
    def is_captured(self) -> bool:
        """Whether steps replay graphs."""
        return False

    @contextlib.contextmanager
    def wrapping(self) -> Iterator[None]:
        """Run the `with` block, which creates the data-parallel wrapper, on a stream that is allowed during capture."""
        if not self._arguments.captures_graphs:
            yield
            return
        # The wrapper creates the gradient accumulation nodes, and backward waits for the stream on which they were created. The
        # default stream is not allowed during capture. Megatron-LM does the same.
        stream = self._find_wrapping_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream().wait_stream(stream)

    def start(self, chunks: Sequence[Any], config: Any) -> None:
        """Store this rank's wrapped chunks and their config."""
        self._chunks, self._config = chunks, config

    def get_schedule(self) -> Callable[..., Any]:
        """Return Megatron's function that runs forward and backward of all microbatches."""
        schedule: Callable[..., Any] = load_module("megatron.core.pipeline_parallel").get_forward_backward_func()
        return schedule

    def prepare_step(self, step: int) -> None:
        """Capture graphs if `step`, counted from 0, is the first to replay them. Chunks must be in training mode.

        Raises:
            IntegrationError: This step should replay graphs, but none was captured.
        """
        if self._arguments.captures_graphs and step >= self._arguments.steps_until_replay and not self.is_captured:
            raise IntegrationError(
                f"--cuda-graph-impl {self._arguments.cuda_graph_impl}: Megatron-Core captured no CUDA graph in the first "
                f"{step} steps. Use other --cuda-graph-modules, or remove the flag."
            )

    def close(self) -> None:
        """Release the graphs and Megatron's state for them. Call this before the model is freed."""
        self._chunks, self._config = (), None
        if self._arguments.captures_graphs:
            # A cuBLAS workspace that was allocated from a graph's pool would keep the pool alive.
            clear_cublas_workspaces()

    def _find_wrapping_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]


class _LocalGraphs(Graphs):
    """Graphs of modules, which Megatron captures at the end of the first step's schedule."""

    @property
    def is_captured(self) -> bool:
        record = load_module(_LAYER_GRAPHS)._CudagraphGlobalRecord  # noqa: SLF001 - no public name
        return bool(record.cudagraph_created)

    def close(self) -> None:
        module = load_module(_LAYER_GRAPHS)
        module.delete_cuda_graphs()
        # Megatron no longer references the runners, but their outputs keep the autograd graph, the runners and the model alive.
        managers = [one for chunk in self._chunks for one in chunk.modules() if isinstance(one, module.CudaGraphManager)]
        for manager in managers:
            for runner in manager.cudagraph_runners:
                vars(runner).clear()
            manager.cudagraph_runners.clear()
        super().close()


class _LayerGraphs(Graphs):
    """Graphs of layers or modules, which Transformer Engine captures between two steps."""

    def __init__(self, arguments: TrainingArguments) -> None:
        super().__init__(arguments)
        self._helper: Any = None
        self._is_captured = False

    @property
    def is_captured(self) -> bool:
        return self._is_captured

    def start(self, chunks: Sequence[Any], config: Any) -> None:
        super().start(chunks, config)
        # The capture reads the number of microbatches per step from this global calculator.
        load_module("megatron.core.num_microbatches_calculator").init_num_microbatches_calculator(
            rank=1,  # only rank 0 logs
            rampup_batch_size=None,
            global_batch_size=self._arguments.global_batch_size,
            micro_batch_size=self._arguments.micro_batch_size,
            data_parallel_size=self._arguments.data_parallel_size,
        )

    def prepare_step(self, step: int) -> None:
        if step == self._arguments.cuda_graph_warmup_steps:
            self._capture()
        super().prepare_step(step)

    def close(self) -> None:
        if self._helper is not None and self._helper.graphs_created():
            self._helper.delete_cuda_graphs()
        self._helper, self._is_captured = None, False
        load_module("megatron.core.num_microbatches_calculator").destroy_num_microbatches_calculator()
        super().close()

    def _capture(self) -> None:
        with ignore_expected_warnings():
            self._helper = load_module(_LAYER_GRAPHS).TECudaGraphHelper(
                model=list(self._chunks),
                config=self._config,
                seq_length=self._arguments.seq_length,
                micro_batch_size=self._arguments.micro_batch_size,
                optimizers=[],  # only needed to zero gradients, which our optimizer does after each step
            )
            # Megatron-LM also creates hooks, but only to gather sharded parameters.
            self._helper.create_cudagraphs()
        # Some stages may have no layer to capture.
        self._is_captured = any(gather(bool(self._helper.graphs_created())))
        _logger.info("Captured the CUDA graphs of the layers.")


class _StepGraph(Graphs):
    """One graph of the forward and backward of all microbatches. Megatron's wrapper of the schedule captures it."""

    def __init__(self, arguments: TrainingArguments) -> None:
        super().__init__(arguments)
        self._schedule: Any = None

    @property
    def is_captured(self) -> bool:
        return self._schedule is not None and self._schedule.cuda_graph["training"] is not None

    def get_schedule(self) -> Callable[..., Any]:
        if self._schedule is None:
            module = load_module(_STEP_GRAPH)
            options = {"cuda_graph_warmup_steps": self._arguments.cuda_graph_warmup_steps}
            if hasattr(module, "get_graph_pool"):  # since 0.18
                options["use_single_mempool"] = self._config.cuda_graph_use_single_mempool
            self._schedule = module.FullCudaGraphWrapper(super().get_schedule(), **options)
        return self._schedule  # type: ignore[no-any-return]

    def close(self) -> None:
        module = load_module(_STEP_GRAPH)
        for kept, empty in (
            (module.FullCudaGraphWrapper.cuda_graph, lambda: None),
            (module.FullCudaGraphWrapper.result, lambda: None),
            (module.FullCudaGraphWrapper.curr_iteration, lambda: 0),
            (module.StaticBufferLoader.static_buffers, list),
        ):
            kept.update({stage: empty() for stage in kept})
        # A pool cannot be reused after its graphs are destroyed.
        if hasattr(module, "_shared_graph_pool"):
            module._shared_graph_pool = None  # noqa: SLF001 - no public function resets it
        self._schedule = None
        super().close()

    def _find_wrapping_stream(self) -> torch.cuda.Stream:
        module = load_module(_STEP_GRAPH)
        if hasattr(module, "get_shared_capture_stream"):  # since 0.18
            stream: torch.cuda.Stream = module.get_shared_capture_stream()
            return stream
        return super()._find_wrapping_stream()


_KINDS: dict[str, type[Graphs]] = {LOCAL: _LocalGraphs, TRANSFORMER_ENGINE: _LayerGraphs, FULL_ITERATION: _StepGraph}


def choose_graphs(arguments: TrainingArguments) -> Graphs:
    """Return the object that captures the graphs that `arguments` select, or that runs all steps eagerly."""
    return _KINDS.get(arguments.cuda_graph_impl, Graphs)(arguments)
