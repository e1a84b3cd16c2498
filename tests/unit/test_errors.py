import pytest

from fgoffload import errors
from fgoffload.units import parse_bytes

TREE = {
    "ConfigError": (errors.OffloadError, ValueError),
    "PlanError": (errors.OffloadError,),
    "BudgetError": (errors.PlanError,),
    "IntegrationError": (errors.OffloadError,),
    "StateError": (errors.OffloadError, RuntimeError),
    "InternalError": (errors.OffloadError,),
}


@pytest.mark.parametrize("name", TREE)
def test_each_error_has_the_bases_that_the_tree_names(name):
    assert getattr(errors, name).__bases__ == TREE[name]


def test_the_docstring_draws_every_error():
    assert [name for name in ("OffloadError", *TREE) if name not in (errors.__doc__ or "")] == []


@pytest.mark.parametrize(
    ("least_bytes", "text"), [(1000, "1000B"), (2**20 - 1, "1048575B"), (58 * 2**30, "58GiB"), (58 * 2**30 + 1, "58.01GiB")]
)
def test_the_budget_to_give_is_one_that_people_write_and_never_less(least_bytes, text):
    assert f"Use a budget of {text} or more, or" in str(errors.BudgetError("Why.", least_bytes))
    assert least_bytes <= parse_bytes(text, name="--budget") <= least_bytes * 1.001
