"""Tests that launch facts of a process are read from the launcher's environment variables only."""

import pytest

from fgoffload.cli.launch import Launch, find_launch
from fgoffload.errors import ConfigError


@pytest.mark.parametrize(
    "environment",
    [{}, {"WORLD_SIZE": "2"}, {"RANK": "1"}, {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, {"LOCAL_RANK": "3"}],
    ids=str,
)
def test_one_process_is_by_itself(environment):
    assert find_launch(environment) == Launch(rank=0, world_size=1, local_rank=0)


def test_torchrun_says_which_process_this_is():
    launch = find_launch({"WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1"})
    assert launch == Launch(rank=5, world_size=8, local_rank=1)
    assert not launch.is_first
    assert find_launch({"WORLD_SIZE": "8", "RANK": "5"}).local_rank == 5  # launchers of one machine


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
def test_values_that_no_launcher_sets_are_refused(environment, message):
    with pytest.raises(ConfigError, match=message):
        find_launch(environment)
