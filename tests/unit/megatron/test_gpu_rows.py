"""The rows that need a GPU, looked at without one: flags that parse, tags that go with them, and none left out."""

import pytest
from gpu.megatron_rows import MIXED, MIXED_TAGS, MLA, MOE, MOE_TAGS, ROWS, SELECTIVE

from fgoffload import ConfigError, OffloadConfig
from fgoffload.integrations.megatron.arguments import parse_arguments
from fgoffload.tags import RECOMPUTE_UNITS

TAGS_OF_MODEL = {MIXED: MIXED_TAGS.split(), f"{MOE} {MLA}": ["attn_norm", *MOE_TAGS.split()]}
MODULES = sorted({unit.recompute_module for unit in RECOMPUTE_UNITS if unit.recompute_module})


def test_each_row_has_a_name_of_its_own():
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_a_row_has_flags_that_parse_and_tags_that_go_with_them(row):
    arguments = parse_arguments(row.flags.split(), source=row.name, world_size=row.gpus)
    assert arguments.uses_transformer_engine
    assert bool(row.plan) != bool(row.tags)
    if row.tags:
        offload = OffloadConfig(offload_modules=tuple(row.tags.split()))
        offload.check_recompute(arguments.transformer.get("recompute_modules", ()))


def is_allowed(tags, module):
    try:
        OffloadConfig(offload_modules=tuple(tags)).check_recompute([module])
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("module", MODULES)
def test_each_module_that_megatron_recomputes_has_a_row_with_all_tags_that_it_allows(module):
    row = next(row for row in ROWS if row.name == f"recompute {module}")
    model = row.flags.split(f" {SELECTIVE}")[0]
    tags = TAGS_OF_MODEL[model]
    # A tag that needs another one cannot be asked alone.
    refused = [tag for tag in tags if tag != "attn_proj" and not is_allowed([tag], module)]
    refused += ["attn_proj"] if "core_attn" in refused else []
    assert sorted(row.tags.split()) == sorted(set(tags) - set(refused))
