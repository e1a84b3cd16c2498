"""Tests that unsupported combinations of CUDA graphs and offload raise one error with flag, module and reason."""

import pytest

from fgoffload import ConfigError, OffloadConfig, PlanError
from fgoffload.integrations.megatron.graphs.graph_checks import check_graphs, check_recompute

TE, LOCAL, FULL = ({"cuda_graph_impl": name} for name in ("transformer_engine", "local", "full_iteration"))
EXPERTS = {"num_moe_experts": 8, "num_layers": 2}
PADDED = EXPERTS | {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}


def check(tags, values, **options):
    check_graphs(OffloadConfig(offload_modules=tags, **options), tags, values)


@pytest.mark.parametrize(
    ("tags", "values", "reason"),
    [
        (("core_attn", "attn_norm"), TE | {"cuda_graph_modules": ["attn"]}, "'attn_norm' .* saves a graph's input"),
        (("mlp_norm",), TE | EXPERTS | {"cuda_graph_modules": ["moe_router"]}, "'mlp_norm' and --cuda-graph-impl transformer"),
        (("core_attn",), LOCAL | EXPERTS | {"cuda_graph_modules": ["moe_router"]}, "local graphs support only the experts"),
        (("expert_fc1",), LOCAL | EXPERTS | {"cuda_graph_modules": []}, "local graphs capture no copies"),
        (("core_attn",), FULL | EXPERTS, "dropless routing synchronizes on the token counts"),
        (("core_attn",), LOCAL | EXPERTS | {"cuda_graph_scope": ["full_iteration"]}, "full_iteration: dropless routing"),
    ],
)
def test_tags_that_a_graph_cannot_capture_are_rejected(tags, values, reason):
    with pytest.raises(ConfigError, match=reason):
        check(tags, values)


def test_auto_is_rejected_with_graphs():
    with pytest.raises(ConfigError, match="auto measures modules in eager steps, but --cuda-graph-impl local"):
        check(("auto",), LOCAL, offload_memory_budget_bytes=1 << 30)


@pytest.mark.parametrize(
    ("tags", "values"),
    [
        (("attn_norm",), {}),
        (("expert_fc1", "core_attn"), TE | EXPERTS | {"cuda_graph_modules": ["attn", "moe_router", "moe_preprocess"]}),
        (("expert_fc1",), LOCAL | EXPERTS | {"cuda_graph_modules": ["moe_router"]}),
        (("core_attn", "expert_fc1"), FULL | PADDED),
        (("core_attn", "mlp_fc1"), FULL),
    ],
)
def test_supported_combinations_of_graphs_and_offload_are_accepted(tags, values):
    check(tags, values)


@pytest.mark.parametrize(("values", "impl"), [({}, "none"), (FULL, "full_iteration")])
def test_delaying_offload_without_layer_graphs_warns_once(caplog, values, impl):
    check(("core_attn",), values, delay_offload_until_cuda_graph=True)
    assert [record.getMessage().partition(" has no effect ")[2] for record in caplog.records] == [
        f"with --cuda-graph-impl {impl}. It needs transformer_engine."
    ]


def test_a_plan_cannot_recompute_captured_modules():
    attention = TE | EXPERTS | {"cuda_graph_modules": ["attn"]}
    check_recompute(["moe_act"], attention, layer=3, is_moe=True)
    with pytest.raises(PlanError, match=r"recomputes layers\.3\.core_attn, but --cuda-graph-impl transformer_engine captures"):
        check_recompute(["moe_act", "core_attn"], attention, layer=3, is_moe=True)
