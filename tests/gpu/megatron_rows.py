"""The runs of the support matrix on GPUs, which `run_megatron_matrix.py` executes."""

import dataclasses

SHAPE = (
    "--num-layers 3 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --micro-batch-size 2 --global-batch-size 6 "
    "--swiglu --disable-bias-linear --lr 1e-3 --position-embedding-type rope --normalization RMSNorm --bf16 "
    "--transformer-impl transformer_engine --no-gradient-accumulation-fusion --ffn-hidden-size 512"
)
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-grouped-gemm --moe-aux-loss-coeff 1e-2"
ALLTOALL = "--moe-token-dispatcher-type alltoall"
SHARED = "--moe-shared-expert-intermediate-size 256"
MLA = "--multi-latent-attention --q-lora-rank 64 --kv-lora-rank 64 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64"
DENSE, MOE = SHAPE, f"{SHAPE} {EXPERTS} {ALLTOALL}"
MIXED = f"{MOE} {SHARED} --moe-layer-freq [0]*1+[1]*2"
LATENT = f"{MIXED} {MLA}"
FOUR_LAYERS = "--num-layers 4 --moe-layer-freq [0]*1+[1]*3"
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
FULL = "--recompute-granularity full --recompute-num-layers 1 --recompute-method"
TWO = "--global-batch-size 8"
PIPELINE = "--pipeline-model-parallel-size 2"
VIRTUAL = f"{PIPELINE} --num-layers-per-virtual-pipeline-stage 1"
UNEVEN = f"{PIPELINE} --decoder-first-pipeline-num-layers 2"
BLOCKWISE, DELAYED = "--fp8-format e4m3 --fp8-recipe blockwise", "--fp8-format hybrid --fp8-recipe delayed"
TENSORWISE = "--fp8-format hybrid --fp8-recipe tensorwise"
OVERLAP = "--expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm --moe-permute-fusion"

ATTENTION_TAGS = "qkv_linear core_attn attn_proj"
MLP_TAGS = "mlp_fc1 mlp_act mlp_fc2"
EXPERT_TAGS = "mlp_norm router expert_fc1 moe_act expert_fc2 moe_combine"
DENSE_TAGS = f"{ATTENTION_TAGS} {MLP_TAGS}"
MOE_TAGS = f"{ATTENTION_TAGS} {EXPERT_TAGS}"
MIXED_TAGS = f"{MOE_TAGS} {MLP_TAGS} shared_expert"
LATENT_TAGS = f"attn_norm {MIXED_TAGS}"


Plan = tuple[tuple[int, str, str], ...]
"""Layer, tag, action."""
_ACTIONS = {"K": "keep", "R": "recompute", "O": "offload", "B": "recompute+offload"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One training run."""

    name: str
    flags: str
    tags: str
    gpus: int = 1
    plan: Plan = ()
    options: tuple[tuple[str, float], ...] = ()
    """Fields of `OffloadConfig` and their values."""
    layers_by_chunk: int | None = None
    """Layers in the first chunks of all ranks together, in an interleaved pipeline; otherwise None."""
    evaluates_after: tuple[int, ...] = ()
    """Steps after which to evaluate; 0 is before the first step."""
    attention: str = "FusedAttention"
    """The attention kernel of Transformer Engine that must run."""
    unsupported: tuple[tuple[str, str], ...] = ()
    """Version prefix and reason for each generation of Megatron-Core that does not support the row."""

    def find_unsupported_reason(self, version: str) -> str | None:
        """Return why this version of Megatron-Core does not support the row, or None if it does."""
        return next((reason for start, reason in self.unsupported if version.startswith(start)), None)

    def find_chunk(self, layer: int) -> int:
        """Return the index of a layer's chunk on its rank."""
        return 0 if self.layers_by_chunk is None else layer // self.layers_by_chunk


def make_plan(*layers: str) -> Plan:
    """Return a plan for these layers, from layer 0 on, with lines of `tag=action` such as `core_attn=R mlp_norm=B`."""
    cells = [(number, *cell.split("=")) for number, layer in enumerate(layers) for cell in layer.split()]
    return tuple((number, tag, _ACTIONS[action]) for number, tag, action in cells)


PLAN_MIX = make_plan(
    "qkv_linear=O core_attn=O attn_proj=O mlp_fc1=O mlp_act=O mlp_fc2=O",
    "attn_norm=K core_attn=R mlp_norm=B moe_act=B expert_fc1=O",
    "layer=R layer_input=O",
)
PLAN_UNITS = make_plan("mlp=R core_attn=O", "moe=R qkv_linear=O", "shared_expert=R mlp_norm=R expert_fc1=O")
PLAN_PERMUTATION = make_plan("mlp_fc1=R", "dispatch=R mlp_norm=B moe_act=B", "dispatch=R router=O moe_act=O expert_fc2=O")
PLAN_FIRST_LINEARS = make_plan(
    "qkv_linear=R mlp_fc1=B",
    "qkv_linear=B core_attn=O attn_proj=O mlp_norm=R expert_fc1=B",
    "qkv_linear=R mlp_norm=B expert_fc1=R shared_expert=O",
)
PLAN_DELAYED = make_plan(
    "qkv_linear=O core_attn=O attn_proj=O mlp_fc1=O mlp_act=O mlp_fc2=O",
    "attn_norm=K core_attn=R expert_fc1=O",
    "layer=R layer_input=O",
)
"""Like PLAN_MIX, without linears that save their original input, which delayed scaling does not support."""
PLAN_LATENT = make_plan(
    "attn_norm=O mla_up_proj=R mlp_act=O",
    "attn_norm=O qkv_linear=O mla_up_proj=R core_attn=O attn_proj=O expert_fc1=O",
    "attn_norm=B mla_up_proj=R core_attn=R mlp_norm=O",
)
PLAN_OFFLOADS = make_plan(
    "qkv_linear=O core_attn=O attn_proj=O mlp_fc1=O mlp_act=O mlp_fc2=O",
    "qkv_linear=K core_attn=O attn_proj=K mlp_norm=O shared_expert=O router=K expert_fc1=O moe_act=K expert_fc2=O",
    "qkv_linear=O core_attn=K mlp_norm=K shared_expert=K router=O expert_fc1=K moe_act=O",
)
"""No recompute, which combined 1F1B does not support."""
# For four layers: an interleaved pipeline of two stages has layers 0 and 1 in its first chunks.
PLAN_MIX_FOUR = make_plan(
    "qkv_linear=O core_attn=O attn_proj=O mlp_fc1=O mlp_act=O mlp_fc2=O",
    "attn_norm=K core_attn=R mlp_norm=B moe_act=B expert_fc1=O",
    "layer=R layer_input=O",
    "moe=R core_attn=O mlp_norm=O",
)
PLAN_FIRST_LINEARS_FOUR = make_plan(
    "qkv_linear=R mlp_fc1=B",
    "qkv_linear=B core_attn=O attn_proj=O mlp_norm=R expert_fc1=B",
    "qkv_linear=R mlp_norm=B expert_fc1=R shared_expert=O",
    "qkv_linear=B core_attn=O expert_fc1=B",
)

ROWS = (
    *(Row(f"tag {tag}", MOE, tag) for tag in MOE_TAGS.split() if tag not in ("attn_proj",)),
    Row("tag attn_proj", MOE, "core_attn attn_proj"),
    *(Row(f"tag {tag}", DENSE, tag) for tag in MLP_TAGS.split()),
    Row("tag shared_expert", MIXED, "shared_expert"),
    Row("tag attn_norm", f"{MOE} {MLA}", "attn_norm"),
    Row("tag layer_input", f"{MIXED} {FULL} uniform", "layer_input"),
    Row("dense", DENSE, DENSE_TAGS),
    Row("MoE, all-to-all", MOE, MOE_TAGS),
    Row("MoE, all-gather", MOE.replace("alltoall", "allgather"), MOE_TAGS),
    Row(
        "MoE, op fuser",
        f"{MOE} --use-transformer-engine-op-fuser",
        f"{ATTENTION_TAGS} mlp_norm router fused_group_mlp moe_combine",
        unsupported=tuple((version, "its experts have no op fuser") for version in ("0.16", "0.17", "0.18")),
    ),
    Row("half of the sites", MOE, MOE_TAGS, options=(("activation_offload_fraction", 0.5),)),
    Row("MoE, fused permutation", f"{MOE} --moe-permute-fusion", MOE_TAGS.replace(" moe_combine", "")),
    Row("mixed dense and MoE, shared experts", MIXED, MIXED_TAGS),
    Row("no activation fusion", f"{MIXED} --no-bias-swiglu-fusion", MIXED_TAGS),
    Row("shared experts overlapped", f"{MIXED} --moe-shared-expert-overlap", MIXED_TAGS),
    Row("grouped-query attention", f"{MOE} --group-query-attention --num-query-groups 2", MOE_TAGS),
    Row("MTP", f"{MIXED} --mtp-num-layers 1", MIXED_TAGS),
    Row("MLA", f"{MOE} {MLA}", f"attn_norm {MOE_TAGS}"),
    Row("packed sequences (THD)", f"{MOE} --packed-sequences --micro-batch-size 1", MOE_TAGS),
    Row(
        "packed sequences (THD), rotary embeddings not fused",
        f"{MOE} --packed-sequences --micro-batch-size 1 --no-rope-fusion",
        MOE_TAGS,
    ),
    Row("variable sequence length", f"{MOE} --variable-seq-lengths", MOE_TAGS),
    Row("dropout off", f"{MIXED} {NO_DROPOUT}", MIXED_TAGS),
    Row("fp32", MIXED.replace("--bf16 ", ""), MIXED_TAGS, attention="UnfusedDotProductAttention"),  # the only kernel for fp32
    *(
        Row(f"FP8, {recipe}", f"{MIXED} --fp8-format {fmt} --fp8-recipe {recipe}", MIXED_TAGS)
        for recipe, fmt in (("delayed", "hybrid"), ("tensorwise", "hybrid"), ("blockwise", "e4m3"))
    ),
    Row("recompute layernorm", f"{MIXED} {SELECTIVE} layernorm", MIXED_TAGS),
    Row("recompute core_attn", f"{MIXED} {SELECTIVE} core_attn", f"qkv_linear {MLP_TAGS} {EXPERT_TAGS} shared_expert"),
    Row("recompute moe_act", f"{MIXED} {SELECTIVE} moe_act", MIXED_TAGS.replace(" expert_fc2", "")),
    Row(
        "recompute moe_act, no activation fusion",
        f"{MIXED} {SELECTIVE} moe_act --no-bias-swiglu-fusion",
        MIXED_TAGS.replace(" expert_fc2", ""),
    ),
    Row(
        "recompute layernorm moe_act", f"{MIXED} {SELECTIVE} layernorm moe_act", f"{ATTENTION_TAGS} mlp_norm expert_fc1 moe_act"
    ),
    Row("recompute mlp", f"{MIXED} {SELECTIVE} mlp", f"{MOE_TAGS} shared_expert"),
    Row("recompute moe", f"{MIXED} {SELECTIVE} moe", f"{DENSE_TAGS} mlp_norm"),
    Row("recompute shared_experts", f"{MIXED} {SELECTIVE} shared_experts", f"{MOE_TAGS} {MLP_TAGS}"),
    Row("recompute core_attn, MLA", f"{LATENT} {SELECTIVE} core_attn", LATENT_TAGS.replace(" core_attn attn_proj", "")),
    Row("recompute layernorm, MLA", f"{LATENT} {SELECTIVE} layernorm", LATENT_TAGS),
    Row("recompute mla_up_proj, MLA", f"{LATENT} {SELECTIVE} mla_up_proj", LATENT_TAGS),
    Row("recompute mlp, MLA", f"{LATENT} {SELECTIVE} mlp", f"attn_norm {MOE_TAGS} shared_expert"),
    Row("recompute moe, MLA", f"{LATENT} {SELECTIVE} moe", f"attn_norm {DENSE_TAGS} mlp_norm"),
    Row("recompute moe_act, MLA", f"{LATENT} {SELECTIVE} moe_act", LATENT_TAGS.replace(" expert_fc2", "")),
    Row("recompute shared_experts, MLA", f"{LATENT} {SELECTIVE} shared_experts", f"attn_norm {MOE_TAGS} {MLP_TAGS}"),
    Row("full recompute, block", f"{MIXED} {FULL} block", f"layer_input {MOE_TAGS} shared_expert"),
    # Two dense layers; only the first is recomputed.
    Row(
        "full recompute, block, MLA",
        f"{LATENT} --num-layers 4 --moe-layer-freq [0]*2+[1]*2 {FULL} block",
        f"layer_input {LATENT_TAGS}",
    ),
    Row("full recompute, uniform, MLA", f"{LATENT} {FULL} uniform", "layer_input"),
    Row("plan: keep, recompute, offload", MIXED, "", plan=PLAN_MIX),
    Row("plan: other units", MIXED, "", plan=PLAN_UNITS),
    Row("plan: first linears", MIXED, "", plan=PLAN_FIRST_LINEARS),
    Row(
        "plan: first linears, no activation fusion, fused permutation",
        f"{MIXED} --no-bias-swiglu-fusion --moe-permute-fusion",
        "",
        plan=PLAN_FIRST_LINEARS,
    ),
    Row(
        "plan: first linears, groups of queries, head norms",
        f"{MIXED} --group-query-attention --num-query-groups 2 --qk-layernorm",
        "",
        plan=PLAN_FIRST_LINEARS,
    ),
    Row(
        "plan: first linears, packed sequences (THD)",
        f"{MIXED} --packed-sequences --micro-batch-size 1",
        "",
        plan=PLAN_FIRST_LINEARS,
    ),
    Row("plan: permutation", MIXED, "", plan=PLAN_PERMUTATION),
    Row(
        "plan: permutation, no activation fusion, fused permutation",
        f"{MIXED} --no-bias-swiglu-fusion --moe-permute-fusion",
        "",
        plan=PLAN_PERMUTATION,
    ),
    Row("plan, FP8 blockwise", f"{MIXED} {BLOCKWISE}", "", plan=PLAN_MIX),
    Row("plan, FP8 delayed", f"{MIXED} {DELAYED}", "", plan=PLAN_DELAYED),
    Row("plan, FP8 tensorwise", f"{MIXED} {TENSORWISE}", "", plan=PLAN_MIX),
    Row("plan: other units, FP8 blockwise", f"{MIXED} {BLOCKWISE}", "", plan=PLAN_UNITS),
    Row("plan, MLA", LATENT, "", plan=PLAN_LATENT),
    Row("eval before, between, after", MIXED, MIXED_TAGS, evaluates_after=(0, 1, 2)),
    Row("forward-only first", MIXED, MIXED_TAGS, evaluates_after=(0,)),
    Row("batch ramp-up", f"{MIXED} --rampup-batch-size 2 2 4", MIXED_TAGS),
    Row("1F1B", f"{MIXED} {TWO} {FOUR_LAYERS} {PIPELINE}", MIXED_TAGS, gpus=2),
    Row(
        "1F1B, fewer bytes on later stages",
        f"{MIXED} {TWO} {FOUR_LAYERS} {PIPELINE}",
        MIXED_TAGS,
        gpus=2,
        options=(("delta_offload_bytes_across_pp_ranks", 1 << 20),),
    ),
    Row("1F1B, variable sequence length", f"{MIXED} {TWO} {FOUR_LAYERS} {PIPELINE} --variable-seq-lengths", MIXED_TAGS, gpus=2),
    Row("interleaved", f"{MOE} {TWO} --num-layers 4 {VIRTUAL}", MOE_TAGS, gpus=2),
    Row("uneven stages", f"{MOE} {TWO} {PIPELINE} --decoder-first-pipeline-num-layers 1", MOE_TAGS, gpus=2),
    Row("fewer microbatches than stages", f"{MOE} --num-layers 4 --global-batch-size 2 {PIPELINE}", MOE_TAGS, gpus=2),
    Row(
        "tensor and sequence parallel", f"{MIXED} {TWO} --tensor-model-parallel-size 2 --sequence-parallel", MIXED_TAGS, gpus=2
    ),
    Row("expert parallel, all-to-all", f"{MIXED} {TWO} --expert-model-parallel-size 2", MIXED_TAGS, gpus=2),
    Row(
        "expert parallel, all-gather",
        f"{MIXED} {TWO} --expert-model-parallel-size 2".replace("alltoall", "allgather"),
        MIXED_TAGS,
        gpus=2,
    ),
    Row("expert-parallel overlap (combined 1F1B)", f"{MOE} {TWO} {OVERLAP}", MOE_TAGS.replace(" moe_combine", ""), gpus=2),
    Row(
        "expert-parallel overlap (combined 1F1B), mixed dense and MoE, shared experts",
        f"{MIXED} {TWO} {OVERLAP}",
        MIXED_TAGS.replace(" moe_combine", ""),
        gpus=2,
    ),
    Row("expert-parallel overlap (combined 1F1B), plan", f"{MIXED} {TWO} {OVERLAP}", "", gpus=2, plan=PLAN_OFFLOADS),
    Row("context parallel", f"{MOE} {TWO} --context-parallel-size 2", MOE_TAGS, gpus=2),
    Row("data parallel", f"{MIXED} {TWO}", MIXED_TAGS, gpus=2),
    Row("1F1B, plan", f"{MIXED} {TWO} {UNEVEN}", "", gpus=2, plan=PLAN_MIX),
    Row("1F1B, first linears", f"{MIXED} {TWO} {UNEVEN}", "", gpus=2, plan=PLAN_FIRST_LINEARS),
    Row("1F1B, permutation", f"{MIXED} {TWO} {UNEVEN}", "", gpus=2, plan=PLAN_PERMUTATION),
    Row("1F1B, plan: other units", f"{MIXED} {TWO} {UNEVEN}", "", gpus=2, plan=PLAN_UNITS),
    Row("1F1B, plan, FP8 blockwise", f"{MIXED} {TWO} {UNEVEN} {BLOCKWISE}", "", gpus=2, plan=PLAN_MIX),
    Row("1F1B, plan, FP8 delayed", f"{MIXED} {TWO} {UNEVEN} {DELAYED}", "", gpus=2, plan=PLAN_DELAYED),
    Row("interleaved, plan", f"{MIXED} {TWO} {FOUR_LAYERS} {VIRTUAL}", "", gpus=2, plan=PLAN_MIX_FOUR, layers_by_chunk=2),
    Row(
        "interleaved, first linears",
        f"{MIXED} {TWO} {FOUR_LAYERS} {VIRTUAL}",
        "",
        gpus=2,
        plan=PLAN_FIRST_LINEARS_FOUR,
        layers_by_chunk=2,
    ),
    Row(
        "tensor and sequence parallel, first linears",
        f"{MIXED} {TWO} --tensor-model-parallel-size 2 --sequence-parallel",
        "",
        gpus=2,
        plan=PLAN_FIRST_LINEARS,
    ),
    Row("1F1B, FP8 blockwise", f"{MOE} {TWO} --num-layers 4 {PIPELINE} {BLOCKWISE}", MOE_TAGS, gpus=2),
    Row("expert parallel, all-to-all, four GPUs", f"{MIXED} {TWO} --expert-model-parallel-size 4", MIXED_TAGS, gpus=4),
    Row(
        "expert parallel, all-gather, four GPUs",
        f"{MIXED} {TWO} --expert-model-parallel-size 4".replace("alltoall", "allgather"),
        MIXED_TAGS,
        gpus=4,
    ),
    Row(
        "tensor, sequence and expert parallel, four GPUs",
        f"{MIXED} {TWO} --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4 "
        "--expert-tensor-parallel-size 1",
        MIXED_TAGS,
        gpus=4,
    ),
    Row(
        "1F1B, tensor and sequence parallel, four GPUs",
        f"{MIXED} {TWO} {FOUR_LAYERS} {PIPELINE} --tensor-model-parallel-size 2 --sequence-parallel",
        MIXED_TAGS,
        gpus=4,
    ),
    Row(
        "interleaved, expert parallel, four GPUs",
        f"{MOE} {TWO} --num-layers 4 {VIRTUAL} --expert-model-parallel-size 2",
        MOE_TAGS,
        gpus=4,
    ),
    # With overlap each rank runs one more microbatch ahead: with fewer than four the first rank would never overlap.
    Row(
        "expert-parallel overlap (combined 1F1B), interleaved, four GPUs",
        f"{MOE} --global-batch-size 16 --num-layers 4 {VIRTUAL} {OVERLAP}",
        MOE_TAGS.replace(" moe_combine", ""),
        gpus=4,
    ),
)

SHORT = (
    "dense",
    "MoE, all-to-all",
    "MoE, op fuser",
    "mixed dense and MoE, shared experts",
    "grouped-query attention",
    "MTP",
    "MLA",
    "packed sequences (THD)",
    *(f"FP8, {recipe}" for recipe in ("delayed", "tensorwise", "blockwise")),
    "plan: keep, recompute, offload",
)
"""The rows of `--short`: each kind of model, both implementations of experts, and each FP8 recipe."""
