"""`fgoffload profile`: what it shows, the file that it writes, and bad input."""

from pathlib import Path

import pytest
from support.command import ARGUMENTS

from fgoffload import Action, OffloadPlan, Site
from fgoffload.cli import main
from fgoffload.cli.profile_tables import describe_compared_steps
from fgoffload.integrations import link as link_module
from fgoffload.planner.timing.compared_step import ComparedStep
from fgoffload.planner.timing.link_profile import CopyRate, LinkProfile
from fgoffload.planner.timing.profile import Profile, make_rank_model


@pytest.fixture(autouse=True)
def _work_in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def _quick(monkeypatch):
    sizes = link_module.QUICK_SIZES
    monkeypatch.setattr(link_module.measure_link, "__kwdefaults__", {"sizes": sizes})


@pytest.mark.usefixtures("_quick")
def test_without_a_file_the_link_alone_is_measured(capsys):
    assert main(["profile", "--json", "link.json"]) == 0
    out = capsys.readouterr().out
    assert "link to the host, GB/s" in out
    assert "Profile: link.json" in out
    assert "stretch" not in out

    profile = Profile.load(Path("link.json"))
    assert profile.ranks == ()
    assert [copy.size_bytes for copy in profile.link.copies] == [64 * 1024, 16 * 1024**2]


@pytest.mark.usefixtures("_quick")
def test_the_profile_goes_to_the_current_folder_unless_told_otherwise_and_that_is_said(capsys):
    Path("profile.json").write_text("an older one", encoding="utf-8")
    assert main(["profile"]) == 0
    out = capsys.readouterr().out
    assert "Profile: profile.json\nPlan with it: fgoffload plan MODEL --gpu NAME --profile profile.json\n" in out
    assert Profile.load(Path("profile.json")).ranks == ()
    assert main(["profile", "--json", "other.json"]) == 0
    assert "--profile other.json\n" in capsys.readouterr().out
    assert sorted(path.name for path in Path().iterdir()) == ["other.json", "profile.json"]


def test_a_folder_of_the_name_of_the_profile_is_said_before_anything_is_measured(capsys):
    Path("profile.json").mkdir()
    assert main(["profile"]) == 2
    assert capsys.readouterr().err == (
        "fgoffload: error: without --json, 'profile.json' is a folder. Give a file that can be written, as in --json "
        "measured.json.\n"
    )


@pytest.mark.usefixtures("_quick")
def test_with_a_file_one_step_of_its_model_is_measured(capsys, tmp_path):
    assert main(["profile", ARGUMENTS, "--json", "profile.json", "--num-layers", "2"]) == 0
    out = capsys.readouterr().out
    for text in ("core_attn", "expert_fc1", "rank 0: step", "there all the time", "plain step, with nothing measured in it: "):
        assert text in out
    profile = Profile.load(tmp_path / "profile.json")
    (rank,) = profile.ranks
    assert 0 < profile.plain_step_s < 60
    assert [layer.number for layer in rank.layers] == [0, 1]
    assert rank.pipeline.microbatches == 4
    # Hidden states of 256 tokens and 128 channels in fp32: the norm's output.
    assert {t.size_bytes for t in rank.layers[0].model.tensors if t.tags == ("qkv_linear",)} == {256 * 128 * 4}
    assert profile.training.source == ARGUMENTS
    assert (profile.training.flags[-2:], profile.training.world_size) == (("--num-layers", "2"), 1)
    assert rank.min_offloaded_numel == 1024
    assert {t.element_bytes for t in rank.layers[0].model.tensors if t.tags == ("qkv_linear",)} == {4}
    assert len(make_rank_model(profile, rank=0).passes) == 8


@pytest.mark.usefixtures("_quick")
def test_steps_that_were_compared_are_shown(capsys, monkeypatch):
    from fgoffload.integrations.megatron import compared_steps, profile_training

    measure = profile_training.profile_training
    # On a device that is not its own host.
    monkeypatch.setattr(
        profile_training, "profile_training", lambda *args, **options: measure(*args, **options, has_own_host=True)
    )
    monkeypatch.setattr(compared_steps, "MOST_ROUNDS", 1)
    assert main(["profile", ARGUMENTS, "--json", "profile.json", "--num-layers", "2"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    steps = Profile.load(Path("profile.json")).compared_steps
    ratios = " and ".join(f"{step.step_s / step.keeping_step_s:.3f}" for step in steps)
    assert f"in turn with steps that keep all, took {ratios} of these: compute is planned to be " in out


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("tiny_moe.sh", "is the host's, and comes on top of the step"),
        ("tiny_dense.sh", "all compute is taken to be as much longer"),
    ],
)
def test_what_a_plain_step_takes_more_is_the_hosts_only_where_it_waits(name, use, capsys):
    assert main(["profile", str(Path(ARGUMENTS).with_name(name)), "--num-layers", "2"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("plain step"))
    assert line.endswith(use)


def test_what_was_measured_can_be_planned_for_and_nothing_else(capsys):
    assert main(["profile", ARGUMENTS, "--json", "profile.json", "--num-layers", "2"]) == 0
    words = ["--profile", "profile.json", "--offload-memory-budget", "1GiB"]
    assert main(["plan", ARGUMENTS, *words, "--num-layers", "2"]) == 0
    assert "tiny_moe: 2 layers" in capsys.readouterr().out
    assert main(["plan", ARGUMENTS, *words]) == 2
    assert "with layers 2, and" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.sh"], "argument file 'none.sh' does not exist. Give a file, before any Megatron flag."),
        (["none"], "argument file 'none' does not exist. Give a file, before any Megatron flag."),
        (["."], "argument file '.' is a folder. Give a file, before any Megatron flag."),
        (["--swiglu"], "is for a model, and there is none. Give an argument file first"),
        (["--data", "x"], "--data 'x' is for a model, and there is none. Give an argument file first"),
        (
            ["--json", "none/profile.json"],
            "--json 'none/profile.json' is in 'none', which does not exist. Give a file that can be written",
        ),
        (["--json", "."], "--json '.' is a folder. Give a file that can be written, as in profile.json."),
        (["model.sh", "--json", "model.sh"], "--json 'model.sh' is the argument file, and would be written over. Give another"),
        ([ARGUMENTS, "--data", "text.txt", "--json", "text.txt"], "--json 'text.txt' is the file of --data"),
        (["--json"], "--json expected one argument. Give it after the flag, as in --json profile.json."),
        (
            ["config.json"],
            "is JSON, and a training is run by Megatron's flags. Give a Megatron argument file, as in: fgoffload prof",
        ),
        (["config.json"], "can be planned for: fgoffload plan config.json --gpu h100."),
        (
            ["--seq-length", "4"],
            "ARGUMENTS.sh is missing: '4' stands where it should. Give a Megatron argument file before --seq",
        ),
        (["--seq-length", "4", ARGUMENTS], "as in fgoffload profile arguments/x.sh --seq-length 4."),
        (["none.sh", "--seq-length", "4"], "argument file 'none.sh' does not exist. Give a file, before any Megatron flag."),
        (
            ["model.sh", "--pipeline-model-parallel-size", "2"],
            "model.sh: the processes of this training are a multiple of 2, and there is 1. Start as many, as in torchrun "
            "--nproc-per-node 2 -m fgoffload profile model.sh --pipeline-model-parallel-size 2; or measure the link alone, and "
            "plan with it: fgoffload profile --json link.json, and fgoffload plan model.sh --gpu NAME --profile link.json.",
        ),
        (
            [str(Path(ARGUMENTS).with_name("deepseek_v3.sh"))],
            "torchrun --nnodes 64 --nproc-per-node 8 -m fgoffload profile ",
        ),
    ],
)
def test_bad_input_ends_with_code_2_and_one_line(words, message, capsys):
    Path("config.json").write_text("{}", encoding="utf-8")
    Path("model.sh").write_text(Path(ARGUMENTS).read_text(encoding="utf-8"), encoding="utf-8")
    assert main(["profile", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1


def test_what_steps_under_plans_took_is_said_with_what_leaves_costs_by_it():
    plan = OffloadPlan(actions={Site(chunk=0, layer=0, tag="core_attn"): Action.OFFLOAD})
    steps = [ComparedStep.from_plan(plan, step_s=step_s, keeping_step_s=2.0) for step_s in (2.2, 2.1)]
    rate = CopyRate(size_bytes=1, d2h_bytes_per_s=2e6, h2d_bytes_per_s=2e6, duplex_bytes_per_s=1.5e6)
    link = LinkProfile(copies=(rate,), compute_slowdown=0.0)
    profile = Profile(device="a device", versions={}, date="2026-11-25", link=link, compared_steps=tuple(steps))
    assert describe_compared_steps(profile, 0.11) == (
        "steps under plans, in turn with steps that keep all, took 1.100 and 1.050 of these: compute is planned to be 11.0% "
        "slower beside copies, and each group that leaves to cost 0.37 ms"
    )
    assert "beside copies, the most that is planned with, and each" in describe_compared_steps(profile, 0.25)
