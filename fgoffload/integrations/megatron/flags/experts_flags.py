"""Builds the planner's `ExpertsShape` and `RouterShape` from Megatron's flags."""

import contextlib
import dataclasses
import logging
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast

from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.flags.field_flags import name_flags
from fgoffload.planner.model.layer_shape import DEFAULT_IMBALANCE, Dispatcher, ExpertsShape, RouterShape

logger = logging.getLogger(__name__)

_Balancing = Literal["none", "aux_loss", "seq_aux_loss"]

_ROUTER_FLAGS = {
    "score_function": "moe_router_score_function",
    "has_pre_softmax": "moe_router_pre_softmax",
    "has_expert_bias": "moe_router_enable_expert_bias",
}
_SWITCHED_FIELDS = {"has_fused_permutation": "moe_permute_fusion", "has_shared_overlap": "moe_shared_expert_overlap"}
_FIELD_FLAGS = {
    **_ROUTER_FLAGS,
    **_SWITCHED_FIELDS,
    "num_experts": "num_experts",
    "topk": "moe_router_topk",
    "ffn_hidden_size": "moe_ffn_hidden_size",
    "shared_ffn_hidden_size": "moe_shared_expert_intermediate_size",
}
"""Flag for each field of `ExpertsShape` and `RouterShape`, spelled with `_` instead of `-`."""

_DEFAULT_TOPK = 2
"""Default number of experts per token. Source: `TransformerConfig.moe_router_topk`, megatron-core 0.16.1."""


def make_experts(values: Mapping[str, Any]) -> ExpertsShape | None:
    """Return the shape of a layer's experts, or None for a dense model. Raise a ConfigError for an invalid value.

    The keys of `values` are flag names with `_` instead of `-`. Absent flags have no entry.
    """
    if "num_experts" not in values:
        return None
    channels = values.get("moe_ffn_hidden_size", values.get("ffn_hidden_size"))
    if channels is None:
        raise ConfigError(
            "--moe-ffn-hidden-size is missing. Pass the FFN hidden size of an expert, for example --moe-ffn-hidden-size 2048."
        )
    with _named_by_flags():
        experts = ExpertsShape(
            num_experts=values["num_experts"],
            topk=values.get("moe_router_topk", _DEFAULT_TOPK),
            ffn_hidden_size=channels,
            shared_ffn_hidden_size=values.get("moe_shared_expert_intermediate_size", 0),
            imbalance=DEFAULT_IMBALANCE,
            limited_groups=_find_groups(values),
            has_grouped_linears=values.get("moe_grouped_gemm", False),
        )
    return change_experts(experts, values)


def change_experts(experts: ExpertsShape, values: Mapping[str, Any]) -> ExpertsShape:
    """Return `experts` with the routing, dispatch and fusion options from flags. Raise a ConfigError for an invalid value."""
    switched = {field: values[flag] for field, flag in _SWITCHED_FIELDS.items() if flag in values}
    imbalance = 1.0 if values.get("moe_router_force_load_balancing") else experts.imbalance
    with _named_by_flags():
        return dataclasses.replace(
            experts,
            router=_change_router(experts.router, values),
            dispatcher=_find_dispatcher(values),
            imbalance=_limit_imbalance(imbalance, values),
            **switched,
        )


def _limit_imbalance(imbalance: float, values: Mapping[str, Any]) -> float:
    """Return the ratio of the busiest rank's tokens to the mean number per rank, limited by the experts' capacity."""
    capacity = values.get("moe_expert_capacity_factor")
    if capacity is not None and values.get("moe_pad_expert_input_to_capacity"):
        return max(1.0, float(capacity))
    limits = [limit for limit in (capacity, values.get("moe_expert_rank_capacity_factor")) if limit is not None]
    return max(1.0, float(min([imbalance, *limits])))


def _find_groups(values: Mapping[str, Any]) -> tuple[int, int] | None:
    chosen, groups = values.get("moe_router_group_topk"), values.get("moe_router_num_groups")
    if chosen is None or groups is None:
        return None
    if not 1 <= chosen <= groups:
        raise ConfigError(
            f"--moe-router-group-topk {chosen} is not between 1 and --moe-router-num-groups {groups}. Use 1 to {groups}."
        )
    return chosen, groups


def _find_dispatcher(values: Mapping[str, Any]) -> Dispatcher:
    """Return the token dispatcher. Plans assume that flex dispatchers save the same bytes as the all-to-all dispatcher."""
    kind = values.get("moe_token_dispatcher_type", "alltoall")
    if kind == "allgather":
        logger.warning(
            "--moe-token-dispatcher-type allgather is treated as alltoall, so predicted memory and times are too low."
        )
    if kind != "flex":
        return "alltoall"
    backend: Dispatcher = values.get("moe_flex_dispatcher_backend", "deepep")
    logger.warning("--moe-flex-dispatcher-backend %s: its buffers are not modeled, so predicted memory is too low.", backend)
    return backend


def _change_router(router: RouterShape, values: Mapping[str, Any]) -> RouterShape:
    changes = {field: values[flag] for field, flag in _ROUTER_FLAGS.items() if flag in values}
    if changes.get("score_function") == "sigmoid":
        changes["has_pre_softmax"] = False  # the flag has no effect with sigmoid
    if values.get("moe_router_dtype") == "fp64":
        raise ConfigError(
            "--moe-router-dtype fp64 is not supported: the router's saved bytes are known only for fp32. Pass "
            "--moe-router-dtype fp32."
        )
    if "moe_router_dtype" in values:
        changes["dtype_bytes"] = 4
    if "moe_aux_loss_coeff" in values:
        changes["balancing"] = _find_balancing(values)
    return dataclasses.replace(router, **changes)


@contextlib.contextmanager
def _named_by_flags() -> Iterator[None]:
    """Replace field names with flags in ConfigErrors raised in the `with` body."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(name_flags(str(error), _FIELD_FLAGS)) from error


def _find_balancing(values: Mapping[str, Any]) -> _Balancing:
    kinds: list[str] = values.get("moe_router_load_balancing_type", ["aux_loss"])
    coefficients: list[float] = values["moe_aux_loss_coeff"]
    kind = next((kind for kind, weight in zip(kinds, coefficients, strict=False) if weight), "none")
    if kind == "global_aux_loss":
        logger.warning(
            "--moe-router-load-balancing-type global_aux_loss is treated as aux_loss, because its own saved bytes are unknown."
        )
        kind = "aux_loss"
    known = typing.get_args(_Balancing)
    if kind not in known:
        raise ConfigError(
            f"--moe-router-load-balancing-type {kind} is not supported: the router's saved bytes are unknown. Pass one of: "
            f"{', '.join(known)}."
        )
    return cast(_Balancing, kind)
