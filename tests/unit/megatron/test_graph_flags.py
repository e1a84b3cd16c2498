"""Tests that the CUDA graph flags of 0.19 reach the config of each version, and that unsupported ones raise errors."""

import pytest
from support.trainings import DENSE, MOE
from support.versions import is_installed

from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.flags.graph_flags import to_config_fields
from fgoffload.trainer import limits
from fgoffload.trainer.arguments import build_transformer_config, parse_arguments
from fgoffload.trainer.limits import check_supported

TE = "--cuda-graph-impl transformer_engine"
TE_LAYERS = "--transformer-impl transformer_engine"
FULL = "--cuda-graph-impl full_iteration"
NEW, OLD = {"cuda_graph_impl", "cuda_graph_modules"}, {"cuda_graph_impl", "cuda_graph_scope"}


def parse(flags, *, base=DENSE):
    return parse_arguments([*base.split(), *flags.split()], source="x.sh")


@pytest.fixture
def _gpu(monkeypatch):
    """Make checks pass as on a machine with a GPU and Transformer Engine."""
    monkeypatch.setattr(limits, "needs_cpu_support", lambda: False)
    monkeypatch.setattr(limits, "has_transformer_engine", lambda: True)


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        (TE, {"cuda_graph_impl": "transformer_engine"}),
        (f"{TE} --cuda-graph-modules full", {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": []}),
        (f"{TE} --cuda-graph-modules attn", {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]}),
        (f"{TE} --cuda-graph-scope attn mlp", {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn", "mlp"]}),
        (FULL, {"cuda_graph_impl": "full_iteration"}),
        (
            "--cuda-graph-impl local --cuda-graph-scope full_iteration",
            {"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []},
        ),
    ],
)
def test_old_and_new_graph_flags_set_the_same_fields(flags, fields):
    found = parse(flags).transformer
    assert {name: value for name, value in found.items() if "graph" in name} == fields


@pytest.mark.parametrize(
    ("fields", "new", "old"),
    [
        ({}, {}, {}),
        ({"cuda_graph_impl": "none"}, {"cuda_graph_impl": "none"}, {"cuda_graph_impl": "none"}),
        (
            {"cuda_graph_impl": "local"},
            {"cuda_graph_impl": "local", "cuda_graph_modules": []},
            {"cuda_graph_impl": "local", "cuda_graph_scope": []},
        ),
        (
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]},
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]},
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn"]},
        ),
        (
            {"cuda_graph_impl": "full_iteration"},
            {"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []},
            {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]},
        ),
        ({"cuda_graph_modules": ["attn"]}, {"cuda_graph_modules": ["attn"]}, {"cuda_graph_scope": ["attn"]}),
    ],
)
def test_each_megatron_version_gets_its_own_field_names(fields, new, old):
    assert to_config_fields(fields, NEW) == new
    assert to_config_fields(fields, OLD) == old


def test_the_installed_config_accepts_the_graph_flags():
    config = build_transformer_config(parse(f"{TE} --cuda-graph-modules attn mlp --cuda-graph-warmup-steps 5"), offload=None)
    modules = config.cuda_graph_modules if is_installed("0.18") else config.cuda_graph_scope
    assert [module.name for module in modules] == ["attn", "mlp"]
    assert (config.cuda_graph_impl, config.cuda_graph_warmup_steps) == ("transformer_engine", 5)
    assert config.use_te_rng_tracker


@pytest.mark.parametrize(
    ("flags", "is_used"),
    [("", False), ("--te-rng-tracker", True), (TE, True), (FULL, False), (f"{FULL} {TE_LAYERS}", True), (TE_LAYERS, False)],
)
def test_te_rng_tracker_is_used_for_graphs_with_transformer_engine(flags, is_used):
    assert parse(flags).uses_te_rng_tracker is is_used


def test_replay_starts_after_warm_up_and_capture():
    assert parse("").steps_until_replay == 0
    assert parse(TE).steps_until_replay == 4
    assert parse(f"{TE} --cuda-graph-warmup-steps 1").steps_until_replay == 2
    eager = parse(f"{TE} --cuda-graph-modules attn").without_graphs()
    assert (eager.captures_graphs, eager.steps_until_replay) == (False, 0)
    assert dict(eager.transformer) == dict(parse("").transformer)


def test_the_delay_flag_reaches_the_config():
    flags = "--fine-grained-activation-offloading --offload-modules expert_fc1 --delay-offload-until-cuda-graph"
    arguments = parse(flags, base=f"{MOE} --moe-grouped-gemm")
    assert arguments.offload.delay_offload_until_cuda_graph
    config = build_transformer_config(arguments, offload=arguments.offload)
    assert getattr(config, "delay_offload_until_cuda_graph", True) is True


@pytest.mark.parametrize("impl", ["local", "transformer_engine", "full_iteration"])
def test_graphs_need_a_gpu(impl):
    with pytest.raises(ConfigError) as caught:
        check_supported(parse(f"--cuda-graph-impl {impl}"))
    assert str(caught.value) == f"x.sh: --cuda-graph-impl {impl} needs a GPU, but this machine has none. Remove it."


def test_transformer_engine_graphs_need_transformer_engine(monkeypatch):
    monkeypatch.setattr(limits, "needs_cpu_support", lambda: False)
    monkeypatch.setattr(limits, "has_transformer_engine", lambda: False)
    with pytest.raises(ConfigError, match=r"transformer_engine needs Transformer Engine, .* pip install 'fgoffload\[te\]'"):
        check_supported(parse(TE))


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"{TE} --variable-seq-lengths", "and --variable-seq-lengths are mutually exclusive: a graph has fixed shapes"),
        (f"{TE} {TE_LAYERS} --micro-batch-size 1 --packed-sequences", "and --packed-sequences are mutually exclusive"),
        (f"{TE} --rampup-batch-size 2 2 8", "and --rampup-batch-size are mutually exclusive"),
        ("--enable-cuda-graph", "--enable-cuda-graph, a deprecated flag, is not supported in this version: use"),
        (f"{FULL} --num-experts 4", "dropless routing synchronizes on the token counts, which a graph cannot capture."),
        (f"{FULL} --num-experts 4 --moe-expert-capacity-factor 1.0", "--moe-pad-expert-input-to-capacity"),
    ],
)
def test_settings_that_graphs_cannot_capture_are_rejected(flags, message):
    with pytest.raises(ConfigError) as caught:
        check_supported(parse(flags))
    assert message in str(caught.value)


@pytest.mark.usefixtures("_gpu")
def test_expandable_segments_need_nccl_graph_registration_off(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    with pytest.raises(ConfigError, match="Set NCCL_GRAPH_REGISTER=0"):
        check_supported(parse(TE))
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    check_supported(parse(TE))
