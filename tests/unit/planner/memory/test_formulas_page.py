"""The formulas of docs/reference/saved_bytes.md are those of the code: each is read from the page and evaluated."""

import dataclasses
import re
from pathlib import Path

import pytest

from fgoffload import default_tags
from fgoffload.planner.memory.saved_bytes import count_tag_bytes
from fgoffload.planner.memory.untagged_bytes import list_untagged_tensors
from fgoffload.planner.model.layer_shape import ExpertsShape, LatentShape, LayerShape, RouterShape
from fgoffload.planner.timing.hardware import get_hardware
from fgoffload.planner.timing.op_times import make_layer_model

PAGE = Path(__file__).parents[4] / "docs" / "reference" / "saved_bytes.md"
ROW = re.compile(r"^\| `(\w+)` \|([^|]*)\| `([^`]+)` \| (\d+|-) \|$", re.MULTILINE)
UNTAGGED_ROW = re.compile(r"^\| ([a-z -]+) \|([^|]*)\| `([^`]+)` \|$", re.MULTILINE)
RECOMPUTED_ROW = re.compile(r"^\| `core_attn`, ([a-z= ,]+) \| `([^`]+)` \| `([^`]+)` \|$", re.MULTILINE)
WORD = re.compile(r"dqk|dv|rq|rkv|dpos|drot|fs|[sbhfngEkte]|\d+|[-()+/]")
TEXT = PAGE.read_text(encoding="utf-8")
ROWS = [(tag, where.strip(), formula, found) for tag, where, formula, found in ROW.findall(TEXT)]
RECOMPUTED_ROWS = RECOMPUTED_ROW.findall(TEXT)
UNTAGGED_ROWS = [(name, where.strip(), formula) for name, where, formula in UNTAGGED_ROW.findall(TEXT)]

MEASURED = {"s": 256, "b": 2, "h": 256, "n": 4, "g": 4, "dqk": 64, "dv": 64, "drot": 64, "t": 1, "e": 1}
MEASURED |= {"f": 256, "fs": 256, "E": 8, "k": 2, "rq": 64, "rkv": 64, "dpos": 32}
UNEQUAL = {"s": 48, "b": 3, "h": 40, "n": 8, "g": 4, "dqk": 6, "dv": 10, "drot": 7, "t": 2, "e": 1}
UNEQUAL |= {"f": 26, "fs": 22, "E": 12, "k": 5, "rq": 18, "rkv": 20, "dpos": 3}
DENSE_TAGS = ("mlp_fc1", "mlp_act", "mlp_fc2")


def evaluate(formula, sizes):
    """Return the value of a formula in which letters that stand side by side are multiplied."""
    words = [str(sizes.get(word, word)) for word in WORD.findall(formula)]
    assert "".join(WORD.findall(formula)) == formula.replace(" ", "")
    spelled = ""
    for before, word in zip(["(", *words], words, strict=False):
        is_product = (before.isdigit() or before == ")") and (word.isdigit() or word == "(")
        spelled += f"*{word}" if is_product else word
    return eval(spelled)


def choose_sizes(sizes, tag, where):
    """Return `sizes` as they are where a row holds."""
    if "latent" in where:
        return sizes | {"g": sizes["n"], "dqk": sizes["dqk"] + sizes["dpos"]}
    if "g = 2" in where:
        return sizes | {"g": 2}
    if "e = 2" in where:
        return sizes | {"e": 2}
    if tag.startswith("expert_") and where == "fp8":
        return sizes | {"s": 128}  # rows of an expert are then a multiple of 16
    return sizes | {"f": 512} if tag in DENSE_TAGS and sizes is MEASURED else sizes


def make_shape(sizes, tag, where):
    """Return the layer that a row of the page is about."""
    is_latent = "latent" in where
    router = RouterShape(
        balancing="aux_loss" if where.startswith("balancing loss") else "none",
        dtype_bytes=4 if "router in fp32" in where else 2,
        has_pre_softmax="pre-softmax" in where,
    )
    experts = ExpertsShape(
        num_experts=sizes["E"],
        topk=sizes["k"],
        ffn_hidden_size=sizes["f"],
        shared_ffn_hidden_size=sizes["fs"],
        has_fused_permutation="fused permutation" in where,
        expert_tensor_parallel_size=sizes["e"],
        router=router,
    )
    latent = LatentShape(
        q_lora_rank=None if "whole query" in where else sizes["rq"],
        kv_lora_rank=sizes["rkv"],
        qk_pos_emb_head_dim=sizes["dpos"],
        has_qk_norm="qk-layernorm" in where,
    )
    shape = LayerShape(
        micro_batch_size=sizes["b"],
        seq_length=sizes["s"],
        hidden_size=sizes["h"],
        num_attention_heads=sizes["n"],
        num_query_groups=sizes["g"],
        qk_channels=sizes["dqk"],
        v_channels=sizes["dv"],
        experts=experts,
        latent=latent if is_latent else None,
        tensor_parallel_size=sizes["t"],
        rotary_channels=sizes["drot"],
        has_qk_norm="head norms" in where,
        is_gated="no gate" not in where,
        has_fused_activation="no activation fusion" not in where,
        fp8_recipe=("tensorwise" if "tensorwise" in where else "delayed") if "fp8" in where else None,
        has_fused_rotary="fused rotary" in where,
        has_hidden_dropout="dropout" in where,
        has_mtp_projection="projection" in where,
        has_linear_bias="linear biases" in where,
        has_attention_sinks="sinks" in where,
        is_deterministic="deterministic" in where,
    )
    return dataclasses.replace(shape, experts=None, ffn_hidden_size=sizes["f"]) if tag in DENSE_TAGS else shape


@pytest.mark.parametrize(("tag", "where", "formula", "found"), ROWS)
def test_a_formula_gives_what_the_code_gives_and_what_was_measured(tag, where, formula, found):
    for sizes in (MEASURED, UNEQUAL):
        chosen = choose_sizes(sizes, tag, where)
        assert evaluate(formula, chosen) == count_tag_bytes(make_shape(chosen, tag, where))[tag]
    if found != "-":
        assert evaluate(formula, choose_sizes(MEASURED, tag, where)) == int(found)


@pytest.mark.parametrize(("name", "where", "formula"), UNTAGGED_ROWS)
def test_a_formula_of_what_no_tag_saves_gives_what_the_code_gives(name, where, formula):
    for sizes in (MEASURED, UNEQUAL, UNEQUAL | {"e": 2}):
        tensors = list_untagged_tensors(make_shape(sizes, tag="", where=where))
        assert evaluate(formula, sizes) == sum(tensor.size_bytes for tensor in tensors if name in tensor.name)


@pytest.mark.parametrize(("where", "kept", "copied"), RECOMPUTED_ROWS)
def test_a_formula_of_what_attention_that_runs_again_keeps_gives_what_the_code_gives(where, kept, copied):
    sizes = choose_sizes(UNEQUAL, "core_attn", where)
    sizes |= {"drot": 0 if "neither" in where else sizes["drot"], "g": sizes["n"] if "g = n" in where else sizes["g"]}
    shape = make_shape(sizes, "core_attn", where)
    (unit,) = (one for one in make_layer_model(shape, get_hardware("h100"), kind="any").units if one.name == "core_attn")
    assert evaluate(kept, sizes) == sum(tensor.size_bytes for tensor in unit.keeps)
    assert evaluate(copied, sizes) == unit.extra_bytes


def test_the_page_has_a_formula_for_all_that_no_tag_saves():
    names = [name for name, *_ in UNTAGGED_ROWS]
    for where in {where for _, where, _ in UNTAGGED_ROWS}:
        for tensor in list_untagged_tensors(make_shape(MEASURED, tag="", where=where)):
            assert any(name in tensor.name for name in names)
    assert len(set(names)) == 7


def test_the_page_has_a_formula_for_each_tag_that_the_code_has_one_for():
    known = {tag for row in ROWS for tag in count_tag_bytes(make_shape(MEASURED, row[0], row[1]))}
    assert {tag for tag, *_ in ROWS} == known
    assert list(dict.fromkeys(tag for tag, *_ in ROWS)) == [tag for tag in default_tags().names if tag in known]
