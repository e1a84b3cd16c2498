"""The models in `arguments/`, shrunk to train a step in a second, and their layers as in the planner.

A shrunk model keeps the flags of its file, except for ranks and sizes: it has one layer of each kind, and as few experts and
heads as preserve the ratios between sizes. Predictions use the same flags, read like those of a plan.
"""

import contextlib
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

from fgoffload.integrations.megatron.flags.argument_files import read_argument_file
from fgoffload.integrations.megatron.flags.model_shapes import read_model, read_model_file
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.planner.model.layer_shape import LayerShape
from fgoffload.planner.model.model_shape import ModelShape
from fgoffload.planner.model.parallelism import Parallelism
from fgoffload.planner.model.rank_layer import make_layer_shape

FILES = {path.stem: path for path in sorted((Path(__file__).parents[2] / "arguments").glob("[!g]*.sh"))}
FILES |= {
    path.stem: path for path in FILES["llama3_8b"].parent.glob("gpt_oss*.sh")
}  # not GPT, since `fused_kernels` has no LayerNorm

MICRO_BATCH_SIZE = 2
GROUPS, KV_CHANNELS, EXPERT_CHANNELS = 2, 64, 208
SMALL_SIZES = {
    # All sizes differ: neither all heads together nor an expert are as wide as the hidden states. The tokens of a rank are a
    # multiple of its experts, for balanced routing.
    "--hidden-size": 320,
    "--ffn-hidden-size": 576,
    "--vocab-size": 256,
    "--seq-length": 192,
    "--micro-batch-size": MICRO_BATCH_SIZE,
}
LATENT = {"--kv-lora-rank": 128, "--qk-head-dim": 64, "--qk-pos-emb-head-dim": 32, "--v-head-dim": 64}
COMMON_FLAGS = {
    # Settings of the formulas, which a file may leave to the machine. The smallest models train on a CPU.
    "--bf16": (),
    "--transformer-impl": ("transformer_engine",),
    "--no-gradient-accumulation-fusion": (),
}
MOE_FLAGS = {"--moe-grouped-gemm": (), "--moe-token-dispatcher-type": ("alltoall",), "--moe-router-force-load-balancing": ()}
RANK_FLAGS = (
    *("--tensor-model-parallel-size", "--sequence-parallel", "--pipeline-model-parallel-size"),
    *("--pipeline-model-parallel-layout", "--num-virtual-stages-per-pipeline-rank"),
    *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split", "--context-parallel-size"),
    *("--expert-model-parallel-size", "--expert-tensor-parallel-size"),
)
OFFLOAD_FLAGS = (
    *("--fine-grained-activation-offloading", "--offload-modules", "--min-offloaded-tensor-size", "--offload-window"),
    *("--offload-prefetch",),
)
GRAPH_FLAGS = (
    # Graphs need a GPU. Experts padded to a capacity, which full iteration graphs need, do not match the formulas.
    *("--cuda-graph-impl", "--cuda-graph-modules", "--cuda-graph-warmup-steps", "--te-rng-tracker"),
    *("--delay-offload-until-cuda-graph", "--fine-grained-offloading-max-inflight-offloads"),
    *("--moe-expert-capacity-factor", "--moe-pad-expert-input-to-capacity", "--moe-token-drop-policy"),
)
RECOMPUTE_FLAGS = ("--recompute-granularity", "--recompute-modules")


class Layout(NamedTuple):
    """The numbers of tensor parallel and expert parallel ranks."""

    tensor: int = 1
    expert: int = 1

    @property
    def ranks(self) -> int:
        """The ranks of the smallest training run, in which expert ranks are tensor parallel ranks first."""
        return max(self)


ONE_RANK = Layout()


class ShrunkModel(NamedTuple):
    """A shrunk model of `arguments/`."""

    flags: str
    """The flags of Megatron-LM."""
    layers: list[LayerShape]
    """All layers of a rank, with MTP layers last."""


def find_layout(name: str, *, ranks: int) -> Layout:
    """Return the layout of a file, with parallel sizes of at most `ranks`."""
    _, parallelism = read_model_file(FILES[name], typed=_find_dispatcher(name))
    return Layout(min(parallelism.tensor_parallel_size, ranks), min(parallelism.expert_parallel_size, ranks))


def shrink(
    name: str, layout: Layout = ONE_RANK, *, changes: Mapping[str, tuple[str, ...]] = types.MappingProxyType({})
) -> ShrunkModel:
    """Return the shrunk model of a file.

    Args:
        name: The file name without its extension.
        layout: The layout of the ranks that train it.
        changes: Further flags and their values.
    """
    model, _ = read_model_file(FILES[name], typed=_find_dispatcher(name))
    dropped = (*RANK_FLAGS, *OFFLOAD_FLAGS, *GRAPH_FLAGS, *RECOMPUTE_FLAGS)
    flags = {flag: words for flag, words in _read_flags(FILES[name]).items() if flag not in dropped}
    flags |= COMMON_FLAGS | _shrink_layers(model) | _shrink_sizes(model, flags) | _list_rank_flags(model, layout) | changes
    words = [word for flag, values in flags.items() for word in (flag, *values)]
    shape, parallelism = read_model(words, source=name, num_gpus=layout.ranks)
    return ShrunkModel(" ".join(words), list_layers(shape, parallelism))


def list_layers(model: ModelShape, parallelism: Parallelism) -> list[LayerShape]:
    """Return all layers of `model`."""
    return [make_layer_shape(model, parallelism, number) for number in model.numbers]


@contextlib.contextmanager
def balanced_routing() -> Iterator[None]:
    """Balance routers with `--moe-router-force-load-balancing` exactly inside the context.

    Megatron's router draws random scores instead, which are balanced only approximately.
    """
    with mock.patch.object(load_module("megatron.core.transformer.moe.router"), "apply_random_logits", _BalancedScores.apply):
        yield


class _BalancedScores(torch.autograd.Function):
    """Scores by which token i prefers the experts i, i + 1, and so on, modulo the number of experts."""

    @staticmethod
    def forward(_: object, logits: torch.Tensor) -> torch.Tensor:
        experts = logits.size(-1)
        tokens = torch.arange(logits.numel() // experts, device=logits.device).unsqueeze(1)
        distance = (torch.arange(experts, device=logits.device) - tokens) % experts
        return (-distance / experts).to(logits.dtype).view_as(logits)

    @staticmethod
    def backward(_: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _find_dispatcher(name: str) -> tuple[str, ...]:
    """Return dispatcher flags for an MoE file without them, since Megatron's default is not supported."""
    flags = _read_flags(FILES[name])
    has_none = "--num-experts" in flags and "--moe-token-dispatcher-type" not in flags
    return ("--moe-token-dispatcher-type", "alltoall") if has_none else ()


def _read_flags(path: Path) -> dict[str, tuple[str, ...]]:
    """Return the values of each flag of a file."""
    flags: dict[str, tuple[str, ...]] = {}
    for word in read_argument_file(path):
        if word.startswith("--"):
            flag = word
            flags[flag] = ()
        else:
            flags[flag] += (word,)
    return flags


def _shrink_layers(model: ModelShape) -> dict[str, tuple[str, ...]]:
    """Return the flags of a model with one decoder layer of each kind, in order, and at most one MTP layer."""
    kinds = dict.fromkeys((model.has_experts(number), model.has_window(number)) for number in range(model.num_layers))
    flags: dict[str, tuple[str, ...]] = {"--num-layers": (str(len(kinds)),)}
    if model.experts is not None:
        flags["--moe-layer-freq"] = (_format_pattern(has_experts for has_experts, _ in kinds),)
    if model.window_tokens is not None:
        flags |= {
            "--window-size": ("23,0",),
            "--window-attn-skip-freq": (_format_pattern(has_window for _, has_window in kinds),),
        }
    if model.mtp_num_layers:
        flags["--mtp-num-layers"] = ("1",)
    return flags


def _format_pattern(layers: Iterator[bool]) -> str:
    return "[" + ",".join(str(int(layer)) for layer in layers) + "]"


def _shrink_sizes(model: ModelShape, file_flags: Mapping[str, object]) -> dict[str, tuple[str, ...]]:
    """Return the flags of smaller sizes, without flags for absent parts of the model."""
    sizes: dict[str, int] = dict(SMALL_SIZES)
    if model.latent is not None:
        sizes |= {"--num-attention-heads": 2 * GROUPS} | LATENT
        if model.latent.q_lora_rank is not None:
            sizes["--q-lora-rank"] = 96
    else:
        # The same number of query heads per group, or two without groups, so that each rank has more than one.
        queries = model.num_attention_heads // model.num_query_groups
        sizes |= {"--num-attention-heads": GROUPS * (queries if queries > 1 else 2), "--kv-channels": KV_CHANNELS}
        if "--num-query-groups" in file_flags:
            sizes["--num-query-groups"] = GROUPS
    if model.experts is not None:
        experts = model.experts
        sizes |= {
            "--num-experts": min(experts.num_experts, max(8, 2 * experts.topk)),
            "--moe-router-topk": experts.topk,
            "--moe-ffn-hidden-size": EXPERT_CHANNELS,
        }
        if experts.shared_ffn_hidden_size:
            shared = experts.shared_ffn_hidden_size // experts.ffn_hidden_size
            sizes["--moe-shared-expert-intermediate-size"] = shared * EXPERT_CHANNELS
    return {flag: (str(size),) for flag, size in sizes.items()}


def _list_rank_flags(model: ModelShape, layout: Layout) -> dict[str, tuple[str, ...]]:
    """Return the flags of the ranks and of a step with one microbatch on each data parallel rank."""
    copies = layout.ranks // layout.tensor
    flags: dict[str, tuple[str, ...]] = {"--global-batch-size": (str(MICRO_BATCH_SIZE * copies),)}
    if layout.tensor > 1:
        flags |= {"--tensor-model-parallel-size": (str(layout.tensor),), "--sequence-parallel": ()}
    if model.experts is not None:
        flags |= MOE_FLAGS | {"--expert-model-parallel-size": (str(layout.expert),), "--expert-tensor-parallel-size": ("1",)}
    return flags
