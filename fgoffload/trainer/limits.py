"""Refuses trainings and plans that this version or the installed packages do not support, before anything is built."""

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

_IMPLEMENTATIONS = ("local", "transformer_engine")
_LAYER_GRAPHS = f"--cuda-graph-impl {TRANSFORMER_ENGINE}"


def refuse_what_is_not_built(arguments: TrainingArguments) -> None:
    """Check that this version can run the training `arguments` on this machine.

    Raises:
        ConfigError: The training is not supported. The error names the flag and the fix.
    """
    for check in (_find_what_is_not_built, _find_missing_packages, _find_what_local_layers_lack, _find_what_graphs_exclude):
        for fault in check(arguments):
            raise arguments.source.refuse(fault)


def _find_what_is_not_built(arguments: TrainingArguments) -> Iterator[str]:
    given = arguments.transformer
    impl = given.get("transformer_impl", "local")
    is_local = not arguments.uses_transformer_engine
    for flag, is_given, instead in (
        ("--fp16, which needs loss scaling,", given.get("fp16"), "give --bf16"),
        ("--fp8-param-gather, which needs an FP8 optimizer,", given.get("fp8_param"), "leave it out"),
        (f"--transformer-impl {impl}", impl not in _IMPLEMENTATIONS, f"give one of {', '.join(_IMPLEMENTATIONS)}"),
        ("--enable-cuda-graph, a deprecated flag,", given.get("enable_cuda_graph"), "give --cuda-graph-impl local"),
        ("--external-cuda-graph, a deprecated flag,", given.get("external_cuda_graph"), f"give {_LAYER_GRAPHS}"),
        ("--masked-softmax-fusion, which needs Apex,", given.get("masked_softmax_fusion") and is_local, "leave it out"),
    ):
        if is_given:
            yield f"{flag} is not supported in this version: {instead}."
    # The checkpointed MLP returns its bias, a parameter. Autograd then treats the checkpoint as the node that computed the
    # bias, and the recompute in backward recurses until memory is full. Seen with megatron-core 0.16.1.
    recomputes_mlp = given.get("recompute_granularity") == "selective" and "mlp" in (given.get("recompute_modules") or ())
    if recomputes_mlp and given.get("add_bias_linear", True):
        yield (
            "--recompute-modules mlp hangs in backward if linear layers have biases "
            "(megatron-core 0.16.1). Add --disable-bias-linear or leave mlp out."
        )


def _find_missing_packages(arguments: TrainingArguments) -> Iterator[str]:
    """Yield settings that need a missing package or device."""
    if arguments.uses_transformer_engine and not has_transformer_engine():
        yield (
            "--transformer-impl transformer_engine needs Transformer Engine, which cannot be imported here. Install it: "
            "pip install 'fgoffload[te]', or give --transformer-impl local."
        )
    if arguments.uses_transformer_engine and needs_cpu_support():
        yield "--transformer-impl transformer_engine needs a GPU, and there is none. Give --transformer-impl local."


def _find_what_graphs_exclude(arguments: TrainingArguments) -> Iterator[str]:
    """Yield settings that CUDA graphs cannot capture, if the training captures graphs."""
    impl, given = arguments.cuda_graph_impl, arguments.transformer
    if not arguments.captures_graphs:
        return
    flag = f"--cuda-graph-impl {impl}"
    if needs_cpu_support():
        yield f"{flag} needs a GPU, and there is none. Leave it out."
    if impl == TRANSFORMER_ENGINE and not has_transformer_engine():
        yield (
            f"{flag} needs Transformer Engine, which cannot be imported here. Install it: pip install 'fgoffload[te]', or "
            "leave it out."
        )
    expandable = "expandable_segments:True"
    if expandable in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") and os.environ.get("NCCL_GRAPH_REGISTER") != "0":
        yield (
            f"{flag} and PYTORCH_CUDA_ALLOC_CONF={expandable} cause illegal memory accesses in NCCL. "
            "Set NCCL_GRAPH_REGISTER=0, or leave one of them out."
        )
    for other, is_given, reason in (
        ("--variable-seq-lengths", arguments.has_variable_lengths, "a graph has fixed shapes"),
        ("--packed-sequences", arguments.packed_sequences, "a graph cannot hold packed sequences"),
        ("--rampup-batch-size", arguments.rampup_batch_size, "graphs have a fixed number of microbatches"),
    ):
        if is_given:
            yield f"{flag} and {other} exclude each other: {reason}. Leave one of them out."
    yield from list_dropless_faults(impl, given)


def _find_what_local_layers_lack(arguments: TrainingArguments) -> Iterator[str]:
    """Yield settings that Transformer Engine's layers support and Megatron's local ones do not."""
    if arguments.uses_transformer_engine:
        return
    given, size = arguments.transformer, arguments.context_parallel_size
    # Users who replace the local layers' attention know what it supports.
    has_own_attention = _has_megatrons_own_attention()
    for flag, is_given in (
        (f"--fp8-format {given.get('fp8')}", given.get("fp8")),
        ("--moe-grouped-gemm", given.get("moe_grouped_gemm")),
        (f"--context-parallel-size {size}", size > 1),
        ("--multi-latent-attention", given.get("multi_latent_attention") and has_own_attention),
        ("--packed-sequences", arguments.packed_sequences and has_own_attention),
    ):
        if is_given:
            instead = "give --transformer-impl transformer_engine (on a GPU) or leave it out"
            yield f"{flag} needs Transformer Engine's layers: {instead}."


def _has_megatrons_own_attention() -> bool:
    attention = load_module("megatron.core.transformer.dot_product_attention").DotProductAttention
    return bool(load_module("megatron.core.models.backends").LocalSpecProvider().core_attention() is attention)


def check_plan_file(path: Path, arguments: TrainingArguments, config: Any) -> None:
    """Check a plan file against a training run, as far as possible before a model is built.

    Raises:
        ConfigError: The plan offloads an unknown tag, or a tag without the tags that it requires.
        PlanError: The file cannot be read, was made for another training, or names a layer that does not exist.
    """
    plan, name = OffloadPlan.load(path), f"--offload-plan {path}"
    step = {
        TOKENS: arguments.seq_length * arguments.micro_batch_size,
        MICROBATCHES: arguments.num_microbatches,  # once the batch has ramped up
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
                f"{name} names {site} in chunk {site.chunk}, and the model has {layers} layers and {chunks} "
                "chunk(s) a rank, counted from 0. Plan for this model."
            )
