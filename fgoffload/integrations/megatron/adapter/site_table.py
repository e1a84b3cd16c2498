"""Table of the places where Megatron-Core saves each tag's tensors, and where its host waits for the device.

Each row is one place, with the versions that have it. docs/reference/tags.md shows the same rows.
"""

import enum
from typing import NamedTuple

from fgoffload.integrations.megatron.host_waits.waits import WAITS

_LAYER = "megatron.core.transformer.transformer_layer:TransformerLayer"
_ATTENTION = "megatron.core.transformer.attention:Attention"
_MLA = "megatron.core.transformer.multi_latent_attention:MultiLatentAttention"
_MLP = "megatron.core.transformer.mlp:MLP"
_SHARED = "megatron.core.transformer.moe.shared_experts:SharedExpertMLP"
_ROUTER = "megatron.core.transformer.moe.router:Router"
_GROUPED = "megatron.core.transformer.moe.experts:TEGroupedMLP"
_SEQUENTIAL = "megatron.core.transformer.moe.experts:SequentialMLP"
_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher:MoETokenDispatcher"
_GDP = "megatron.core.ssm.gated_delta_product:GatedDeltaProductMixer"
_BLOCK = "megatron.core.transformer.transformer_block:TransformerBlock"
_RECOMPUTE = "megatron.core.recompute"
_MTP = "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer"


class CallSite(enum.Enum):
    """Owner of the code that opens the region."""

    MEGATRON = "Megatron's"
    OURS = "ours"


class SiteRow(NamedTuple):
    """One place where tensors of a tag are saved."""

    tag: str
    """Tag as in `--offload-modules`."""
    owner: str
    """Class, as `module:Class`."""
    method: str
    """Method of the class that saves the tensors."""
    saves: str
    """Saved tensors, in words."""
    call_site: CallSite
    since: str
    """First version of megatron-core that has the place, or first and last."""


_MEGATRON, _OURS = CallSite.MEGATRON, CallSite.OURS

SITES = (
    SiteRow("layer_input", _BLOCK, "_checkpointed_forward", "the input of each checkpointed layer", _OURS, "0.16.1 to 0.17"),
    SiteRow("layer_input", _RECOMPUTE, "checkpointed_forward", "the same, in hybrid models too", _OURS, "0.18"),
    SiteRow("layer_input", _MTP, "_checkpointed_forward", "the same, of multi-token prediction", _OURS, "0.16.1"),
    SiteRow("attn_norm", _LAYER, "_forward_attention", "the layer input", _MEGATRON, "0.16.1"),
    SiteRow("qkv_linear", _ATTENTION, "forward", "the norm's output", _MEGATRON, "0.16.1"),
    SiteRow("qkv_linear", _MLA, "forward", "the norm's output, compressed query and key-value", _MEGATRON, "0.16.1"),
    SiteRow("core_attn", _ATTENTION, "forward", "query, key, value, output, log-sum-exp", _MEGATRON, "0.16.1"),
    SiteRow("core_attn", _MLA, "forward", "the same", _MEGATRON, "0.16.1"),
    SiteRow("attn_proj", _ATTENTION, "forward", "the attention output", _MEGATRON, "0.16.1"),
    SiteRow("attn_proj", _MLA, "forward", "the same", _MEGATRON, "0.16.1"),
    SiteRow("mlp_norm", _LAYER, "_forward_pre_mlp_layernorm", "the residual after attention", _MEGATRON, "0.16.1"),
    SiteRow("mlp_fc1", _MLP, "forward", "the first linear's input; with a fused norm the residual too", _OURS, "0.16.1"),
    SiteRow("mlp_act", _MLP, "forward", "the first linear's output", _OURS, "0.16.1"),
    SiteRow("mlp_fc2", _MLP, "forward", "the second linear's input", _OURS, "0.16.1"),
    SiteRow("shared_expert", _SHARED, "forward", "its input, both sides of its activation", _OURS, "0.16.1"),
    SiteRow(
        "shared_expert", _SHARED, "pre_forward_comm", "the same, overlapped: five methods up to get_output", _OURS, "0.16.1"
    ),
    SiteRow("router", _ROUTER, "forward", "its input, logits, probabilities", _OURS, "0.16.1"),
    SiteRow("expert_fc1", _GROUPED, "forward", "the permuted tokens", _MEGATRON, "0.16.1"),
    SiteRow("expert_fc1", _SEQUENTIAL, "forward", "the permuted tokens", _OURS, "0.16.1"),
    SiteRow("moe_act", _GROUPED, "forward", "the first linear's output", _MEGATRON, "0.16.1"),
    SiteRow("moe_act", _SEQUENTIAL, "forward", "the first linear's output", _OURS, "0.16.1"),
    SiteRow("expert_fc2", _GROUPED, "forward", "the activation's output", _OURS, "0.16.1"),
    SiteRow("expert_fc2", _SEQUENTIAL, "forward", "the activation's output", _OURS, "0.16.1"),
    SiteRow("fused_group_mlp", _GROUPED, "_fused_forward", "what the fused grouped MLP keeps", _MEGATRON, "0.19"),
    SiteRow("gdp_qkv", _GDP, "forward", "convolution input, normed query and key of a gated delta product", _MEGATRON, "0.20"),
    SiteRow("moe_combine", _DISPATCHER, "combine_preprocess", "the experts' output, where unpermute saves it", _OURS, "0.16.1"),
    SiteRow("moe_combine", _DISPATCHER, "combine_postprocess", "the same, of the all-to-all dispatcher", _OURS, "0.16.1"),
)

__all__ = ["SITES", "WAITS", "CallSite", "SiteRow"]
