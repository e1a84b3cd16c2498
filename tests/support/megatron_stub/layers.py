"""Modules that call the offload interface in the same order as Megatron-Core's development branch.

Small ops with known saved tensors replace attention and experts. Attention and experts import the interface at the top of the
module, and a layer imports it in a function when it is built.
"""

from collections.abc import Sequence

import torch
from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
    FineGrainedActivationOffloadingInterface as off_interface,
)
from torch.utils.checkpoint import checkpoint

HIDDEN, FFN = 32, 48
PROJECTED = (HIDDEN, 3 * HIDDEN, 4)
"""Elements per token of a gated delta product's projection: the gate, value, key and query, and the strength."""


def get_interface():
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import FineGrainedActivationOffloadingInterface

    return FineGrainedActivationOffloadingInterface


class Attention(torch.nn.Module):
    def __init__(self, tags: Sequence[str], *, recomputes_core: bool = False) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(HIDDEN, 3 * HIDDEN)
        self.proj = torch.nn.Linear(HIDDEN, HIDDEN)
        self.tags = tags
        self.recomputes_core = recomputes_core

    @staticmethod
    def run_core(query, key, value):
        return (query * key).tanh() * value

    def forward(self, hidden):
        qkv_manager = off_interface("qkv_linear" in self.tags, hidden, "qkv_linear")
        with qkv_manager as hidden:
            qkv = self.qkv(hidden).chunk(3, dim=-1)
        query, key, value = qkv_manager.group_offload(qkv, forced_released_tensors=[])
        core_manager = off_interface("core_attn" in self.tags and self.training, query, "core_attn")
        if self.recomputes_core:
            output = checkpoint(self.run_core, query, key, value, use_reentrant=False)
        else:
            with core_manager as query:
                output = self.run_core(query, key, value)
            output = core_manager.group_offload(output, forced_released_tensors=[query, key, value])
        proj_manager = off_interface("attn_proj" in self.tags, output, "attn_proj")
        with proj_manager as output:
            projected = self.proj(output)
        return proj_manager.group_offload(projected, forced_released_tensors=[output])


class Experts(torch.nn.Module):
    def __init__(self, tags: Sequence[str]) -> None:
        super().__init__()
        self.fc1 = torch.nn.Linear(HIDDEN, FFN)
        self.fc2 = torch.nn.Linear(FFN, HIDDEN)
        self.tags = tags
        self.delays_offload = False

    def forward(self, tokens):
        fc1_manager = off_interface("expert_fc1" in self.tags, tokens, "expert_fc1")
        with fc1_manager as tokens:
            intermediate = self.fc1(tokens)
        intermediate = fc1_manager.group_offload(
            intermediate, forced_released_tensors=[tokens], delay_offload=self.delays_offload
        )
        act_manager = off_interface("moe_act" in self.tags, intermediate, "moe_act")
        with act_manager as intermediate:
            activated = torch.nn.functional.gelu(intermediate)
        output = self.fc2(activated)
        return act_manager.group_offload(output, forced_released_tensors=[intermediate], delay_offload=self.delays_offload)


class Layer(torch.nn.Module):
    def __init__(self, number: int, tags: Sequence[str], *, recomputes_core: bool = False) -> None:
        super().__init__()
        self.number = number
        self.attn_norm = torch.nn.LayerNorm(HIDDEN)
        self.attention = Attention(tags, recomputes_core=recomputes_core)
        self.mlp_norm = torch.nn.LayerNorm(HIDDEN)
        self.experts = Experts(tags)
        self.tags = tags
        self.interface = get_interface()
        self.attn_norm_manager = None
        self.mlp_norm_manager = None

    def forward(self, hidden):
        self.attn_norm_manager = self.interface("attn_norm" in self.tags, hidden, "attn_norm")
        with self.attn_norm_manager as hidden:
            normed = self.attn_norm(hidden)
        residual = hidden
        hidden = residual + self.attention(normed)
        hidden = self.attn_norm_manager.group_offload(hidden, forced_released_tensors=[residual])
        self.attn_norm_manager = None
        self.mlp_norm_manager = self.interface("mlp_norm" in self.tags, hidden, "mlp_norm")
        with self.mlp_norm_manager as hidden:
            normed = self.mlp_norm(hidden)
        residual = hidden
        hidden = residual + self.experts(normed)
        if self.mlp_norm_manager is not None:
            hidden = self.mlp_norm_manager.group_offload(hidden, forced_released_tensors=[residual])
            self.mlp_norm_manager = None
        return hidden


class DeltaProduct(torch.nn.Module):
    """Calls the interface in the order of a gated delta product's mixer.

    One projection computes the gate, the convolution's input and the strength, as views of one storage. The group begins at the
    convolution and ends after the kernel and the gate, but does not contain their own tensors.
    """

    def __init__(self, tags: Sequence[str], *, recomputes_qkv: bool = False) -> None:
        super().__init__()
        self.in_proj = torch.nn.Linear(HIDDEN, sum(PROJECTED))
        self.out_proj = torch.nn.Linear(HIDDEN, HIDDEN)
        self.offload_gdp_qkv = "gdp_qkv" in tags
        self.recomputes_qkv = recomputes_qkv

    @staticmethod
    def prepare(projected):
        value, key, query = projected.sin().split(HIDDEN, dim=-1)
        return query.tanh(), key.tanh(), value.contiguous()

    def forward(self, hidden):
        gate, projected, strength = self.in_proj(hidden).split(PROJECTED, dim=-1)
        qkv_manager = off_interface(self.offload_gdp_qkv, projected, "gdp_qkv")
        with qkv_manager as projected:
            if self.recomputes_qkv:
                query, key, value = checkpoint(self.prepare, projected, use_reentrant=True)
            else:
                query, key, value = self.prepare(projected)
        mixed = query * key * value * strength.sigmoid().mean(dim=-1, keepdim=True)
        output = mixed * gate.sigmoid()
        output = qkv_manager.group_offload(output, forced_released_tensors=[])
        return self.out_proj(output)


class DeltaLayer(torch.nn.Module):
    """A norm, which is no site, and a mixer, without an MLP."""

    def __init__(self, number: int, tags: Sequence[str], *, recomputes_qkv: bool = False) -> None:
        super().__init__()
        self.number = number
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.mixer = DeltaProduct(tags, recomputes_qkv=recomputes_qkv)

    def forward(self, hidden):
        return hidden + self.mixer(self.norm(hidden))


class Model(torch.nn.Module):
    """A model chunk: the layers of one virtual pipeline stage."""

    def __init__(
        self, layers: Sequence[Layer | DeltaLayer], *, vp_size: int | None = None, vp_stage: int | None = None
    ) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.vp_size = vp_size
        self.vp_stage = vp_stage
        self.settings = {
            "min_offloaded_tensor_size": 0,
            "delta_offload_bytes_across_pp_ranks": 0,
            "activation_offload_fraction": 1.0,
            "max_inflight_offloads": None,
        }
        self.has_marked = False

    def forward(self, hidden):
        off_interface.init_chunk_handler(pp_rank=0, vp_size=self.vp_size, vp_stage=self.vp_stage, **self.settings)
        if not self.has_marked:
            for parameter in self.parameters():
                off_interface.mark_not_offload(parameter)
            self.has_marked = True
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def finish_schedule() -> None:
    """Finish a step or an evaluation, like Megatron's schedules."""
    off_interface.reset(process_group=None)
