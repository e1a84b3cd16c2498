"""Refuses trainings that this version or the installed packages do not support, before anything is built."""

import os
from collections.abc import Iterator

from fgoffload.integrations.megatron.flags.graph_modes import TRANSFORMER_ENGINE
from fgoffload.integrations.megatron.graphs.graph_checks import list_dropless_faults
from fgoffload.integrations.megatron.patching.cpu_support import has_transformer_engine, needs_cpu_support
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.trainer.training_arguments import TrainingArguments

_TE_LAYERS = "give --transformer-impl transformer_engine"


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
    implementations = ("local", "transformer_engine")
    for flag, is_given, instead in (
        ("--fp16, which needs loss scaling,", given.get("fp16", False), "give --bf16"),
        ("--fp8-param-gather, which needs an FP8 optimizer,", given.get("fp8_param", False), "leave it out"),
        (
            f"--transformer-impl {given.get('transformer_impl')}",
            given.get("transformer_impl", "local") not in implementations,
            f"give one of {', '.join(implementations)}",
        ),
        ("--enable-cuda-graph, a deprecated flag,", given.get("enable_cuda_graph"), "give --cuda-graph-impl local"),
        (
            "--external-cuda-graph, a deprecated flag,",
            given.get("external_cuda_graph"),
            f"give --cuda-graph-impl {TRANSFORMER_ENGINE}",
        ),
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
    if arguments.transformer.get("masked_softmax_fusion", False) and not arguments.uses_transformer_engine:
        yield "--masked-softmax-fusion, which needs Apex, is not supported in this version: leave it out."


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
    given = arguments.transformer
    if given.get("fp8"):
        yield f"--fp8-format {given['fp8']} needs Transformer Engine's layers: {_TE_LAYERS} or leave it out."
    if given.get("moe_grouped_gemm"):
        yield f"--moe-grouped-gemm needs Transformer Engine's layers: {_TE_LAYERS} or leave it out."
    if arguments.context_parallel_size > 1:
        size = arguments.context_parallel_size
        yield f"--context-parallel-size {size} needs Transformer Engine's attention: {_TE_LAYERS} (on GPUs) or give 1."
    # Users who replace the local layers' attention know what it supports.
    if not _has_megatrons_own_attention():
        return
    for flag, is_given in (
        ("--multi-latent-attention", given.get("multi_latent_attention")),
        ("--packed-sequences", arguments.packed_sequences),
    ):
        if is_given:
            yield f"{flag} needs Transformer Engine's attention: {_TE_LAYERS} (on a GPU) or leave it out."


def _has_megatrons_own_attention() -> bool:
    attention = load_module("megatron.core.transformer.dot_product_attention").DotProductAttention
    return bool(load_module("megatron.core.models.backends").LocalSpecProvider().core_attention() is attention)
