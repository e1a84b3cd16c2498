import inspect

import pytest

from fgoffload import errors

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


def test_the_module_defines_the_tree_and_nothing_else():
    defined = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert defined == {"OffloadError", *TREE}


def test_the_docstring_draws_every_error():
    assert [name for name in ("OffloadError", *TREE) if name not in (errors.__doc__ or "")] == []


def test_the_base_is_a_plain_exception():
    assert errors.OffloadError.__bases__ == (Exception,)
