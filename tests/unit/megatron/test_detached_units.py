"""Tests recomputed units whose outputs no consumer saves: no copies, no memory after forward, bitwise identical results."""

import contextlib
import functools
from unittest import mock

import pytest
import torch
from support.attention import reference_attention
from support.grouped_experts import grouped_experts
from support.trainings import DENSE, SHARED, make_config, make_trainer, write_plan

from fgoffload import Action, StateError
from fgoffload.engine import region
from fgoffload.integrations.megatron.patching.imports import ignore_expected_warnings
from fgoffload.integrations.megatron.recompute import detached_outputs
from fgoffload.integrations.megatron.recompute.layer_recompute import find_units
from fgoffload.trainer import trainer as training

pytest.importorskip("megatron.core.transformer.moe.experts")

pytestmark = pytest.mark.usefixtures("parallel")

R, O, B = Action.RECOMPUTE, Action.OFFLOAD, Action.RECOMPUTE_AND_OFFLOAD  # noqa: E741 - as in the tables below

GROUPED = f"{SHARED} --moe-grouped-gemm --moe-token-dispatcher-type alltoall"
LATENT = f"{DENSE} --multi-latent-attention --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 12"
FLAGS = {
    "dense": DENSE,
    "grouped": GROUPED,
    "gathered": GROUPED.replace("alltoall", "allgather"),
    "overlapped": f"{GROUPED} --moe-shared-expert-overlap",
    "padded": f"{GROUPED} --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity",
    "latent": f"{LATENT} --q-lora-rank 16",
    "latent, plain query": LATENT,
}
MICROBATCHES = 2


@contextlib.contextmanager
def make_planned_trainer(name, actions, tmp_path):
    """Make a trainer whose first layer has `actions`."""
    tags = [tag for tag, action in actions.items() if action.offloads]
    path = write_plan(tmp_path / "plan.json", {(0, tag): action for tag, action in actions.items()})
    with stand_ins(name), make_trainer(FLAGS[name], make_config(*tags, offload_plan=path) if actions else None) as trainer:
        yield trainer


@contextlib.contextmanager
def stand_ins(name):
    """Temporarily give Megatron's local layers grouped experts and latent attention, which they do not support."""
    attention = reference_attention() if "latent" in name else contextlib.nullcontext()
    with grouped_experts(), mock.patch.object(training, "check_supported"), attention:
        yield


def get_results(result):
    return result.losses, result.gradient_digests


@pytest.fixture(scope="module")
def compute_expected(parallel):
    """Return a function that computes and caches the baseline results of a model."""

    @functools.cache
    def compute(name):
        with stand_ins(name), make_trainer(FLAGS[name], None) as trainer:
            return get_results(trainer.run_step())

    return compute


@pytest.fixture
def copied(monkeypatch):
    """Record for each recomputed output whether it was copied because something still references it."""
    found, restore = [], detached_outputs.Output.restore

    def record(output, again):
        found.append(output._emptied is not None and output._emptied.find_storage() is not None)
        restore(output, again)

    monkeypatch.setattr(detached_outputs.Output, "restore", record)
    return found


@pytest.mark.parametrize(
    ("name", "actions", "count"),
    [
        ("dense", {"qkv_linear": B, "core_attn": O}, 3),
        ("dense", {"attn_norm": R, "qkv_linear": B}, 4),  # its input is the norm's output, so nothing is offloaded
        ("dense", {"mlp_norm": R, "mlp_act": O}, 1),
        ("dense", {"attn_norm": R, "qkv_linear": R, "mlp_norm": R, "mlp_fc1": R}, 6),
        ("dense", {"mlp_norm": R, "mlp": R}, 1),
        ("grouped", {"mlp_norm": R, "dispatch": R, "moe_act": R, "router": O}, 3),
        ("grouped", {"mlp_norm": R, "shared_expert": R, "expert_fc1": R}, 2),
        ("grouped", {"mlp_norm": R, "moe": R}, 1),
        ("grouped", {"expert_fc1": B}, 1),
        ("gathered", {"mlp_norm": R, "moe_act": B}, 2),
        ("overlapped", {"mlp_norm": R}, 1),
        ("latent", {"attn_norm": R, "mla_up_proj": R, "core_attn": R}, 4),
        ("latent, plain query", {"attn_norm": R, "mla_up_proj": R}, 4),
    ],
    ids=str,
)
def test_recompute_copies_no_outputs_and_is_bitwise_identical(name, actions, count, compute_expected, copied, tmp_path):
    expected = compute_expected(name)
    with make_planned_trainer(name, actions, tmp_path) as trainer:
        assert get_results(trainer.run_step()) == expected
        offloaded_bytes = {tag: numbers.d2h_bytes for tag, numbers in trainer.integration.last_step.tags.items()}
    assert all(offloaded_bytes[tag] for tag, action in actions.items() if action is O)
    assert copied == [False] * count * MICROBATCHES


# Recomputed token permutation.


def train_moe_layer(actions, tmp_path, train):
    """Return the gradients of the first MoE layer and of those of its three inputs that `train` used."""
    with make_planned_trainer("grouped", actions, tmp_path) as trainer:
        trainer.run_step()
        mlp = trainer.chunks[0].decoder.layers[0].mlp
        for weight in mlp.parameters():
            weight.main_grad.zero_()
        generator = torch.Generator().manual_seed(5)
        inputs = [torch.randn(32, 2, 32, generator=generator).requires_grad_() for _ in range(3)]
        with ignore_expected_warnings():
            train(mlp, lambda number: mlp(inputs[number] * 1.0)[0].square().sum())
        used = [one.grad for one in inputs if one.grad is not None]
        assert used
        return [one.clone() for one in (*(weight.main_grad for weight in mlp.parameters()), *used)]


def run_backward_in_reverse(_, run):
    for loss in reversed([run(number) for number in range(3)]):
        loss.backward()


def continue_after_errors(mlp, run):
    """Fail in forward before and after the first linear, and run once without a graph."""

    def fail(*_):
        raise ArithmeticError

    first = mlp.experts.linear_fc1
    for register in (first.register_forward_pre_hook, first.register_forward_hook):
        handle = register(fail)
        with pytest.raises(ArithmeticError):
            run(0)
        handle.remove()
    with torch.no_grad():
        run(2)
    run(1).backward()
    assert region.find_top_hooks(False) is None  # noqa: FBT003 - not only while tracing


@pytest.mark.parametrize("train", [run_backward_in_reverse, continue_after_errors])
def test_concurrent_and_failed_forwards_do_not_interfere(train, tmp_path):
    found, expected = (train_moe_layer(actions, tmp_path, train) for actions in ({"dispatch": R}, {}))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_in_place_changes_before_a_recomputed_permutation_raise(tmp_path):
    def modify_in_place(mlp, _):
        hidden = torch.ones(32, 2, 32).requires_grad_() * 1.0
        output = mlp(hidden)[0]
        hidden.mul_(2.0)
        output.sum().backward()

    with pytest.raises((StateError, RuntimeError), match=r"in.?place"):
        train_moe_layer({"dispatch": R}, tmp_path, modify_in_place)


@pytest.mark.parametrize(
    ("name", "owner", "field", "value"),
    [
        ("gathered", "config", "num_layers", 2),
        ("padded", "config", "num_layers", 2),
        ("grouped", "config", "fp8", "e4m3"),
        ("grouped", "config", "moe_latent_size", 16),
        ("grouped", "config", "moe_input_jitter_eps", 0.1),
        ("grouped", "config", "moe_apply_probs_on_input", True),
        ("grouped", "mlp.token_dispatcher", "ep_size", 2),
        ("grouped", "mlp.token_dispatcher", "tp_size", 2),
        ("grouped", "mlp.experts", "_make_fused_impl", None),
    ],
)
def test_dispatch_is_not_recomputed_for_received_or_modified_tokens(name, owner, field, value, monkeypatch):
    with stand_ins(name), make_trainer(FLAGS[name], None) as trainer:
        layer = trainer.chunks[0].decoder.layers[0]
        assert ("dispatch" in find_units(layer)) == (name == "grouped")
        target = functools.reduce(getattr, owner.split("."), layer)
        monkeypatch.setattr(type(target) if field == "_make_fused_impl" else target, field, value, raising=False)
        assert "dispatch" not in find_units(layer)
