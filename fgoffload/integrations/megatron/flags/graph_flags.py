"""Adds and reads Megatron's CUDA graph flags under their megatron-core 0.19 names, whichever version is installed.

Before 0.18, `--cuda-graph-modules` was called `--cuda-graph-scope`, and whole-step graphs were one of the scopes of `local`
graphs. Both spellings are accepted and converted to the fields of the installed version.
"""

from collections.abc import Collection, Mapping
from typing import Any

from fgoffload.cuda_graphs import FULL_ITERATION, GRAPH_IMPLS, LOCAL, NO_GRAPHS
from fgoffload.integrations.megatron.flags.field_flags import FlagParser, one_of

_IMPL, _MODULES, _SCOPE = "cuda_graph_impl", "cuda_graph_modules", "cuda_graph_scope"

GRAPH_FIELDS = frozenset({_IMPL, _MODULES, _SCOPE})
"""Config fields, from all versions, for which `add_graph_flags` adds flags."""

_WHOLE_LAYER = "full"
_LAYER_MODULES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")


def add_graph_flags(parser: FlagParser) -> None:
    """Add the CUDA graph flags to `parser`, in all spellings."""
    modules = one_of((*_LAYER_MODULES, _WHOLE_LAYER, FULL_ITERATION))
    parser.add_argument("--cuda-graph-impl", dest=_IMPL, type=one_of(GRAPH_IMPLS))
    parser.add_argument("--cuda-graph-modules", "--cuda-graph-scope", dest=_MODULES, nargs="*", type=modules)


def read_graph_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the graph fields set in `values`, under their names in 0.19. An empty list of modules means the whole layer."""
    fields = {name: values[name] for name in (_IMPL, _MODULES) if name in values}
    modules = fields.get(_MODULES)
    if modules == [_WHOLE_LAYER]:
        fields[_MODULES] = []
    if modules == [FULL_ITERATION] and fields.get(_IMPL) in (LOCAL, FULL_ITERATION):
        fields |= {_IMPL: FULL_ITERATION, _MODULES: []}
    return fields


def to_config_fields(fields: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Convert graph fields from their names in 0.19 to those of the installed config class, whose fields are `known`."""
    changed = dict(fields)
    if changed.get(_IMPL, NO_GRAPHS) != NO_GRAPHS:
        changed.setdefault(_MODULES, [])  # same meaning as the default, "full", which is deprecated
    if _MODULES in known or _MODULES not in changed:
        return changed
    changed[_SCOPE] = changed.pop(_MODULES)
    if changed.get(_IMPL) == FULL_ITERATION:
        changed |= {_IMPL: LOCAL, _SCOPE: [*changed[_SCOPE], FULL_ITERATION]}
    return changed
