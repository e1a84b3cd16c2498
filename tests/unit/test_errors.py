"""Tests the error classes and the suggested budget."""

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
def test_base_classes_of_errors(name):
    assert getattr(errors, name).__bases__ == TREE[name]


def test_the_docstring_lists_every_error():
    assert [name for name in ("OffloadError", *TREE) if name not in (errors.__doc__ or "")] == []


@pytest.mark.parametrize(
    ("least_bytes", "text"), [(1000, "1000B"), (2**19, "512.00KiB"), (58 * 2**30, "58.00GiB"), (58 * 2**30 + 1, "58.01GiB")]
)
def test_the_suggested_budget_is_rounded_up_to_a_readable_size(least_bytes, text):
    assert f"Use a budget of {text} or more, or" in str(errors.BudgetError("Why.", least_bytes))
    assert least_bytes <= parse_bytes(text, name="--budget") <= least_bytes * 1.01
