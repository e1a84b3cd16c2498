"""Tests a trainer with Megatron's CUDA graphs: replays match eager steps bitwise, and nothing leaks."""

import gc

import pytest
import torch
from support.versions import is_installed

from fgoffload import StateError
from fgoffload.integrations.megatron.patching.cpu_support import has_transformer_engine
from fgoffload.trainer.arguments import parse_arguments
from fgoffload.trainer.data import TextData
from fgoffload.trainer.parallel import destroy_parallel, initialize_parallel
from fgoffload.trainer.trainer import Trainer

# Megatron and Transformer Engine raise warnings about their own code.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("parallel")]

LAYERS, MICROBATCHES = 3, 4
SHAPE = (
    f"--num-layers {LAYERS} --hidden-size 256 --num-attention-heads 4 --kv-channels 64 --seq-length 128 --micro-batch-size 2 "
    f"--global-batch-size {2 * MICROBATCHES} --ffn-hidden-size 512 --swiglu --disable-bias-linear --bf16 "
    "--position-embedding-type rope --normalization RMSNorm --hidden-dropout 0.0 --attention-dropout 0.0 --lr 1e-3 "
    "--transformer-impl transformer_engine --no-gradient-accumulation-fusion --te-rng-tracker"
)
EXPERTS = (
    "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128 --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type none --moe-aux-loss-coeff 0.0 --no-moe-permute-fusion"
)
DENSE, MOE = SHAPE, f"{SHAPE} {EXPERTS}"
PADDED = f"{MOE} --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"
SHARED = f"{MOE} --moe-shared-expert-intermediate-size 128"
WARMUP, STEPS = 2, 6

LAUNCHES = 2 * LAYERS * MICROBATCHES
"""Graphs launched per step: forward and backward of each layer and microbatch."""

GRAPHS = {
    # By name: the model, its graph flags, and the number of graphs that a step launches.
    "dense layers": (DENSE, "--cuda-graph-impl transformer_engine --cuda-graph-modules attn mlp", LAUNCHES),
    "whole dense layers": (DENSE, "--cuda-graph-impl transformer_engine --cuda-graph-modules full", LAUNCHES),
    "attention": (MOE, "--cuda-graph-impl transformer_engine --cuda-graph-modules attn", LAUNCHES),
    "router": (MOE, "--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router", LAUNCHES),
    "preprocess": (MOE, "--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router moe_preprocess", LAUNCHES),
    "shared experts": (
        SHARED,
        "--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router moe_preprocess",
        LAUNCHES,
    ),
    "padded experts": (PADDED, "--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe", LAUNCHES),
    "dense step": (DENSE, "--cuda-graph-impl full_iteration", 1),
    "step with padded experts": (PADDED, "--cuda-graph-impl full_iteration", 1),
}
LOCAL = (DENSE, "--cuda-graph-impl local --cuda-graph-modules attn mlp")


@pytest.fixture(scope="module")
def parallel():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    if not has_transformer_engine():
        pytest.skip("needs Transformer Engine")
    if not is_installed("0.18"):
        pytest.skip("needs megatron-core 0.18 or newer")
    initialize_parallel(parse_arguments(DENSE.split(), source="test"))
    yield
    destroy_parallel()


INSIDE, OUTSIDE = ("qkv_linear", "core_attn", "attn_proj"), ("expert_fc1", "moe_act")
OFFLOADS = [
    # A row of `GRAPHS`, the tags, and whether groups are delayed until the next graph.
    ("dense layers", (*INSIDE, "mlp_fc1", "mlp_act"), False),
    ("whole dense layers", ("core_attn", "mlp_norm", "mlp_fc2"), False),
    ("attention", OUTSIDE, False),
    ("attention", OUTSIDE, True),
    ("attention", (*INSIDE, "router", *OUTSIDE), False),
    ("router", (*INSIDE, "router"), False),
    ("preprocess", OUTSIDE, True),
    ("preprocess", INSIDE, False),
    ("preprocess", (*INSIDE, *OUTSIDE, "moe_combine"), True),
    ("shared experts", (*INSIDE, "shared_expert", *OUTSIDE), True),
    ("dense step", (*INSIDE, "mlp_fc1", "mlp_act"), False),
    ("step with padded experts", (*INSIDE, *OUTSIDE), False),
]


def make_trainer(flags):
    arguments = parse_arguments([*flags.split(), "--cuda-graph-warmup-steps", str(WARMUP)], source="test")
    return Trainer(arguments, TextData.load(), offload=arguments.offload)


def count_launches(trainer):
    """Return the number of CUDA graphs that the host launches in one step."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        trainer.run_step(with_digests=False)
    return sum(event.name == "cudaGraphLaunch" for event in profile.events())


def train(flags):
    """Return the results of all steps, and the number of graphs that one more step launches."""
    trainer = make_trainer(flags)
    try:
        steps = [trainer.run_step() for _ in range(STEPS)]
        launches = count_launches(trainer)
        assert trainer.graphs.is_captured is (launches > 0)
    finally:
        trainer.close()
    return [(step.losses, step.gradient_digests) for step in steps], launches


def measure_memory():
    """Return the allocated bytes, and the memory pools of graphs, after garbage collection."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    pools = {segment["segment_pool_id"] for segment in torch.cuda.memory_snapshot()} - {(0, 0)}
    return torch.cuda.memory_allocated(), pools


@pytest.mark.parametrize("name", GRAPHS)
def test_captured_graphs_are_bitwise_identical_to_eager_steps(name):
    model, flags, expected_launches = GRAPHS[name]
    expected, no_launches = train(model)
    found, launches = train(f"{model} {flags}")
    assert (launches, no_launches) == (expected_launches, 0)
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one == other, f"step {step}, with {WARMUP} eager steps first"


@pytest.mark.parametrize("flags", [*((model, flags) for model, flags, _ in GRAPHS.values()), LOCAL], ids=[*GRAPHS, "local"])
def test_a_second_trainer_captures_its_own_graphs_with_identical_results(flags):
    (first, launches), (second, again) = (train(" ".join(flags)) for _ in range(2))
    assert first == second
    assert launches == again > 0


def offload_flags(tags, *, delays=False):
    return (
        f"--fine-grained-activation-offloading --offload-modules {' '.join(tags)} --min-offloaded-tensor-size 1024 "
        f"--fine-grained-offloading-max-inflight-offloads 1 {'--delay-offload-until-cuda-graph' if delays else ''}"
    )


@pytest.mark.parametrize(("name", "tags", "delays"), OFFLOADS)
def test_offload_outside_and_inside_graphs_is_bitwise_identical(name, tags, delays):
    model, flags, expected_launches = GRAPHS[name]
    expected, _ = train(f"{model} {flags}")
    trainer = make_trainer(f"{model} {flags} {offload_flags(tags, delays=delays)}")
    try:
        steps = [trainer.run_step() for _ in range(STEPS)]
        stats = trainer.integration.last_step.tags
        assert count_launches(trainer) == expected_launches
    finally:
        trainer.close()
    assert [(step.losses, step.gradient_digests) for step in steps] == expected
    assert sum(numbers.d2h_bytes for numbers in stats.values()) > 0
    assert sum(numbers.h2d_bytes for numbers in stats.values()) > 0


@pytest.mark.parametrize("name", ["preprocess", "dense step"])
def test_replaying_graphs_after_removing_their_engine_raises(name):
    model, flags, _ = GRAPHS[name]
    trainer = make_trainer(f"{model} {flags} {offload_flags(INSIDE)}")
    try:
        for _ in range(WARMUP + 2):
            trainer.run_step(with_digests=False)
        trainer.integration.remove()
        with pytest.raises(StateError, match="captured with activation offload, which has been removed since"):
            trainer.run_step(with_digests=False)
    finally:
        trainer.close()


def test_trainers_with_and_without_graphs_can_alternate():
    model, flags, launches = GRAPHS["preprocess"]
    whole_model, whole_flags, _ = GRAPHS["dense step"]
    found = [train(one)[1] for one in (f"{model} {flags}", model, f"{whole_model} {whole_flags}", f"{model} {flags}", model)]
    assert found == [launches, 0, 1, launches, 0]


@pytest.mark.parametrize("name", ["preprocess", "dense step"])
def test_evaluation_between_replays_does_not_change_training(name):
    model, flags, _ = GRAPHS[name]
    expected, _ = train(f"{model} {flags}")
    trainer = make_trainer(f"{model} {flags}")
    try:
        found = []
        for _ in range(STEPS):
            step = trainer.run_step()
            found.append((step.losses, step.gradient_digests))
            trainer.evaluate()
    finally:
        trainer.close()
    assert found == expected


@pytest.mark.parametrize("flags", [*((model, flags) for model, flags, _ in GRAPHS.values()), LOCAL], ids=[*GRAPHS, "local"])
def test_closing_the_trainer_frees_all_graph_memory(flags):
    _, earlier_pools = measure_memory()  # of other tests in this process
    train(" ".join(flags))  # libraries allocate some memory only once
    allocated_bytes, _ = measure_memory()
    for _ in range(2):
        train(" ".join(flags))
        found_bytes, pools = measure_memory()
        assert found_bytes == allocated_bytes
        # Megatron never frees memory that it allocates in the pool of local graphs outside a capture.
        assert pools <= earlier_pools or flags == LOCAL


@pytest.mark.parametrize("name", ["preprocess", "dense step"])
def test_gradients_and_parameters_keep_their_addresses(name):
    model, flags, _ = GRAPHS[name]
    trainer = make_trainer(f"{model} {flags}")

    def list_addresses():
        return [(one.data_ptr(), one.main_grad.data_ptr()) for one in trainer.parameters()]

    try:
        addresses = list_addresses()
        for _ in range(STEPS):
            trainer.run_step(with_digests=False)
            assert list_addresses() == addresses
    finally:
        trainer.close()
