"""`fgoffload plan`: the tables, the files, and one error for each bad input."""

import json
import re
import sys
from pathlib import Path

import pytest

from fgoffload.cli import main
from fgoffload.cli import plan as plan_command
from fgoffload.engine.host_memory import SHARE
from fgoffload.integrations.megatron import model_shapes
from fgoffload.integrations.megatron.model_config import read_facts
from fgoffload.plan import MICROBATCHES, TOKENS, Action, OffloadPlan
from fgoffload.planner import planning
from fgoffload.planner.solving.search_limits import THOROUGH, SearchLimits
from fgoffload.planner.timing.hardware import HARDWARE
from fgoffload.policy import HOST_SHARE
from fgoffload.units import TIB, format_bytes

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "planner" / "accuracy.md"
LLAMA = str(ROOT / "arguments" / "llama3_8b.sh")
MIXTRAL = str(ROOT / "arguments" / "mixtral_8x7b.sh")
MOE = ["--num-layers", "4"]
CONFIG = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    return str(path)


def plan(capsys, *words):
    """Return the exit code, and what was printed on either stream."""
    code = main(["plan", *words])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def find_row(text, name):
    """Return the cells of the row of a table that begins with `name`."""
    row = next(line for line in text.splitlines() if line.startswith(f"│ {name} "))
    return [cell.strip() for cell in row.strip("│").split("│")]


def test_the_help_says_that_experts_are_shared_as_other_layers_are(capsys):
    with pytest.raises(SystemExit):
        plan(capsys, "--help")
    assert "--expert-tensor-parallel-size (default: as --tp, as in Megatron)" in " ".join(capsys.readouterr().out.split())


def test_a_config_json_is_planned_within_the_budget(capsys, config, tmp_path):
    path = tmp_path / "plan.json"
    words = ("--gpu", "h100", "--pp", "2", "--ep", "8", "--num-gpus", "16", "--global-batch-size", "64")
    code, out, _ = plan(capsys, config, *words, "--offload-memory-budget", "15GiB", "--json", str(path))
    assert code == 0
    nothing, chosen = find_row(out, "nothing"), find_row(out, "this plan")
    assert (nothing[-1], chosen[-1]) == ("no", "yes")
    assert float(chosen[1].split()[0]) <= 15 < float(nothing[1].split()[0])
    assert f"--offload-plan {path}" in out.replace("\n", "")
    written = OffloadPlan.load(path)
    assert set(written.actions.values()) - {Action.KEEP}
    assert written.made_for == {
        "num_layers": CONFIG["num_hidden_layers"],
        "hidden_size": CONFIG["hidden_size"],
        "num_attention_heads": CONFIG["num_attention_heads"],
        "num_moe_experts": CONFIG["num_local_experts"],
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 8,
        "expert_tensor_parallel_size": 1,
        "num_query_groups": CONFIG["num_key_value_heads"],
        "kv_channels": CONFIG["hidden_size"] // CONFIG["num_attention_heads"],
        "moe_router_topk": CONFIG["num_experts_per_tok"],
        "moe_ffn_hidden_size": CONFIG["intermediate_size"],
        "moe_shared_expert_intermediate_size": 0,
        "mtp_num_layers": 0,
        "normalization": "RMSNorm",
        "gated_linear_unit": 1,
        "qk_layernorm": 0,
        "overlap_moe_expert_parallel_comm": 0,
        "params_dtype_bytes": 2,
        "fp8_recipe": "none",
        "tokens": 4096,
    }
    # What a training does not look at would be taken for equal.
    assert set(written.made_for) <= {*read_facts(None), TOKENS, MICROBATCHES}


def test_a_budget_that_holds_everything_keeps_everything(capsys, config):
    code, out, _ = plan(capsys, config, "--gpu", "h200", "--ep", "8", "--offload-memory-budget", "100GiB")
    assert code == 0
    assert "Everything is kept" in out
    assert find_row(out, "this plan")[4] == "1.000"
    assert "Megatron's own flags: none are needed." in out


def test_the_measured_table_of_the_page_can_be_planned_again(capsys):
    """docs/planner/accuracy.md: what `fgoffload bench` measured, without an optimizer and with gradients in bf16."""
    (command,) = re.findall(r"^fgoffload plan (arguments/w2_moe.sh .*\\\n.*)$", PAGE.read_text(encoding="utf-8"), flags=re.M)
    words = command.replace("\\\n", " ").split()
    code, out, _ = plan(capsys, str(ROOT / words[0]), *words[1:])
    assert code == 0
    assert find_row(out, "nothing")[1:4] == ["20.11 GiB", "0", "528.4 ms"]
    assert [find_row(out, "full recompute")[place] for place in (1, 4)] == ["14.19 GiB", "1.314"]
    assert [find_row(out, "selective recompute")[place] for place in (1, 4)] == ["18.98 GiB", "1.012"]
    assert find_row(out, "this plan")[-1] == "yes"


@pytest.mark.parametrize("is_typed", [True, False], ids=["typed", "in the file"])
def test_activations_that_are_not_fused_take_more_memory_and_time(capsys, tmp_path, is_typed):
    """docs/planner/accuracy.md: three tensors of 128 MiB in each of six layers, which a recompute of the activation drops."""
    flag, path = "--no-bias-swiglu-fusion", tmp_path / "unfused.sh"
    text = (ROOT / "arguments" / "w2_moe.sh").read_text(encoding="utf-8")
    path.write_text(text if is_typed else text.replace("--swiglu\n", f"--swiglu\n    {flag}\n"), encoding="utf-8")
    words = ("--gpu", "h100", "--no-optimizer", "--grad-reduce-in-bf16", "--reserve", "0", "--offload-memory-budget", "30GiB")
    words += ("--moe-router-force-load-balancing", "--no-bias-dropout-fusion", "--no-gradient-accumulation-fusion")
    code, out, err = plan(capsys, str(path), *words, *([flag] if is_typed else []))
    assert (code, err) == (0, "")
    assert find_row(out, "nothing")[1:4] == ["22.33 GiB", "0", "585.9 ms"]
    assert [find_row(out, "full recompute")[place] for place in (1, 3)] == ["14.55 GiB", "771.8 ms"]
    assert [find_row(out, "selective recompute")[place] for place in (1, 3)] == ["18.96 GiB", "607.7 ms"]
    fused = plan(capsys, str(path), *words, "--bias-swiglu-fusion")[1]
    assert find_row(fused, "nothing")[1] == "20.08 GiB"
    assert find_row(fused, "selective recompute")[1] == "18.96 GiB"
    assert float(find_row(fused, "nothing")[3].split()[0]) < 585


def test_what_is_smaller_than_the_least_size_is_planned_to_stay(capsys, config):
    words = (config, "--gpu", "h200", "--ep", "8", "--global-batch-size", "32", "--offload-memory-budget", "100GiB")
    moved = find_row(plan(capsys, *words)[1], "offload everything")
    staying = find_row(plan(capsys, *words, "--min-offloaded-tensor-size", "99999999999")[1], "offload everything")
    assert (moved[5] == "-", staying[5]) == (False, "-")


def test_gradients_and_states_are_as_large_as_flags_say(capsys, config):
    words = (config, "--gpu", "h200", "--ep", "8", "--global-batch-size", "32", "--offload-memory-budget", "130GiB")
    aware = ("--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16")
    peaks = [
        float(find_row(plan(capsys, *words, *flags)[1], "nothing")[1].split()[0])
        for flags in ((), ("--grad-reduce-in-bf16",), aware, ("--no-optimizer",))
    ]
    assert peaks[0] > max(peaks[1:])
    assert len(set(peaks)) == 4


def test_where_no_budget_of_the_device_is_enough_no_larger_one_is_proposed_and_else_one_that_is_taken(capsys, config):
    words = (config, "--gpu", "h100", "--num-gpus", "1", "--global-batch-size", "4")
    code, _, error = plan(capsys, *words)
    assert code == 2
    assert "H100 80GB SXM has 80.00 GiB in all: spread the model over more ranks, or name a larger device." in error
    assert "Give a budget of" not in error
    words = (config, "--gpu", "h100", "--num-gpus", "16", "--pp", "2", "--ep", "8", "--global-batch-size", "64")
    code, _, error = plan(capsys, *words, "--offload-memory-budget", "10GiB")
    least = re.search(r"Give a budget of (\d+MiB) or more", error).group(1)
    assert code == 2
    assert plan(capsys, *words, "--offload-memory-budget", least)[0] == 0


def test_static_memory_above_the_device_is_found_without_a_search(capsys, config, monkeypatch):
    words = (config, "--gpu", "h100", "--num-gpus", "1", "--global-batch-size", "4")

    def refuse(*_, **__):
        pytest.fail("it searched")

    for search in ("plan_ranks", "find_least_budget"):
        monkeypatch.setattr(f"fgoffload.cli.plan_report.{search}", refuse)
    for more, budget in (((), 80), (("--offload-memory-budget", "60GiB"), 60), (("--sweep",), 80)):
        code, out, error = plan(capsys, *words, *more)
        assert (code, out, error.count("\n")) == (2, "", 1)
        assert f"A memory budget of {budget}.00 GiB is not above the static memory of pipeline" in error
        assert "H100 80GB SXM has 80.00 GiB in all: spread the model over more ranks, or name a larger device." in error


def test_a_reserve_that_leaves_no_room_is_named_among_the_fixes(capsys, config):
    words = (config, "--gpu", "h100", "--num-gpus", "16", "--pp", "2", "--ep", "8", "--global-batch-size", "64")
    code, _, error = plan(capsys, *words, "--reserve", "76GiB")
    assert code == 2
    assert "lower --reserve 76.00 GiB, spread the model over more ranks, or name a larger device." in error


def test_an_error_is_one_line_where_defaults_would_be_warned_of(capsys, config):
    code, _, error = plan(capsys, config, "--gpu", "h100", "--pp", "2", "--ep", "8", "--offload-memory-budget", "1GiB")
    assert code == 2
    assert error.startswith("fgoffload: error: A memory budget of 1.00 GiB")
    assert error.count("\n") == 1


def test_a_config_json_is_planned_with_a_pipeline_that_is_full_and_that_is_said(capsys, config):
    words = ("--gpu", "h100", "--pp", "2", "--tp", "2", "--ep", "4", "--offload-memory-budget", "60GiB")
    code, out, err = plan(capsys, config, *words)
    assert code == 0
    assert "8 microbatches of 1 x 4096" in out
    first, second = err.splitlines()
    assert first.startswith(f"fgoffload: warning: {config}: --sequence-parallel is taken, ")
    assert second.startswith(f"fgoffload: warning: {config}: without --global-batch-size a step is taken as 8 microbatches, ")


def test_a_device_without_public_figures_is_planned_with_a_file_that_has_them(capsys, config, tmp_path):
    path = tmp_path / "mine.json"
    link = {"d2h_bytes_per_s": 25e9, "h2d_bytes_per_s": 25e9}
    path.write_text(json.dumps({"base": "ascend-910b", "device_memory_bytes_per_s": 1e12, "link": link}), encoding="utf-8")
    code, out, err = plan(capsys, config, "--hardware", str(path), "--ep", "8", "--offload-memory-budget", "60GiB")
    assert code == 0
    assert "Ascend 910B" in out
    assert "no nvlink_bytes_per_s (25 GB/s, as over PCIe, is taken)" in err


def test_an_empty_plan_is_written_and_not_recommended(capsys, config, tmp_path):
    path = tmp_path / "plan.json"
    words = ("--gpu", "h200", "--ep", "8", "--offload-memory-budget", "100GiB", "--json", str(path))
    _, out, _ = plan(capsys, config, *words)
    assert f"The plan in {path} has no rows: a training that keeps everything needs neither it nor a flag" in out
    assert "--offload-plan" not in out
    assert not OffloadPlan.load(path).actions


def test_one_line_says_what_the_budget_comprises_and_what_to_give_at_run_time(capsys, config):
    words = ("--gpu", "h200", "--ep", "8", "--offload-memory-budget", "100GiB")
    _, out, _ = plan(capsys, config, *words, "--reserve", "3.5GiB")
    (line,) = (line for line in out.splitlines() if line.startswith("The budget comprises"))
    assert line == (
        "The budget comprises 3.50 GiB of reserve (contexts, communication, fragments) and 96.50 GiB that the allocator hands "
        "out; at run time give --offload-modules auto --offload-memory-budget 98816MiB. Host budget: 153.60 GiB a rank, 60% of "
        "the 2.00 TiB of a node over 8 ranks; a training takes that part of what is free then."
    )
    _, out, _ = plan(capsys, config, *words, "--offload-host-budget", "256GiB")
    assert "that the allocator hands out; at run time give --offload-modules auto --offload-memory-budget 96GiB. Host" in out
    assert "Host budget: 256.00 GiB a rank, as given." in out
    _, out, _ = plan(capsys, config, *words, "--offload-host-budget", "257GiB")
    assert "257.00 GiB a rank, as given, which is more than the 2.00 TiB of a node for all 8 of them." in out


def test_the_run_time_budget_is_what_the_plan_leaves_to_activations_and_static_memory(capsys, config):
    # A reserve that goes from the budget too leaves the same plan.
    words = ("--gpu", "h100", "--ep", "8", "--num-gpus", "8", "--global-batch-size", "16")
    _, with_it, _ = plan(capsys, config, *words, "--offload-memory-budget", "28GiB")
    _, without, _ = plan(capsys, config, *words, "--offload-memory-budget", "24GiB", "--reserve", "0")
    assert "auto --offload-memory-budget 24GiB. Host" in with_it
    assert "auto --offload-memory-budget 24GiB. Host" in without
    assert find_row(with_it, "this plan")[3:5] == find_row(without, "this plan")[3:5]


def test_the_default_host_budget_is_the_engines(capsys, config):
    _, out, _ = plan(capsys, config, "--gpu", "h200", "--num-gpus", "1", "--offload-memory-budget", "100GiB", "--no-optimizer")
    assert SHARE == HOST_SHARE
    assert f"Host budget: {format_bytes(int(2 * TIB * SHARE))} a rank, 60% of the 2.00 TiB of a node over 1 rank;" in out
    _, out, _ = plan(capsys, config, "--gpu", "mi300x", "--ep", "8", "--offload-memory-budget", "100GiB")
    assert "Host budget: no limit, since what a node has is not known; --offload-host-budget SIZE gives one." in out


def test_the_fullest_node_has_no_more_ranks_than_there_are(capsys, config):
    words = ("--gpu", "h100", "--no-optimizer", "--offload-memory-budget", "79GiB")
    row = find_row(plan(capsys, config, *words, "--num-gpus", "1")[1], "offload everything")
    assert row[5] == row[6] != "-"
    row = find_row(
        plan(capsys, config, *words, "--pp", "2", "--num-gpus", "2", "--global-batch-size", "4")[1], "offload everything"
    )
    fullest, node = (float(cell.split()[0]) for cell in row[5:7])
    assert fullest < node < 2 * fullest


def test_flags_after_the_file_win(capsys):
    words = (LLAMA, "--gpu", "h200", "--offload-memory-budget", "130GiB")
    (short, long) = (plan(capsys, *words, "--seq-length", length)[1] for length in ("4096", "8192"))
    assert "x 4096" in short
    assert "x 8192" in long
    assert float(find_row(short, "nothing")[1].split()[0]) < float(find_row(long, "nothing")[1].split()[0])


def test_a_late_host_is_planned_for_with_fewer_copies_and_named(capsys, config, tmp_path):
    path, moved = tmp_path / "plan.json", []
    sizes = ("--ep", "8", "--num-gpus", "8", "--global-batch-size", "8", "--offload-memory-budget", "24GiB")
    for words in ((), ("--late-host",)):
        code, out, _ = plan(capsys, config, "--gpu", "h100", *sizes, "--json", str(path), *words)
        assert code == 0
        assert ("SXM, late host;" in out) == bool(words)
        moved.append(OffloadPlan.load(path).offloaded_tags)
    # What leaves for a host that is in time runs again for a late one.
    assert moved[0]
    assert not moved[1]


@pytest.mark.parametrize(("words", "is_late"), [(("--late-host",), True), ((), False)])
def test_one_stage_alone_shows_what_waits_for_a_late_host_too(capsys, words, is_late):
    sizes = ("--no-optimizer", "--grad-reduce-in-bf16", "--reserve", "0", "--offload-memory-budget", "16.5GiB")
    code, out, _ = plan(capsys, str(ROOT / "arguments" / "w2_moe.sh"), "--gpu", "h100", *sizes, *words)
    assert code == 0
    (rank,) = [line for line in out.partition("This plan by pipeline rank")[2].splitlines() if line.startswith("│    0 ")]
    late = rank.strip("│").split("│")[5]
    assert (float(late.removesuffix(" ms ")) > 0) == is_late


def test_thorough_looks_longer(capsys, config, monkeypatch):
    limits = []
    solve = planning.solve
    monkeypatch.setattr(planning, "solve", lambda *args, **options: limits.append(options["limits"]) or solve(*args, **options))
    for words in ((), ("--thorough",)):
        sizes = ("--ep", "8", "--num-gpus", "8", "--global-batch-size", "8")
        code, _, _ = plan(capsys, config, "--gpu", "h100", "--offload-memory-budget", "70GiB", *sizes, *words)
        assert code == 0
    assert limits == [None, THOROUGH]
    assert THOROUGH.simulations > SearchLimits().simulations


def test_a_sweep_shows_the_frontier_and_writes_its_picture(capsys, config, tmp_path, monkeypatch):
    monkeypatch.setattr(plan_command, "SWEEP_POINTS", 5)
    path = tmp_path / "frontier.png"
    words = ("--gpu", "h100", "--ep", "8", "--num-gpus", "8", "--global-batch-size", "32")
    code, out, _ = plan(capsys, config, *words, "--sweep", "--plot", str(path))
    assert code == 0
    rows = [line.split("│") for line in out.splitlines() if line.startswith("│ plan ")]
    steps = [float(row[5]) for row in rows]
    assert len(steps) >= 5
    assert steps == sorted(steps)
    # What a plan is compared with stands beside one for as much memory, which is no slower.
    budgets = {row[2].strip(): float(row[5]) for row in rows}
    compared = [line.split("│") for line in out.splitlines() if re.match("│ (full|selective) recompute ", line)]
    assert len(compared) == 2
    assert all(budgets[row[3].strip()] <= float(row[5]) for row in compared)
    assert f"Frontier: {path}\n" in out
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_sweep_writes_its_picture_unasked_and_does_without_where_none_can_be_drawn(capsys, config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan_command, "SWEEP_POINTS", 2)
    words = (config, "--gpu", "h100", "--ep", "8", "--num-gpus", "8", "--global-batch-size", "8", "--sweep")
    code, out, err = plan(capsys, *words)
    assert (code, err.count("Install matplotlib")) == (0, 0)
    assert "Frontier: frontier.png\n" in out
    assert Path("frontier.png").read_bytes().startswith(b"\x89PNG")
    Path("frontier.png").unlink()
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    code, out, err = plan(capsys, *words)
    assert code == 0
    assert "│ plan " in out
    assert "Frontier" not in out
    assert "warning: there is no frontier.png: " in err
    assert "Install matplotlib." in err
    assert not Path("frontier.png").exists()


def test_the_lanes_and_the_memory_are_written(capsys, config, tmp_path):
    trace, picture = tmp_path / "trace.json", tmp_path / "plan.png"
    words = ("--gpu", "h100", "--ep", "8", "--num-gpus", "8", "--global-batch-size", "16", "--offload-memory-budget", "24GiB")
    code, _, _ = plan(capsys, config, *words, "--timeline", str(trace), "--plot", str(picture))
    assert code == 0
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "MODEL is missing"),
        ((LLAMA, "--json"), "--json expected one argument. Give it after the flag, as in --json plan.json."),
        (
            (LLAMA, "--gpu", "h100", "--pp", "2", "--num-gpus", "8", "--decoder-first-pipeline-num-layers", "99"),
            "--decoder-first-pipeline-num-layers 99 is above --num-layers 32 of llama3_8b. Give 31 or less",
        ),
        (("no_such.sh", "--gpu", "h100"), "'no_such.sh' does not exist"),
        ((LLAMA,), "--gpu is missing"),
        ((LLAMA, "--gpu", "h1000"), "--gpu 'h1000' is not known. Did you mean 'h100'? Give one of: a100,"),
        (("a" * 5000, "--gpu", "h100"), "does not exist. Give a file"),
        ((LLAMA, "--gpu", "h100", "--json", "x.svg", "--plot", "./x.svg"), "--json and --plot both name 'x.svg'."),
        ((LLAMA, "--gpu", "h100", "--global-batch-size", "400000000"), "--global-batch-size 400000000 is above 100000000"),
        ((LLAMA, "--gpu", "h100", "--num-layers", "10000"), "--num-layers 10000 is above 1000"),
        ((LLAMA, "--gpu", "h100", "--kv-channels", "100"), "kv_channels 100 of llama3_8b is not a multiple of 8"),
        ((LLAMA, "--gpu", "h100", "--kv-channels", "100"), "Measure it: give an argument file and --profile FILE"),
        ((LLAMA, "--gpu", "910b"), "--gpu '910b' is not known. Did you mean 'ascend-910b'?"),
        ((MIXTRAL, "--gpu", "h100", "--moe-router-topk", "99"), "--moe-router-topk 99 is above --num-experts 8. Give 8 or"),
        (
            (LLAMA, "--gpu", "h100", "--pp", "3"),
            "NUM_GPUS 8 is not a multiple of 6, which a copy of the model needs (tensor x pipeline x context parallel size).",
        ),
        (
            (LLAMA, "--gpu", "h100", "--global-batch-size", "40000", "--timeline", "trace.json"),
            "--timeline would draw 640000 layers of a step, forward and backward, above 200000.",
        ),
        ((LLAMA, "--gpu", "h100", "--hardware", "mine.json"), "--gpu and --hardware both say"),
        ((LLAMA, "--gpu", "h100", "--late-host", "--host-in-time"), "--late-host and --host-in-time exclude each other."),
        ((LLAMA, "--gpu", "h100", "--host-in-time"), "Leave it out, or give --profile FILE."),
        ((LLAMA, "--gpu", "h100", "--offload-memory-budget", "70PB"), "--offload-memory-budget '70PB' is not a size"),
        ((LLAMA, "--gpu", "h100", "--offload-memory-budget=-1GiB"), "below 0"),
        ((LLAMA, "--gpu", "h100", "--offload-memory-budget", "1GiB"), "static memory of pipeline rank 0"),
        ((LLAMA, "--gpu", "h100", "--pp", "3", "--num-gpus", "6"), "--num-layers 32"),
        ((LLAMA, "--gpu", "h100", "--tp", "0"), "--tp 0 is below 1"),
        ((LLAMA, "--gpu", "h100", "--no-such-flag"), "--no-such-flag"),
        ((LLAMA, "--gpu", "h100", "--offload-memory-bugdet", "60GiB"), "Did you mean --offload-memory-budget?"),
        ((LLAMA, "--gpu", "h100", "--hardwear", "x.json"), "Did you mean --hardware?"),
        ((LLAMA, "--gpu", "h100", "--exp-avg-dtype", "bf16"), "needs --use-precision-aware-optimizer"),
        ((LLAMA, "--gpu", "ascend-910b"), "Ascend 910B"),
        ((LLAMA, "--gpu", "h1000"), "or a file of your own: --hardware FILE."),
        # NUM_GPUS is no multiple either, and no other one would do.
        (
            (LLAMA, "--gpu", "h100", "--tp", "3"),
            "--tensor-model-parallel-size 3 does not divide --num-query-groups 8 of llama3_8b. Give a size that does.",
        ),
        ((MIXTRAL, "--gpu", "h100", "--ep", "3"), "--expert-model-parallel-size 3 does not divide num_experts 8 of"),
        ((MIXTRAL, "--gpu", "h100", "--etp", "3"), "--expert-tensor-parallel-size 3 does not divide the 14336 channels"),
        ((LLAMA, "--gpu", "h100", "--reserve", "1"), "--reserve '1' has no unit"),
        ((LLAMA, "--gpu", "h100", "--offload-host-budget", "1"), "--offload-host-budget '1' has no unit"),
        ((LLAMA, "--gpu", "h100", "--offload-memory-budget", "76"), "as in 76GiB"),
        (
            (LLAMA, "--gpu", "h100", "--offload-memory-budget", "81GiB"),
            "--offload-memory-budget 81.00 GiB is more than the memory of H100 80GB SXM, 80.00 GiB. Give that or less",
        ),
        ((LLAMA, "--gpu", "h100", "--offload-memory-budget", "-76GiB"), "--offload-memory-budget '-76GiB' is below 0"),
        ((LLAMA, "--gpu", "h100", "--reserve", "-.5GiB"), "--reserve '-.5GiB' is not a size"),
        ((LLAMA, "--gpu", "h100", "--sweep", "--json", "plan.json"), "--sweep plans for many budgets, and --json is about"),
        ((LLAMA, "--gpu", "h100", "--sweep", "--timeline", "trace.json"), "--timeline is about one plan"),
        ((LLAMA, "--gpu", "h100", "--sweep", "--thorough"), "--thorough is about one plan"),
        ((LLAMA, "--gpu", "h100", "--sweep", "--offload-memory-budget", "70GiB"), "--offload-memory-budget is about one plan"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, words, says):
    code, out, err = plan(capsys, *words)
    assert code == 2
    assert out == ""
    assert err.startswith("fgoffload: error: ")
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("--gpu", "h100", "--json", "./model.sh"),
            "--json './model.sh' is the model, and would be written over. Give another",
        ),
        (("--gpu", "h100", "--plot", "model.sh"), "--plot 'model.sh' is the model"),
        (("--profile", "p.json", "--json", "p.json"), "--json 'p.json' is the file of --profile"),
        (("--hardware", "h.json", "--timeline", "h.json"), "--timeline 'h.json' is the file of --hardware"),
    ],
)
def test_a_file_that_is_read_is_not_written_over(capsys, monkeypatch, tmp_path, words, says):
    monkeypatch.chdir(tmp_path)
    texts = {"model.sh": Path(LLAMA).read_text(encoding="utf-8"), "p.json": "{}", "h.json": '{"base": "h100"}'}
    for name, text in texts.items():
        Path(name).write_text(text, encoding="utf-8")
    code, out, err = plan(capsys, "model.sh", *words)
    assert (code, out) == (2, "")
    assert says in err
    assert {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()} == texts


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--gpu", "h1000"), "--gpu 'h1000' is not known."),
        (("--gpu", "h100", "--offload-memory-budget", "81GiB"), "--offload-memory-budget 81.00 GiB is more than"),
        (("--gpu", "h100", "--tp", "3"), "--tensor-model-parallel-size 3 does not divide num_key_value_heads 8 of"),
        (("--gpu", "h100", "--tp", "16"), "--tensor-model-parallel-size 16 is more than the 8 num_key_value_heads of"),
        (("--gpu", "h100", "--ep", "4", "--etp", "3"), "--expert-tensor-parallel-size 3 does not divide the 14336 channels"),
    ],
)
def test_what_a_config_leaves_out_is_not_warned_of_before_an_error(capsys, config, words, says):
    code, out, err = plan(capsys, config, *words)
    assert (code, out) == (2, "")
    assert err.startswith("fgoffload: error: ")
    assert says in err
    assert err.count("\n") == 1


def test_an_argument_file_may_begin_with_a_byte_order_mark_and_one_of_bytes_is_one_short_line(capsys, tmp_path):
    path = tmp_path / "mine.sh"
    path.write_text(Path(LLAMA).read_text(encoding="utf-8"), encoding="utf-8-sig")
    code, _, err = plan(capsys, str(path), "--gpu", "h1000")
    assert (code, "--gpu" in err) == (2, True)
    words = ("--gpu", "h200", "--offload-memory-budget", "130GiB", "--global-batch-size", "4")
    assert plan(capsys, str(path), *words)[0] == 0
    path.write_bytes(bytes(3000))
    code, _, err = plan(capsys, str(path), *words)
    assert (code, err.count("\n")) == (2, 1)
    assert len(err) < 500


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--json", "none/plan.json"), "--json 'none/plan.json' is in 'none', which does not exist."),
        (("--timeline", "."), "--timeline '.' is a folder."),
        (("--json", ""), "--json '' names no file."),
        (("--plot", "file/plan.png"), "--plot 'file/plan.png' is in 'file', which is no folder."),
        (("--plot", "plan.bmpx"), "--plot plan.bmpx is of no format that there is: "),
        (("--sweep", "--plot", "none/plan.png"), "--plot 'none/plan.png' is in 'none', which does not exist."),
    ],
)
def test_files_that_cannot_be_written_are_refused_before_the_plan_is_made(capsys, tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr(model_shapes, "read_model_file", fail)
    code, out, err = plan(capsys, LLAMA, "--gpu", "h100", *words)
    assert (code, out) == (2, "")
    assert says in err


def fail(*_, **__):
    raise AssertionError("work began")


def test_one_microbatch_is_one(capsys, config):
    words = ("--gpu", "h200", "--ep", "8", "--offload-memory-budget", "100GiB")
    assert "; 1 microbatch of 1 x " in plan(capsys, config, *words, "--global-batch-size", "8")[1]
    assert "; 2 microbatches of 1 x " in plan(capsys, config, *words, "--global-batch-size", "16")[1]


def test_an_unknown_kind_of_config_is_refused_with_the_known_ones(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | {"model_type": "bert"}), encoding="utf-8")
    code, _, err = plan(capsys, str(path), "--gpu", "h100")
    assert code == 2
    assert "'bert'" in err
    assert "mixtral" in err


def test_the_help_names_every_device_of_the_table(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    shown = "".join(capsys.readouterr().out.split())
    assert [key for key in HARDWARE if key not in shown] == []


def test_the_folder_of_a_config_is_taken_for_it(capsys, config):
    words = ("--gpu", "h200", "--ep", "8", "--offload-memory-budget", "100GiB")
    assert plan(capsys, str(Path(config).parent), *words) == plan(capsys, config, *words)
