"""The rows that need a GPU, looked at without one: flags that parse, configs that Megatron accepts, and no pair left out."""

import functools
import itertools

import pytest
from gpu.megatron_results import judge_row
from gpu.megatron_rows import FULL, IMPOSSIBLE, LATENT, LATENT_TAGS, METHODS, MIXED, MIXED_TAGS, MODULES, ROWS, SELECTIVE
from packaging.version import Version

from fgoffload import Action, ConfigError, OffloadConfig, OffloadPlan, Site, default_tags
from fgoffload.integrations.megatron.arguments import build_transformer_config, parse_arguments
from fgoffload.integrations.megatron.imports import load_module
from fgoffload.integrations.megatron.site_table import SITES
from fgoffload.tags import RECOMPUTE_UNITS

TAGS_OF_MODEL = {MIXED: MIXED_TAGS.split(), LATENT: LATENT_TAGS.split()}
TAGS = [tag.name for tag in default_tags() if any(site.tag == tag.name and site.since == "0.16.1" for site in SITES)]
"""Those of the development branch alone have a script of their own."""
RECOMPUTES = (*MODULES, *METHODS)


@pytest.fixture
def transformer_engine(monkeypatch):
    """Megatron's config is told that Transformer Engine is there, of the version that the rows run with."""
    monkeypatch.setattr(load_module("megatron.core.utils"), "_te_version", Version("2.20.2"))
    for module in ("megatron.core.transformer.moe.moe_utils", "megatron.core.extensions.transformer_engine"):
        for name in ("fused_permute", "fused_permute_with_probs", "fused_sort_chunks_by_index"):
            monkeypatch.setattr(load_module(module), name, object(), raising=False)
        for name in ("fused_sort_chunks_by_index_with_probs", "fused_unpermute"):
            monkeypatch.setattr(load_module(module), name, object(), raising=False)


def parse(row):
    return parse_arguments(row.flags.split(), source=row.name, world_size=row.gpus)


def test_each_row_has_a_name_of_its_own():
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_a_row_has_flags_that_parse_and_tags_that_go_with_them(row):
    arguments = parse(row)
    assert arguments.uses_transformer_engine
    assert bool(row.plan) != bool(row.tags)
    if row.tags:
        offload = OffloadConfig(offload_modules=tuple(row.tags.split()), **dict(row.options))
        offload.check_recompute(arguments.transformer.get("recompute_modules", ()))


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_megatrons_config_accepts_a_row_without_offload_and_with(row, transformer_engine):
    arguments = parse(row)
    leaving = [tag for _, tag, action in row.plan if action.endswith("offload") and tag in TAGS]
    tags = tuple(row.tags.split()) or tuple(dict.fromkeys(leaving))
    for offload in (None, OffloadConfig(offload_modules=tags, **dict(row.options))):
        assert build_transformer_config(arguments, offload=offload).num_layers == arguments.transformer["num_layers"]


@pytest.mark.parametrize("row", [row for row in ROWS if row.plan], ids=lambda row: row.name)
def test_the_plan_of_a_row_names_layers_that_the_row_has_in_chunks_that_it_has(row):
    arguments = parse(row)
    chunks = arguments.virtual_pipeline_size or 1
    assert {layer for layer, _, _ in row.plan} == set(range(arguments.transformer["num_layers"]))
    assert {row.find_chunk(layer) for layer, _, _ in row.plan} == set(range(chunks))
    actions = {Site(chunk=row.find_chunk(layer), layer=layer, tag=tag): Action(action) for layer, tag, action in row.plan}
    plan = OffloadPlan(actions=actions)
    assert OffloadPlan.from_json(plan.to_json(), source=row.name) == plan


def list_rows_with(option):
    return [pytest.param(row, dict(row.options)[option], id=row.name) for row in ROWS if option in dict(row.options)]


@pytest.mark.parametrize(("row", "fraction"), list_rows_with("activation_offload_fraction"))
def test_of_a_part_of_the_sites_each_tag_moves_that_the_matrix_wants_to_move(row, fraction):
    transformer = parse(row).transformer
    assert "moe_layer_freq" not in transformer  # all layers are alike
    tags = sorted(row.tags.split(), key=default_tags().names.index)  # in the order of forward
    sites = [Site(chunk=0, layer=layer, tag=tag) for layer in range(transformer["num_layers"]) for tag in tags]
    leaving = {site: action.offloads for site, action in OffloadPlan.from_fraction(sites, fraction).actions.items()}
    assert not all(leaving.values())
    moved = {site.tag: 64 for site, leaves in leaving.items() if leaves}
    found = {"reproduces": True, "equal": True, "differ": "", "tags": tags, "moved": moved}
    log = f"Running with {row.attention} backend"
    assert judge_row(row.name, [found], expected_kernel=row.attention, log=log)["equal"] == "yes"


@pytest.mark.parametrize(("row", "less_bytes"), list_rows_with("delta_offload_bytes_across_pp_ranks"))
def test_where_later_stages_offload_less_the_first_one_has_layers_of_both_kinds(row, less_bytes):
    arguments = parse(row)
    layers, stages = arguments.transformer["num_layers"], arguments.pipeline_parallel_size
    assert less_bytes > 0
    assert stages == row.gpus > 1
    assert set(arguments.transformer["moe_layer_freq"][: layers // stages]) == {0, 1}


def test_rows_with_options_of_ours_are_there():
    options = {name for row in ROWS for name, _ in row.options}
    assert options == {"activation_offload_fraction", "delta_offload_bytes_across_pp_ranks"}


def test_a_row_that_a_version_cannot_take_says_why():
    for row in ROWS:
        assert all(start and reason for start, reason in row.refused)
        assert row.find_refusal("0.16.1") is None


def is_allowed(tags, module):
    try:
        OffloadConfig(offload_modules=tuple(tags)).check_recompute([module])
    except ConfigError:
        return False
    return True


def list_refused(tags, module):
    refused = [tag for tag in tags if tag != "attn_proj" and not is_allowed([tag], module)]
    # A tag that needs another one cannot be asked alone.
    return [*refused, *(["attn_proj"] if "core_attn" in refused else [])]


@pytest.mark.parametrize("row", [row for row in ROWS if SELECTIVE in row.flags], ids=lambda row: row.name)
def test_a_row_of_what_megatron_recomputes_has_all_tags_that_it_allows(row):
    model, _, modules = row.flags.partition(f" {SELECTIVE} ")
    modules = [word for word in modules.split() if not word.startswith("--")]
    refused = {tag for module in modules for tag in list_refused(TAGS_OF_MODEL[model], module)}
    if len(modules) == 1:
        assert sorted(row.tags.split()) == sorted(set(TAGS_OF_MODEL[model]) - refused)
    assert not refused & set(row.tags.split())


@pytest.mark.parametrize("module", MODULES)
def test_each_module_that_megatron_recomputes_runs_with_both_kinds_of_attention(module):
    models = {row.flags.partition(f" {SELECTIVE} ")[0] for row in ROWS if row.flags.endswith(f" {SELECTIVE} {module}")}
    assert models == ({LATENT} if module == "mla_up_proj" else {MIXED, LATENT})


@functools.cache
def list_pairs_in_rows():
    """Return each tag beside what its row recomputes: a module, or the method of full recompute."""
    pairs = set()
    for row in ROWS:
        transformer = parse(row).transformer
        recomputed = transformer.get("recompute_modules") or [transformer.get("recompute_method")]
        pairs |= set(itertools.product(row.tags.split(), recomputed))
    return pairs


def list_impossible():
    return [pair for entry in IMPOSSIBLE for pair in itertools.product(entry.tags.split(), entry.modules.split())]


def test_the_modules_are_those_that_megatron_recomputes():
    assert sorted(MODULES) == sorted({unit.recompute_module for unit in RECOMPUTE_UNITS if unit.recompute_module})
    assert all(f"{FULL} {method}" in " ".join(row.flags for row in ROWS) for method in METHODS)


@pytest.mark.parametrize("recomputed", RECOMPUTES)
def test_each_tag_has_a_row_beside_each_recompute_or_a_reason_why_it_cannot(recomputed):
    expected = {(tag, recomputed) for tag in TAGS}
    in_rows, impossible = (
        {pair for pair in pairs if pair[1] == recomputed} for pairs in (list_pairs_in_rows(), list_impossible())
    )
    assert sorted(expected - in_rows - impossible) == []
    assert sorted(in_rows & impossible) == []
    assert impossible <= expected


def test_what_is_called_impossible_beside_a_module_is_what_our_check_refuses():
    assert len(set(list_impossible())) == len(list_impossible())
    # Without full recompute layer_input has no site, whatever else runs again: that is found in the first step.
    refused = {(tag, module) for module in MODULES for tag in list_refused(TAGS, module)}
    assert {pair for pair in list_impossible() if pair[1] in MODULES and pair[0] != "layer_input"} == refused
    assert all(entry.reason for entry in IMPOSSIBLE)
