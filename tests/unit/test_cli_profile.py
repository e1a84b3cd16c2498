"""Tests `fgoffload profile`: its output, its file, and bad input."""

from pathlib import Path

import pytest
from support.command import ARGUMENTS

from fgoffload.cli import main
from fgoffload.integrations import link as link_module
from fgoffload.planner.timing.profile import Profile, make_rank_model


@pytest.fixture(autouse=True)
def _empty_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def _quick_link_sizes(monkeypatch):
    sizes = link_module.QUICK_SIZES
    monkeypatch.setattr(link_module.measure_link, "__kwdefaults__", {"sizes": sizes})


@pytest.mark.usefixtures("_quick_link_sizes")
def test_profile_without_a_file_measures_only_the_link(capsys):
    assert main(["profile", "--json", "link.json"]) == 0
    out = capsys.readouterr().out
    assert "link to the host, GB/s" in out
    assert "Profile: link.json" in out
    assert "segment" not in out

    profile = Profile.load(Path("link.json"))
    assert profile.ranks == ()
    assert [copy.size_bytes for copy in profile.link.copies] == [64 * 1024, 16 * 1024**2]


@pytest.mark.usefixtures("_quick_link_sizes")
def test_profile_with_a_file_measures_one_step_of_its_model(capsys, tmp_path):
    assert main(["profile", ARGUMENTS, "--json", "profile.json", "--num-layers", "2"]) == 0
    out = capsys.readouterr().out
    for text in ("core_attn", "expert_fc1", "rank 0: step", "static memory", "baseline step without instrumentation: "):
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


def test_only_the_measured_model_can_be_planned_from_a_profile(capsys):
    assert main(["profile", ARGUMENTS, "--json", "profile.json", "--num-layers", "2"]) == 0
    words = ["--profile", "profile.json", "--offload-memory-budget", "1GiB"]
    assert main(["plan", ARGUMENTS, *words, "--num-layers", "2"]) == 0
    assert "tiny_moe: 2 layers" in capsys.readouterr().out
    assert main(["plan", ARGUMENTS, *words]) == 2
    assert "with num_layers 2, but" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.sh"], "argument file 'none.sh' does not exist. Pass a file before any Megatron flag."),
        (["--swiglu"], "needs a model. Pass an argument file first"),
        (["--json", "none/profile.json"], "--json 'none/profile.json' cannot be written: No such file or directory. Use a"),
        (["model.sh", "--json", "model.sh"], "--json 'model.sh' is the argument file, and would be overwritten. Use another"),
        (["config.json"], "is JSON, but a training run needs Megatron's flags. Pass a Megatron argument file, for"),
        (
            ["model.sh", "--pipeline-model-parallel-size", "2"],
            "model.sh and the command line: one copy of the model needs 2 processes",
        ),
    ],
)
def test_bad_input_exits_with_code_2_and_one_line(words, message, capsys):
    Path("config.json").write_text("{}", encoding="utf-8")
    Path("model.sh").write_text(Path(ARGUMENTS).read_text(encoding="utf-8"), encoding="utf-8")
    assert main(["profile", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
