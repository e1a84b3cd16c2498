"""`fgoffload plan --profile`: a plan for what was measured, and one error for anything else."""

import dataclasses
import json
import re
import types
from pathlib import Path

import pytest

from fgoffload.cli import main, plan_report
from fgoffload.cli.plan_device import PlannedDevice
from fgoffload.cli.plan_profile import PlannedTraining, build_profiled_ranks
from fgoffload.integrations.megatron.model_shapes import read_assumptions, read_model_file
from fgoffload.plan import OffloadPlan
from fgoffload.planner.model_ranks import build_ranks
from fgoffload.planner.timing.hardware import Link, get_hardware
from fgoffload.planner.timing.link_profile import CopyRate, LinkProfile
from fgoffload.planner.timing.profile import MeasuredTraining, Profile, RankProfile
from fgoffload.units import MIB

ROOT = Path(__file__).parents[2]
FLAGS = (
    "--num-layers 4 --hidden-size 1024 --ffn-hidden-size 2048 --num-attention-heads 8 --seq-length 2048 --bf16 --swiglu "
    "--max-position-embeddings 2048 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 512 --moe-layer-freq [0]+[1]*3 "
    "--micro-batch-size 1 --global-batch-size 8 --vocab-size 32000 --position-embedding-type rope --sequence-parallel"
)
CONFIG = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
BUDGET = ("--offload-memory-budget", "16GiB")


def write_arguments(path, flags):
    path.write_text(f"ARGS=(\n{flags}\n)\n", encoding="utf-8")
    return str(path)


def make_profile(arguments, typed=()):
    """Return a profile of the training in a file, with the times and bytes of the table: as if it had been measured."""
    model, parallelism = read_model_file(arguments, typed=typed)
    measured = []
    for rank in build_ranks(model, parallelism, get_hardware("h100")):
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


def find_peaks(text):
    row = next(line for line in text.splitlines() if line.startswith("│ nothing "))
    return float(re.search(r"([\d.]+) GiB", row)[1])


def test_the_measured_training_is_planned_for(capsys, arguments, profile):
    code, out, err = plan(capsys, arguments, "--profile", str(profile), *BUDGET)
    assert code == 0
    # What flags leave out is warned of once, for the plan: those of the profile are the same.
    assert err.count("without --moe-token-dispatcher-type") == 1
    assert "profile.json" not in err
    assert "model: 4 layers, tp 1 pp 1, 1 x A device, profiled with an optimizer" in out


def test_microbatches_may_be_others_than_the_measured_ones(capsys, arguments, profile):
    code, out, _ = plan(capsys, arguments, "--profile", str(profile), *BUDGET, "--global-batch-size", "32")
    assert code == 0
    assert "32 microbatches of 1 x 2048" in out


def test_a_host_that_was_measured_late_may_be_taken_for_one_in_time(capsys, tmp_path):
    profile = ROOT / "docs" / "results" / "profiles" / "w2_moe_h100_fifth.json.gz"
    flags = ("--no-bias-swiglu-fusion", "--moe-permute-fusion", "--rope-fusion", "--reserve", "0")
    words = (str(ROOT / "arguments" / "w2_moe.sh"), "--profile", str(profile), *flags, "--offload-memory-budget", "18.9GiB")
    moved = []
    for host in ((), ("--host-in-time",)):
        code, out, _ = plan(capsys, *words, *host, "--json", str(tmp_path / "plan.json"))
        assert code == 0
        assert ("an optimizer, host that is in time;" in " ".join(out.split())) is bool(host)
        moved.append(sum(action.offloads for action in OffloadPlan.load(tmp_path / "plan.json").actions.values()))
    # Copies slow a late host, as the compared steps of that profile say.
    assert moved[0] < moved[1] / 2


def test_the_gate_of_the_model_may_be_another_than_the_measured_one(capsys, arguments, profile):
    """As that of gpt-oss, for which arguments/gpt_oss_120b.sh has --swiglu: fused, both save the same."""
    assert "--quick-geglu" not in FLAGS
    assert plan(capsys, arguments, "--profile", str(profile), *BUDGET, "--quick-geglu")[0] == 0


def test_what_decides_only_what_moves_may_differ_and_is_applied(arguments, profile):
    def build(*typed):
        model, parallelism = read_model_file(Path(arguments), typed=typed)
        assumptions = read_assumptions(FLAGS.split(), source="model.sh", typed=typed)
        training = PlannedTraining(
            source="model.sh", model=model, parallelism=parallelism, assumptions=assumptions, has_optimizer=None
        )
        (rank,) = build_profiled_ranks(Profile.load(profile), training, path=profile, reserve_bytes=7)
        return rank

    measured = Profile.load(profile).get_rank(0)
    as_measured = build()
    assert as_measured.static_bytes == measured.static_bytes + 7
    assert as_measured.min_offloaded_numel == measured.min_offloaded_numel
    other = build("--min-offloaded-tensor-size", "77", "--offload-window", "5MiB", "--offload-prefetch", "6MiB")
    assert other.min_offloaded_numel == 77
    assert (other.policy.window_bytes, other.policy.prefetch_bytes) == (5 * MIB, 6 * MIB)


def test_a_reserve_is_added_to_what_was_measured(capsys, arguments, profile):
    words = (arguments, "--profile", str(profile), "--offload-memory-budget", "16GiB")
    without, with_it = (plan(capsys, *words, *more)[1] for more in ((), ("--reserve", "3GiB")))
    assert find_peaks(with_it) == pytest.approx(find_peaks(without) + 3, abs=0.02)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--num-layers", "8", "--moe-layer-freq", "[0]+[1]*7"), "layers 4, and"),
        (("--moe-layer-freq", "[1]*4"), "as layer 0 one of kind dense, and"),
        (("--seq-length", "1024"), "seq_length 2048, and"),
        (("--hidden-size", "2048"), "hidden_size 1024, and"),
        (("--ffn-hidden-size", "4096"), "ffn_hidden_size 2048, and"),
        (("--moe-router-topk", "1"), "experts.topk 2, and"),
        (("--micro-batch-size", "2"), "micro_batch_size 1, and"),
        (("--tp", "8"), "tensor_parallel_size 1, and"),
        (("--pp", "2"), "pipeline_parallel_size 1, and"),
        (("--num-gpus", "2"), "data_parallel_size 1, and"),
        (("--grad-reduce-in-bf16",), "gradient_bytes 4, and"),
        (("--no-bias-dropout-fusion",), "has_fused_dropout_add True, and"),
        (("--no-bias-swiglu-fusion",), "has_fused_activation True (--bias-swiglu-fusion), and"),
        (("--no-optimizer",), "has_optimizer True (--with-optimizer), and"),
    ],
)
def test_another_training_is_refused_with_the_first_difference(capsys, arguments, profile, words, says):
    code, out, err = plan(capsys, arguments, "--profile", str(profile), *BUDGET, *words)
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("error: ") == 1


def test_the_fix_says_how_to_measure_this_one(capsys, tmp_path, profile):
    other = write_arguments(tmp_path / "other.sh", FLAGS.replace("--num-layers 4", "--num-layers 2").replace("[1]*3", "[1]*1"))
    _, _, err = plan(capsys, other, "--profile", str(profile), *BUDGET)
    assert f"is of measured.sh with layers 4, and {other} has 2." in err
    assert f"fgoffload profile {other} --json {profile}" in err


def test_a_profile_without_an_optimizer_says_so_and_is_not_planned_with_one(capsys, tmp_path, arguments):
    path = tmp_path / "profile.json"
    dataclasses.replace(make_profile(tmp_path / "model.sh"), has_optimizer=False).save(path)
    for words in ((), ("--no-optimizer",)):
        code, out, _ = plan(capsys, arguments, "--profile", str(path), *BUDGET, *words)
        assert code == 0
        assert "1 x A device, profiled without an optimizer" in out
    code, _, err = plan(capsys, arguments, "--profile", str(path), *BUDGET, "--with-optimizer")
    assert code == 2
    assert "has_optimizer False (--no-optimizer), and" in err


def test_ranks_are_compared_by_what_was_measured_on_each(capsys, tmp_path, arguments):
    path, words = tmp_path / "profile.json", ("--pp", "2", "--vp", "2")
    typed = ("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2", "--num-gpus", "2")
    whole = make_profile(tmp_path / "model.sh", typed=typed)
    whole.save(path)
    assert plan(capsys, arguments, "--profile", str(path), *BUDGET, *words)[0] == 0
    assert "virtual_pipeline_size 2, and" in plan(capsys, arguments, "--profile", str(path), *BUDGET, "--pp", "2")[2]
    dataclasses.replace(whole, ranks=whole.ranks[:1]).save(path)
    assert "pipeline ranks [0], and" in plan(capsys, arguments, "--profile", str(path), *BUDGET, *words)[2]


def test_files_that_say_too_little_are_refused_with_how_to_measure(capsys, tmp_path, arguments, profile):
    document = json.loads(profile.read_text(encoding="utf-8"))
    for change, says in (
        ({"format": 1}, "is a profile of format 1; this version reads format 3. Measure again."),
        ({"training": None}, "does not say which training was measured. Measure again: fgoffload profile"),
        (
            {"ranks": [], "training": None},
            "has the link alone, of 'A device', which is no device of the table: memory and rates are not in it. Give the "
            "device too, as in --gpu h100, or measure a model: fgoffload profile ARGUMENTS.sh.",
        ),
    ):
        path = tmp_path / "old.json"
        path.write_text(json.dumps(document | change), encoding="utf-8")
        code, _, err = plan(capsys, arguments, "--profile", str(path), *BUDGET)
        assert code == 2
        assert says in err


def write_link(path, *, device="CPU", rates=(25e9, 24e9, 12e9), small=1e9):
    """Write a profile of the link alone, as `fgoffload profile` without a file does: small copies, and large ones."""
    sizes = {2**16: (small,) * 3, 2**28: rates}
    copies = tuple(
        CopyRate(size_bytes=size, d2h_bytes_per_s=d2h, h2d_bytes_per_s=h2d, duplex_bytes_per_s=duplex)
        for size, (d2h, h2d, duplex) in sizes.items()
    )
    link = LinkProfile(copies=copies, compute_slowdown=0.002)
    Profile(device=device, versions={}, date="2026-11-22", link=link).save(path)
    return str(path)


def test_a_link_that_was_measured_takes_the_place_of_the_tables_and_of_nothing_else(capsys, tmp_path, arguments, monkeypatch):
    link, built = write_link(tmp_path / "link.json"), []
    show = plan_report.show_plan
    monkeypatch.setattr(plan_report, "show_plan", lambda *args, **options: built.append(args[1:3]) or show(*args, **options))
    words = (arguments, "--gpu", "h100", "--offload-memory-budget", "12GiB")
    (code, of_table, _), (also, of_link, _) = (plan(capsys, *words, *more) for more in ((), ("--profile", link)))
    assert (code, also) == (0, 0)
    (line,) = (line for line in of_link.splitlines() if line.startswith("Link: "))
    assert line == (
        f"Link: as {link} says, measured on CPU, 2026-11-22: 25.0 GB/s to the host, 24.0 to the device, 12.0 each way at once, "
        "62.9 us before each copy. All else is that of H100 80GB SXM."
    )
    assert "Link: " not in of_table
    for name in ("nothing", "full recompute"):  # nothing leaves, so that the link is not used
        assert find_row(of_link, name) == find_row(of_table, name)
    assert find_row(of_link, "offload everything") != find_row(of_table, "offload everything")
    ((_, table_ranks), (subject, ranks)) = built
    assert [dataclasses.replace(rank, link=table_ranks[0].link) for rank in ranks] == list(table_ranks)
    model = ranks[0].link
    assert (model.d2h_bytes_per_s, model.h2d_bytes_per_s, model.duplex_bytes_per_s) == (25e9, 24e9, 12e9)
    assert model.compute_slowdown == 0.002
    assert subject.hardware == dataclasses.replace(get_hardware("h100"), link=subject.hardware.link)
    assert subject.hardware.link == Link(d2h_bytes_per_s=25e9, h2d_bytes_per_s=24e9, duplex_bytes_per_s=12e9, is_measured=True)


def test_a_link_beside_a_config_json_is_planned_with(capsys, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG), encoding="utf-8")
    code, out, _ = plan(capsys, str(config), "--ep", "8", "--gpu", "h200", "--profile", write_link(tmp_path / "link.json"))
    assert code == 0
    assert "All else is that of H200 141GB SXM." in out


def test_a_link_of_a_device_of_the_table_needs_no_name_of_one(capsys, tmp_path, arguments):
    link = write_link(tmp_path / "link.json", device="NVIDIA H200", rates=(54e9, 53e9, 54e9))
    code, out, _ = plan(capsys, arguments, "--profile", link)
    assert code == 0
    assert "1 x H200 141GB SXM;" in out
    assert "measured on NVIDIA H200, 2026-11-22: 54.0 GB/s to the host" in out
    assert "All else is that of H200 141GB SXM." in out


def test_a_device_beside_the_profile_of_a_training_and_a_host_in_time_beside_a_link_are_refused(
    capsys, tmp_path, arguments, profile
):
    code, _, err = plan(capsys, arguments, "--gpu", "h100", "--profile", str(profile), *BUDGET)
    assert code == 2
    assert f"--gpu and --profile {profile}, which is of a training, both say what device it is. Give one of them." in err
    words = ("--gpu", "h100", "--profile", write_link(tmp_path / "link.json"), "--host-in-time")
    code, _, err = plan(capsys, arguments, *words, *BUDGET)
    assert code == 2
    assert "--host-in-time is what a device with a profile of the link alone is taken for anyway. Leave it out." in err


def test_a_profile_says_no_budget(capsys, arguments, profile):
    assert "--offload-memory-budget is missing" in plan(capsys, arguments, "--profile", str(profile))[2]


@pytest.mark.parametrize(("device", "gpus_per_node"), [("NVIDIA H200", 8), ("NVIDIA H100 80GB HBM3", 8), ("CPU", None)])
def test_the_node_of_a_profile_is_that_of_its_device_where_the_table_has_it(device, gpus_per_node):
    found = PlannedDevice(hardware=None, profile=types.SimpleNamespace(device=device)).find_node()
    assert (None if found is None else found.gpus_per_node) == gpus_per_node
    table = get_hardware("gb200")
    assert PlannedDevice(hardware=table, profile=None).find_node() is table
