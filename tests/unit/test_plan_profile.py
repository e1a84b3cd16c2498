"""Tests `fgoffload plan --profile`: plans for the measured training run, and errors for any other."""

import dataclasses
import json

import pytest

from fgoffload.cli import main
from fgoffload.cuda_graphs import find_captured
from fgoffload.integrations.megatron.flags.model_shapes import read_model_file
from fgoffload.plan import OffloadPlan
from fgoffload.planner.model_ranks import Assumptions, build_ranks
from fgoffload.planner.timing.efficiency import Efficiency
from fgoffload.planner.timing.hardware import get_hardware
from fgoffload.planner.timing.link_profile import CopyRate, LinkProfile
from fgoffload.planner.timing.profile import MeasuredTraining, Profile, RankProfile

FLAGS = (
    "--num-layers 4 --hidden-size 1024 --ffn-hidden-size 2048 --num-attention-heads 8 --seq-length 2048 --bf16 --swiglu "
    "--max-position-embeddings 2048 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 512 --moe-layer-freq [0]+[1]*3 "
    "--micro-batch-size 1 --global-batch-size 8 --vocab-size 32000 --position-embedding-type rope --sequence-parallel"
)
BUDGET = ("--offload-memory-budget", "16GiB")


def write_arguments(path, flags):
    path.write_text(f"ARGS=(\n{flags}\n)\n", encoding="utf-8")
    return str(path)


def make_profile(arguments, typed=()):
    """Return a profile of the training run in a file, with times and bytes of the hardware table as the measurement."""
    model, parallelism = read_model_file(arguments, typed=typed)
    measured = []
    assumptions = Assumptions(efficiency=Efficiency(host_s_per_launch=3e-6))  # not launch-bound
    for rank in build_ranks(model, parallelism, get_hardware("h100"), assumptions=assumptions):
        chunks = [
            dataclasses.replace(
                chunk,
                layers=tuple(
                    dataclasses.replace(
                        layer, model=dataclasses.replace(layer.model, kind=f"{layer.model.kind} (layer {layer.number})")
                    )
                    for layer in chunk.layers
                ),
            )
            for chunk in rank.chunks
        ]
        measured.append(
            RankProfile(
                rank=rank.rank, pipeline=parallelism.pipeline, chunks=tuple(chunks), static_bytes=rank.static_bytes, step_s=1.0
            )
        )
    rates = CopyRate(size_bytes=2**28, d2h_bytes_per_s=50e9, h2d_bytes_per_s=53e9, duplex_bytes_per_s=33.5e9)
    return Profile(
        device="A device",
        versions={},
        date="2026-11-22",
        link=LinkProfile(copies=(rates,), compute_slowdown=0.0),
        ranks=tuple(measured),
        training=MeasuredTraining(source="measured.sh", flags=(*FLAGS.split(), *typed), world_size=parallelism.world_size),
    )


@pytest.fixture
def arguments(tmp_path):
    return write_arguments(tmp_path / "model.sh", FLAGS)


@pytest.fixture
def profile(tmp_path, arguments):
    path = tmp_path / "profile.json"
    make_profile(tmp_path / "model.sh").save(path)
    return path


def plan(capsys, *words):
    code = main(["plan", *words])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def find_row(text, name):
    return next(line for line in text.splitlines() if line.startswith(f"│ {name} ")).split()


def test_the_measured_training_run_is_planned(capsys, arguments, profile):
    code, out, err = plan(capsys, arguments, "--profile", str(profile), *BUDGET)
    assert code == 0
    # The plan warns once about missing flags. The profile has the same flags and causes no second warning.
    assert err.count("without --moe-token-dispatcher-type") == 1
    assert "profile.json" not in err
    assert "model: 4 layers, tp 1 pp 1, 1 x A device, profiled with an optimizer" in out


def test_cuda_graphs_are_planned_from_an_eager_profile(capsys, arguments, profile, tmp_path):
    path = tmp_path / "plan.json"
    graphs = ("--cuda-graph-impl", "transformer_engine", "--cuda-graph-modules", "attn", "moe_router")
    words = (arguments, "--profile", str(profile), "--offload-memory-budget", "5.95GiB", "--json", str(path))
    recomputed = []
    for typed in ((), graphs):
        code, _, err = plan(capsys, *words, *typed)
        assert code == 0
        actions = OffloadPlan.load(path).actions
        recomputed.append({site.tag for site, action in actions.items() if action.recomputes and site.layer > 0})
        assert err.count("was measured without CUDA graphs. If that run was launch-bound") == bool(typed)
    captured = find_captured("transformer_engine", ("attn", "moe_router"), is_moe=True)
    assert recomputed[0] & captured
    assert not recomputed[1] & captured


def test_a_reserve_is_added_to_the_measured_memory(capsys, arguments, profile):
    words = (arguments, "--profile", str(profile), "--offload-memory-budget", "16GiB")
    shown = (plan(capsys, *words, *more)[1] for more in ((), ("--reserve", "3GiB")))
    without, with_it = (float(find_row(text, "baseline")[3]) for text in shown)
    assert with_it == pytest.approx(without + 3, abs=0.02)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--num-layers", "8", "--moe-layer-freq", "[0]+[1]*7"), "layers 4, but"),
        (("--seq-length", "1024"), "seq_length 2048, but"),
        (("--tp", "8"), "tensor_parallel_size 1, but"),
        (("--num-gpus", "2"), "data_parallel_size 1, but"),
        (("--no-optimizer",), "has_optimizer True, but"),
    ],
)
def test_another_training_run_is_rejected_with_the_first_difference(capsys, arguments, profile, words, message):
    code, out, err = plan(capsys, arguments, "--profile", str(profile), *BUDGET, *words)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("error: ") == 1


def test_incomplete_profiles_are_rejected_with_the_command_to_measure(capsys, tmp_path, arguments, profile):
    document = json.loads(profile.read_text(encoding="utf-8"))
    for change, message in (
        ({"format": 1}, "is a profile of format 1; this version reads format 3. Measure again."),
        ({"training": None}, "does not contain the flags of the measured run. Measure again: fgoffload profile"),
        ({"ranks": [], "training": None}, "has only link rates, measured on 'A device', which is not in the hardware"),
    ):
        path = tmp_path / "old.json"
        path.write_text(json.dumps(document | change), encoding="utf-8")
        code, _, err = plan(capsys, arguments, "--profile", str(path), *BUDGET)
        assert code == 2
        assert message in err


def write_link(path, *, device="CPU", rates=(25e9, 24e9, 12e9), small=1e9):
    """Write a link-only profile with small and large copies, like `fgoffload profile` without a file."""
    sizes = {2**16: (small,) * 3, 2**28: rates}
    copies = tuple(
        CopyRate(size_bytes=size, d2h_bytes_per_s=d2h, h2d_bytes_per_s=h2d, duplex_bytes_per_s=duplex)
        for size, (d2h, h2d, duplex) in sizes.items()
    )
    link = LinkProfile(copies=copies, compute_slowdown=0.002)
    Profile(device=device, versions={}, date="2026-11-22", link=link).save(path)
    return str(path)


def test_a_measured_link_replaces_only_the_link_of_the_hardware_table(capsys, tmp_path, arguments):
    words = (arguments, "--gpu", "h100", "--offload-memory-budget", "12GiB")
    table, measured = (plan(capsys, *words, *more)[1] for more in ((), ("--profile", write_link(tmp_path / "link.json"))))
    source = "measured on CPU, 2026-11-22: 25.0 GB/s to the host, 24.0 to the device, 12.0 each way when both are in use"
    assert source in " ".join(measured.split())
    assert "Link: " not in table
    for name in ("baseline", "full recompute"):  # these offload nothing, so they do not use the link
        assert find_row(measured, name) == find_row(table, name)
    assert find_row(measured, "offload everything") != find_row(table, "offload everything")


def test_a_device_and_a_training_profile_exclude_each_other(capsys, arguments, profile):
    code, _, err = plan(capsys, arguments, "--gpu", "h100", "--profile", str(profile), *BUDGET)
    assert code == 2
    assert f"--gpu and --profile {profile} both set the device, since the profile is from a training run. Use only one" in err
