"""examples/benchmarks/check_predictions.py: command lines that the benchmark accepts, and one table of all models."""

import argparse
from pathlib import Path

import pytest
from support.scripts import load_script

from fgoffload.cli import bench

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script():
    with load_script("check_predictions") as module:
        yield module


def test_the_command_of_a_model_is_one_that_the_benchmark_takes(script, tmp_path):
    path = ROOT / "arguments" / "w2_moe.sh"
    assert set(script.MODELS) == {"w2_moe", "mla_moe", "llama3_8b_layers"}
    words = script.make_command(path, tmp_path, steps=4, warmup=2)
    assert words[1:4] == ["-m", "fgoffload", "bench"]
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    options, flags = parser.parse_known_args(words[4:])
    checked = bench.check_options(options, flags)
    assert checked.arguments_file == path
    assert checked.measures_profile
    assert (checked.steps, checked.warmup, checked.repeats, checked.folder) == (4, 2, 1, tmp_path)
    assert len(checked.settings) + len(checked.budgets_bytes) == 6
