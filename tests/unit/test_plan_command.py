"""Tests `fgoffload plan`: tables, files and errors."""

import json
import re
import time
from pathlib import Path

import pytest

from fgoffload.cli import console, main, plan_report
from fgoffload.cli import plan as plan_command
from fgoffload.config import OffloadConfig
from fgoffload.integrations.megatron.adapter.model_config import read_facts
from fgoffload.integrations.megatron.flags import model_shapes
from fgoffload.integrations.megatron.graphs import graph_checks
from fgoffload.plan import MICROBATCHES, TOKENS, Action, OffloadPlan
from fgoffload.planner.timing.hardware import HARDWARE

ROOT = Path(__file__).parents[2]
LLAMA = str(ROOT / "arguments" / "llama3_8b.sh")
MIXTRAL = str(ROOT / "arguments" / "mixtral_8x7b.sh")
CONFIG = json.loads("""{
  "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4,
  "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "hidden_act":
  "silu", "tie_word_embeddings": false
}""")


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path)


def write_config(folder, **changes):
    """Write `CONFIG` with `changes` and return the path."""
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIG | changes), encoding="utf-8")
    return str(path)


def plan(capsys, *words):
    """Run `fgoffload plan` and return its exit code, stdout and stderr."""
    code = main(["plan", *words])
    shown = capsys.readouterr()
    assert ("~:" in shown.out) == bool(re.search(r"│ +~\d", shown.out))  # the footnote appears only with a mark in the table
    return code, shown.out, shown.err


def find_row(text, name):
    """Return the cells of the table row that begins with `name`."""
    row = next(line for line in text.splitlines() if line.startswith(f"│ {name} "))
    return [cell.strip() for cell in row.strip("│").split("│")]


def test_plan_from_config_json_fits_the_budget(capsys, config, tmp_path):
    path = tmp_path / "plan.json"
    words = ("--gpu", "h100", "--pp", "2", "--ep", "8", "--num-gpus", "16", "--global-batch-size", "64")
    code, out, err = plan(capsys, config, *words, "--offload-memory-budget", "15GiB", "--json", str(path), "--offload-modules")
    assert code == 0
    baseline, chosen = find_row(out, "baseline"), find_row(out, "this plan")
    assert (baseline[-1], chosen[-1]) == ("no", "yes")
    assert float(chosen[1].split()[0]) <= 15 < float(baseline[1].split()[0])
    assert str(path) in out
    assert re.search(r"(Recommended:|Or) Megatron's own flags, .* the plan, peak 1.\... GiB:", out)
    assert "the planner chooses what to offload and recompute, so it ignores --offload-modules." in err
    assert max(map(len, out.splitlines())) <= 80 + len(str(path))
    predicted = json.loads(path.read_text(encoding="utf-8"))["predicted"]
    assert f"{predicted['settings']['this plan']['peak_bytes'] / 2**30:.2f} GiB" == chosen[1]
    assert len(predicted["ranks"]) == 2
    assert {one["rank"] for one in predicted["decisions"]} == {0, 1}
    written = OffloadPlan.load(path)
    assert set(written.actions.values()) - {Action.KEEP}
    expected = {"num_layers": 4, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 8, "tokens": 4096}
    assert written.made_for.items() >= expected.items()
    # Training compares only these facts, so it would ignore any other.
    assert set(written.made_for) <= {*read_facts(None), TOKENS, MICROBATCHES}


def test_without_a_feasible_plan_memory_per_rank_and_feasible_layouts_are_shown(capsys, tmp_path):
    config = write_config(tmp_path, num_hidden_layers=30)
    code, out, err = plan(capsys, config, "--gpu", "l40s")
    assert (code, find_row(out, "   0")[-1]) == (2, "48.00 GiB")
    assert "does not set the number of GPUs, so 1 is assumed. For more, pass --num-gpus, --tp, --pp and --ep.\n" in err
    layouts = re.findall(r"^Would fit: (.*)$", out, re.MULTILINE)
    assert len(layouts) == 2
    for layout in layouts:  # each has a plan
        code, _, err = plan(capsys, config, "--gpu", "l40s", *layout.split())
        assert code == 0
        assert "1 is assumed" not in err


def test_the_budget_suggested_by_an_error_has_a_plan(capsys, tmp_path):
    config = write_config(tmp_path, num_hidden_layers=2)
    words = (config, "--gpu", "h100", "--num-gpus", "16", "--pp", "2", "--ep", "8", "--global-batch-size", "32")
    code, _, error = plan(capsys, *words, "--offload-memory-budget", "6GiB")
    least = re.search(r"Use a budget of ([\d.]+GiB) or more", error).group(1)
    assert code == 2
    assert plan(capsys, *words, "--offload-memory-budget", least)[0] == 0


def test_a_hardware_file_supplies_missing_rates(capsys, config, tmp_path):
    path = tmp_path / "mine.json"
    link = {"d2h_bytes_per_s": 25e9, "h2d_bytes_per_s": 25e9}
    path.write_text(json.dumps({"base": "ascend-910b", "device_memory_bytes_per_s": 1e12, "link": link}), encoding="utf-8")
    code, out, err = plan(capsys, config, "--hardware", str(path), "--ep", "8", "--offload-memory-budget", "60GiB")
    assert code == 0
    assert "Ascend 910B" in out
    assert "no nvlink_bytes_per_s (assuming 25 GB/s, as over PCIe)" in err


def test_a_sweep_prints_and_plots_the_frontier(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(plan_command, "SWEEP_POINTS", 2)
    picture = tmp_path / "frontier.png"
    config = write_config(tmp_path, model_type="llama", num_hidden_layers=1)
    words = ("--gpu", "h100", "--num-gpus", "8", "--global-batch-size", "16")
    numbers = tmp_path / "sweep.json"
    code, out, _ = plan(capsys, config, *words, "--sweep", "--plot", str(picture), "--json", str(numbers))
    assert code == 0
    steps = [float(line.split("│")[5].strip(" ~")) for line in out.splitlines() if line.startswith("│ plan ")]
    assert len(steps) >= 2
    assert steps == sorted(steps)
    written = json.loads(numbers.read_text(encoding="utf-8"))["plans"]
    assert len(written) == len(steps)
    assert written[0].keys() >= {"budget_bytes", "peak_bytes", "step_s", "offloaded_bytes", "recompute_s", "copy_waits_s"}
    assert f"Plot: {picture}\n" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_long_search_prints_a_progress_line(capfd, config, monkeypatch):
    def plan_slowly(*args, real=plan_report.plan_ranks, **options):
        time.sleep(0.05)
        return real(*args, **options)

    monkeypatch.setattr(plan_report, "plan_ranks", plan_slowly)
    monkeypatch.setattr(console, "PATIENCE_S", 0.01)
    code, out, err = plan(capfd, config, "--gpu", "h100", "--ep", "8", "--num-gpus", "8", "--global-batch-size", "16")
    assert (code, "planning" in out, "fgoffload: planning ...\n" in err) == (0, False, True)


def test_timeline_and_plot_are_written(capsys, config, tmp_path):
    trace, picture = tmp_path / "trace.json", tmp_path / "plan.png"
    words = ("--gpu", "h100", "--ep", "8", "--num-gpus", "8", "--global-batch-size", "16", "--offload-memory-budget", "24GiB")
    code, _, _ = plan(capsys, config, *words, "--timeline", str(trace), "--plot", str(picture))
    assert code == 0
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "MODEL is missing"),
        (("no_such.sh", "--gpu", "h100"), "'no_such.sh' does not exist"),
        (("deepseek_v4", "--gpu", "h100"), "model 'deepseek_v4' does not exist. Did you mean deepseek_v3?"),
        ((LLAMA,), "--gpu is missing"),
        ((str(Path(__file__)), "--gpu", "h100"), "is neither a bash script nor a config.json. Use one of them"),
        ((MIXTRAL, "--gpu", "h100", "--tp", "4"), "Use --expert-tensor-parallel-size 1 (--etp), which otherwise equals"),
        (
            (LLAMA, "--gpu", "h1000"),
            f"--gpu 'h1000' is not known. Did you mean 'h100'? Use one of: {', '.join(HARDWARE)}; or describe your own device "
            "with --hardware FILE.\n",
        ),
        (("tiny_moe", "--gpu", "h100"), "error: the model has fp32 activations, but the planner supports only bf16 and fp16. "),
        ((LLAMA, "--gpu", "h100", "--json", "x.svg", "--plot", "./x.svg"), "--plot './x.svg' is the --json file, and"),
        ((MIXTRAL, "--gpu", "h100", "--moe-router-topk", "99"), "--moe-router-topk 99 is above --num-experts 8. Use 8 or"),
        ((LLAMA, "--gpu", "h100", "--pp", "3"), "--num-layers 32 of llama3_8b"),
        ((LLAMA, "--gpu", "h100", "--hardware", "mine.json"), "--hardware and --gpu are mutually exclusive. Use only one of"),
        ((LLAMA, "--gpu", "h100", "--with-optimizer", "--no-optimizer"), "--no-optimizer and --with-optimizer are mutually"),
        ((LLAMA, "--gpu", "h100", "--tp", "2", "--tensor-model-parallel-size=4"), "set the same size. Use only one of them."),
        ((LLAMA, "--gpu", "h100", "--reserve", "-1GiB"), "--reserve '-1GiB' is negative. Use a positive size"),
        ((LLAMA, "--gpu", "h100", "--offload-fraction", "1"), "Did you mean --activation-offload-fraction?"),
        ((LLAMA, "--gpu", "h100", "--offload-modules", "core_atn"), "is not a tag. Did you mean 'core_attn'?"),
        ((LLAMA, "--gpu", "h100", "--recompute-modules", "moe_akt"), "is not supported. Did you mean moe_act?"),
        ((LLAMA, "--gpu=h100", "--reserve=60GiB", "--offload-memory-budget=79GiB"), "Lower --reserve 60.00 GiB, spread"),
        ((LLAMA, "--gpu", "h100", "--offload-memory-budget", "1GiB"), "static memory of pipeline rank 0"),
        ((LLAMA, "--gpu", "h100", "--offload-memory-bugdet", "60GiB"), "Did you mean --offload-memory-budget?"),
        ((MIXTRAL, "--gpu", "h100", "--etp", "3"), "--expert-tensor-parallel-size 3 does not divide moe_ffn_hidden_size 14336"),
        ((LLAMA, "--gpu", "h100", "--offload-memory-budget", "81GiB"), "--offload-memory-budget 81.00 GiB is more than the"),
        ((LLAMA, "--gpu", "h100", "--sweep", "--timeline", "t.json"), "--sweep plans for many budgets, but --timeline is for"),
    ],
)
def test_bad_input_exits_with_code_2_and_one_line(capsys, words, message):
    code, out, err = plan(capsys, *words)
    assert (code, out) == (2, "")
    err = err.removeprefix("fgoffload: planning ...\n")  # on a slow machine
    assert err.startswith("fgoffload: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_training_accepts_a_plan_with_cuda_graphs(capsys, tmp_path):
    path, source = tmp_path / "plan.json", str(ROOT / "arguments" / "launch_bound_graphs.sh")
    # Offloading the experts alone does not fit this budget, so attention inside its graphs is offloaded, too.
    words = (source, "--gpu", "h100", "--no-optimizer", "--offload-memory-budget", "17.2GiB", "--json", str(path))
    code, out, err = plan(capsys, *words)
    assert code == 0
    assert err.count("a plan does not count unused memory in CUDA graph pools") == err.count("warning: ") == 1
    assert "Selective recompute is --recompute-modules moe_act." in out  # no layernorm, which is captured
    assert "--offload-modules auto" not in out  # auto cannot measure steps with CUDA graphs
    written = OffloadPlan.load(path)
    assert "core_attn" in written.offloaded_tags
    values = {"num_moe_experts": 16, "cuda_graph_impl": "transformer_engine"}
    values["cuda_graph_modules"] = ["attn", "moe_router", "moe_preprocess"]
    graph_checks.check_graphs(OffloadConfig(offload_modules=written.offloaded_tags), written.offloaded_tags, values)
    recomputed = {site.tag for site, action in written.actions.items() if action.recomputes}
    assert recomputed
    graph_checks.check_recompute(recomputed, values, layer=0, is_moe=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpu", "h100", "--json", "./model.sh"), "--json './model.sh' is the model, and would be overwritten. Use"),
        (("--profile", "p.json", "--json", "p.json"), "--json 'p.json' is the --profile file"),
    ],
)
def test_input_files_are_not_overwritten(capsys, monkeypatch, tmp_path, words, message):
    monkeypatch.chdir(tmp_path)
    texts = {"model.sh": Path(LLAMA).read_text(encoding="utf-8"), "p.json": "{}", "h.json": '{"base": "h100"}'}
    for name, text in texts.items():
        Path(name).write_text(text, encoding="utf-8")
    code, out, err = plan(capsys, "model.sh", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()} == texts


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--json", "none/plan.json"), "--json 'none/plan.json' cannot be written: No such file or directory."),
        (("--plot", "file/plan.png"), "--plot 'file/plan.png' cannot be written: Not a directory."),
        (("--plot", "plan.bmpx"), "--plot 'plan.bmpx' has an unsupported image format. Use one of "),
    ],
)
def test_unwritable_files_are_rejected_before_planning(capsys, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr(model_shapes, "read_model_file", fail)
    code, out, err = plan(capsys, LLAMA, "--gpu", "h100", *words)
    assert (code, out) == (2, "")
    assert message in err


def fail(*_, **__):
    raise AssertionError("work began")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("qwen3_30b_a3b --gpu h100 --num-gpus 8 --pp 1 --ep 8 --seq-length 32768", "Would fit: --num-gpus 8 --tp "),
        ("mixtral_8x7b --gpu a100 --num-gpus 16 --global-batch-size 128", "Would fit: --num-gpus 16 --tp 1 --pp 2 "),
        ("llama3_405b --gpu h100 --num-gpus 64", "Would fit: --num-gpus 128 "),
        ("kimi_k2 --gpu h800 --num-gpus 256", "Would fit: --num-gpus 256 --tp "),
        ("gpt_oss_120b --gpu h100 --fp8-format hybrid --fp8-recipe blockwise", "Everything is kept on the GPU"),
        ("llama3_70b --gpu h100 --num-gpus 128 --cp 8 --seq-length 131072", "keeps more for backward than fused attention"),
        ("llama3_70b --gpu h100 --num-gpus 8 --lora-dim 16 --tp 8 --pp 1 --vp 1 --cp 1", "Everything is kept on the GPU"),
        ("llama3_8b --gpu h100 --num-gpus 1 --tp 1 --cp 1 --optimizer-cpu-offload", "Offload: "),
    ],
)
def test_commands_from_user_reports(capsys, words, message):
    code, out, _ = plan(capsys, *words.split())
    layouts = re.findall(r"^Would fit: (.*)$", out, re.MULTILINE)[:1]
    assert message in out
    assert code == (2 if layouts else 0)
    assert all(plan(capsys, *words.split(), *layout.split())[0] == 0 for layout in layouts)  # appended to the same command
