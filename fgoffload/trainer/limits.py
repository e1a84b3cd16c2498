"""Checks whether this version and the installed packages support a training run or a plan, before the model is built."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fgoffload.cuda_graphs import TRANSFORMER_ENGINE
from fgoffload.errors import PlanError
from fgoffload.integrations.megatron.adapter.model_config import read_facts
from fgoffload.integrations.megatron.graphs.graph_checks import list_dropless_faults
from fgoffload.integrations.megatron.patching.cpu_support import has_transformer_engine, needs_cpu_support
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.plan import MICROBATCHES, TOKENS, OffloadPlan, naming_plan_file
from fgoffload.trainer.training_arguments import TrainingArguments

_INSTALL = "needs Transformer Engine, which cannot be imported here. Install it: pip install 'fgoffload[te]', or"


def check_supported(arguments: TrainingArguments) -> None:
    """Raise ConfigError with the flag and a fix if this version or machine does not support `arguments`."""
    for check in (_list_unsupported, _list_missing_packages, _list_local_layer_faults, _list_graph_faults):
        for fault in check(arguments):
            raise arguments.source.refuse(fault)


def _list_unsupported(arguments: TrainingArguments) -> Iterator[str]:
    given = arguments.transformer
    impl = given.get("transformer_impl", "local")
    is_local = not arguments.uses_transformer_engine
    for flag, is_given, fix in (
        ("--fp16, which needs loss scaling,", given.get("fp16"), "use --bf16"),
        ("--fp8-param-gather, which needs an FP8 optimizer,", given.get("fp8_param"), "remove it"),
        (f"--transformer-impl {impl}", impl not in ("local", TRANSFORMER_ENGINE), f"use local or {TRANSFORMER_ENGINE}"),
        ("--enable-cuda-graph, a deprecated flag,", given.get("enable_cuda_graph"), "use --cuda-graph-impl local"),
        (
            "--external-cuda-graph, a deprecated flag,",
            given.get("external_cuda_graph"),
            f"use --cuda-graph-impl {TRANSFORMER_ENGINE}",
        ),
        ("--masked-softmax-fusion, which needs Apex,", given.get("masked_softmax_fusion") and is_local, "remove it"),
    ):
        if is_given:
            yield f"{flag} is not supported in this version: {fix}."
    # The checkpointed MLP returns its bias, a parameter, so autograd treats the checkpoint as the node that computed the bias.
    # In backward, the recompute then recurses until memory is full. Seen with megatron-core 0.16.1.
    recomputes_mlp = given.get("recompute_granularity") == "selective" and "mlp" in (given.get("recompute_modules") or ())
    if recomputes_mlp and given.get("add_bias_linear", True):
        yield (
            "--recompute-modules mlp hangs in backward if linear layers have biases (megatron-core 0.16.1). "
            "Add --disable-bias-linear or remove mlp."
        )


def _list_missing_packages(arguments: TrainingArguments) -> Iterator[str]:
    if arguments.uses_transformer_engine:
        flag = f"--transformer-impl {TRANSFORMER_ENGINE}"
        if not has_transformer_engine():
            yield f"{flag} {_INSTALL} use --transformer-impl local."
        if needs_cpu_support():
            yield f"{flag} needs a GPU, but this machine has none. Use --transformer-impl local."


def _list_graph_faults(arguments: TrainingArguments) -> Iterator[str]:
    """Yield an error for each setting that CUDA graphs do not support, if graphs are captured."""
    impl = arguments.cuda_graph_impl
    if not arguments.captures_graphs:
        return
    flag = f"--cuda-graph-impl {impl}"
    if needs_cpu_support():
        yield f"{flag} needs a GPU, but this machine has none. Remove it."
    if impl == TRANSFORMER_ENGINE and not has_transformer_engine():
        yield f"{flag} {_INSTALL} remove it."
    expandable = "expandable_segments:True"
    if expandable in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") and os.environ.get("NCCL_GRAPH_REGISTER") != "0":
        yield (
            f"{flag} and PYTORCH_CUDA_ALLOC_CONF={expandable} cause illegal memory accesses in NCCL. "
            "Set NCCL_GRAPH_REGISTER=0, or remove one of the two."
        )
    for other, is_given, reason in (
        ("--variable-seq-lengths", arguments.has_variable_lengths, "a graph has fixed shapes"),
        ("--packed-sequences", arguments.packed_sequences, "graphs do not support packed sequences"),
        ("--rampup-batch-size", arguments.rampup_batch_size, "graphs have a fixed number of microbatches"),
    ):
        if is_given:
            yield f"{flag} and {other} are mutually exclusive: {reason}. Remove one of them."
    yield from list_dropless_faults(impl, arguments.transformer)


def _list_local_layer_faults(arguments: TrainingArguments) -> Iterator[str]:
    """Yield an error for each setting that needs Transformer Engine's layers, if the model uses Megatron's local layers."""
    if arguments.uses_transformer_engine:
        return
    given, size = arguments.transformer, arguments.context_parallel_size
    # The user may have replaced the attention of local layers with one that supports more settings.
    attention = load_module("megatron.core.transformer.dot_product_attention").DotProductAttention
    is_megatrons = load_module("megatron.core.models.backends").LocalSpecProvider().core_attention() is attention
    for flag, is_given in (
        (f"--fp8-format {given.get('fp8')}", given.get("fp8")),
        ("--moe-grouped-gemm", given.get("moe_grouped_gemm")),
        (f"--context-parallel-size {size}", size > 1),
        ("--multi-latent-attention", given.get("multi_latent_attention") and is_megatrons),
        ("--packed-sequences", arguments.packed_sequences and is_megatrons),
    ):
        if is_given:
            fix = f"use --transformer-impl {TRANSFORMER_ENGINE} (on a GPU) or remove it"
            yield f"{flag} needs Transformer Engine's layers: {fix}."


def check_plan_file(path: Path, arguments: TrainingArguments, config: Any) -> None:
    """Check a plan file against a training run, as far as possible before a model is built.

    Raises:
        ConfigError: The plan offloads an unknown tag, or a tag without the tags that it requires.
        PlanError: The file cannot be read, was made for another training run, or contains a layer that the model lacks.
    """
    plan, name = OffloadPlan.load(path), f"--offload-plan {path}"
    step = {
        TOKENS: arguments.seq_length * arguments.micro_batch_size,
        MICROBATCHES: arguments.num_microbatches,  # the number after the batch-size ramp-up
    }
    with naming_plan_file(path):
        plan.check_made_for({**read_facts(config), **step})
    if arguments.offload is not None:
        arguments.offload.tags.check(plan.offloaded_tags, flag=name)
    layers = config.num_layers + (config.mtp_num_layers or 0)
    chunks = arguments.virtual_pipeline_size or 1
    for site in plan.actions:
        if site.layer not in range(layers) or site.chunk not in range(chunks):
            raise PlanError(
                f"{name} contains {site} in chunk {site.chunk}, but the model has {layers} layers and {chunks} chunk(s) per "
                "rank, counted from 0. Create a plan for this model."
            )
