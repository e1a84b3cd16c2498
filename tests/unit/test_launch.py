"""Tests rank, world size and local rank, which are read from the launcher's environment variables."""

import pytest

from fgoffload.cli.launch import Launch, find_launch
from fgoffload.errors import ConfigError


@pytest.mark.parametrize(
    "environment",
    [{}, {"WORLD_SIZE": "2"}, {"RANK": "1"}, {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, {"LOCAL_RANK": "3"}],
    ids=str,
)
def test_an_incomplete_environment_is_a_single_process(environment):
    assert find_launch(environment) == Launch(rank=0, world_size=1, local_rank=0)


def test_rank_and_world_size_come_from_torchruns_environment():
    launch = find_launch({"WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1"})
    assert launch == Launch(rank=5, world_size=8, local_rank=1)
    assert not launch.is_first
    assert find_launch({"WORLD_SIZE": "8", "RANK": "5"}).local_rank == 5  # launchers for one machine


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"WORLD_SIZE": "two", "RANK": "0"},
            r"the environment sets WORLD_SIZE='two', which is not a number\. Start .* torchrun",
        ),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, r"the environment sets RANK='-1', which is not a number"),
        ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": ""}, r"the environment sets LOCAL_RANK='', which is not a number"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, r"RANK 2 is not below WORLD_SIZE 2\. Start .* torchrun"),
    ],
)
def test_invalid_launcher_variables_are_rejected(environment, message):
    with pytest.raises(ConfigError, match=message):
        find_launch(environment)
