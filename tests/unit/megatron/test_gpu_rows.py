"""The rows of the GPU matrix, checked without a GPU: flags that Megatron accepts, and every pair of tag and recompute."""

import itertools

import pytest
from gpu.megatron_rows import IMPOSSIBLE, METHODS, MODULES, ROWS, SHORT
from packaging.version import Version

from fgoffload import Action, ConfigError, OffloadConfig, OffloadPlan, Site, default_tags
from fgoffload.integrations.megatron.arguments import build_transformer_config, parse_arguments
from fgoffload.integrations.megatron.imports import load_module
from fgoffload.integrations.megatron.site_table import SITES

TAGS = [tag.name for tag in default_tags() if any(site.tag == tag.name and site.since == "0.16.1" for site in SITES)]
"""Those of the development branch alone have a script of their own."""


@pytest.fixture
def transformer_engine(monkeypatch):
    """Megatron's config is told that Transformer Engine is there, of the version that the rows run with."""
    monkeypatch.setattr(load_module("megatron.core.utils"), "_te_version", Version("2.20.2"))
    names = ("permute", "permute_with_probs", "sort_chunks_by_index", "sort_chunks_by_index_with_probs", "unpermute")
    for module in ("megatron.core.transformer.moe.moe_utils", "megatron.core.extensions.transformer_engine"):
        for name in names:
            monkeypatch.setattr(load_module(module), f"fused_{name}", object(), raising=False)


def parse(row):
    return parse_arguments(row.flags.split(), source=row.name, world_size=row.gpus)


def test_megatron_accepts_every_row(transformer_engine):
    assert len({row.name for row in ROWS}) == len(ROWS)
    installed = load_module("megatron.core").__version__
    for row in (row for row in ROWS if row.find_refusal(installed) is None):
        arguments = parse(row)
        assert arguments.uses_transformer_engine
        assert bool(row.plan) != bool(row.tags)
        assert row.find_refusal("0.19.2") is None
        leaving = [tag for _, tag, action in row.plan if action.endswith("offload") and tag in TAGS]
        offload = OffloadConfig(offload_modules=tuple(row.tags.split() or dict.fromkeys(leaving)), **dict(row.options))
        if row.tags:
            offload.check_recompute(arguments.transformer.get("recompute_modules", ()))
        for config in (None, offload):
            assert build_transformer_config(arguments, offload=config).num_layers == arguments.transformer["num_layers"]


def test_the_short_run_has_rows_of_one_gpu():
    chosen = [row for row in ROWS if row.name in SHORT]
    assert [row.gpus for row in chosen] == [1] * len(SHORT)


def test_the_plan_of_a_row_has_an_action_in_every_layer():
    for row in (row for row in ROWS if row.plan):
        arguments = parse(row)
        assert {layer for layer, _, _ in row.plan} == set(range(arguments.transformer["num_layers"]))
        assert {row.find_chunk(layer) for layer, _, _ in row.plan} == set(range(arguments.virtual_pipeline_size or 1))
        actions = {Site(chunk=row.find_chunk(layer), layer=layer, tag=tag): Action(action) for layer, tag, action in row.plan}
        assert len(OffloadPlan(actions=actions).actions) == len(row.plan)


def is_refused(tag, module):
    try:
        OffloadConfig(offload_modules=("core_attn", tag) if tag == "attn_proj" else (tag,)).check_recompute([module])
    except ConfigError:
        return True
    return False


def test_every_tag_has_a_row_beside_every_recompute_or_a_reason_why_it_cannot():
    in_rows = set()
    for row in ROWS:
        transformer = parse(row).transformer
        recomputed = transformer.get("recompute_modules") or [transformer.get("recompute_method")]
        in_rows |= set(itertools.product(row.tags.split(), recomputed))
    impossible = {pair for entry in IMPOSSIBLE for pair in itertools.product(entry.tags.split(), entry.modules.split())}
    expected = set(itertools.product(TAGS, (*MODULES, *METHODS)))
    assert sorted(expected - in_rows - impossible) == []
    assert sorted(in_rows & impossible) == []
    # Without full recompute layer_input has no site: that is found in the first step.
    refused = {(tag, module) for tag, module in itertools.product(TAGS, MODULES) if is_refused(tag, module)}
    assert {pair for pair in impossible if pair[1] in MODULES and pair[0] != "layer_input"} == refused
    assert all(entry.reason for entry in IMPOSSIBLE)
