"""Recomputes the first part of a module's forward, up to the submodule that saves the part's result.

    forward     first part, which saves only its input  ->  submodule  ->  rest
    backward    rest  ->  recompute of the first part  ->  submodule  ->  first part

The submodule saves a placeholder for the result of the first part (`detached_outputs.py`). The result is emptied after the
submodule's forward and recomputed before its backward (`reruns.py`). So only the first part's input is saved, and the submodule
runs only once.

Any other result of the first part would stay on the GPU, and plans would not count it. So a module has a unit only if it runs
Megatron's own forward and uses no other result. This excludes attention with an output gate, and experts with biases.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch

from fgoffload.engine import is_inert
from fgoffload.errors import StateError
from fgoffload.integrations.megatron.adapter.regions import GetOffload, find_tensor, run_in_site
from fgoffload.integrations.megatron.adapter.sites import has_op_fuser, is_quantized, save_whole_input
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.integrations.megatron.patching.methods import wrap_method
from fgoffload.integrations.megatron.patching.patches import Patches
from fgoffload.integrations.megatron.recompute.reruns import RandomUse, Rerun, as_tuple


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartialRecompute:
    """Recomputable first part of one module's forward."""

    unit: str
    """Name of the unit in `fgoffload.tags.RECOMPUTE_UNITS`, which is also the tag of the first part's input."""
    module: Any
    until: str
    """Name of the module's attribute for the submodule that is called right after the first part."""
    until_tag: str | None = None
    """Tag of the submodule, if Megatron opens its region before the call. Our hooks disable that region, so we open another."""

    @property
    def submodule(self) -> Any:
        """Return the submodule that is called right after the first part."""
        return getattr(self.module, self.until)


def find_partial_recomputes(layer: Any) -> dict[str, PartialRecompute]:
    """Return the parts of a Megatron layer's modules that can be recomputed, keyed by unit."""
    if is_quantized(layer.config):
        return {}  # a recompute would quantize a second time, which would change the scaling
    attention, mlp = layer.self_attention, layer.mlp
    experts = getattr(mlp, "experts", None)
    parts = []
    if _runs_forward_of(attention, "attention:Attention") and not getattr(layer.config, "attention_output_gate", False):
        parts.append(PartialRecompute(unit="qkv_linear", module=attention, until="core_attention", until_tag="core_attn"))
    if _runs_forward_of(mlp, "mlp:MLP"):
        parts.append(PartialRecompute(unit="mlp_fc1", module=mlp, until="linear_fc2"))
    if _runs_forward_of(experts, "moe.experts:TEGroupedMLP") and not layer.config.add_bias_linear:
        parts.append(PartialRecompute(unit="expert_fc1", module=experts, until="linear_fc2"))
    return {part.unit: part for part in parts}


def _runs_forward_of(module: Any, path: str) -> bool:
    """Return whether `module` runs the unchanged forward of class `path` in `megatron.core.transformer`."""
    module_name, _, class_name = path.partition(":")
    base = getattr(load_module(f"megatron.core.transformer.{module_name}"), class_name)
    return isinstance(module, base) and type(module).forward is base.forward and not has_op_fuser(module)


def recompute_part(patches: Patches, get_offload: GetOffload, part: PartialRecompute) -> None:
    """Recompute `part` in backward, until `patches` are removed."""
    forward = _PartialForward(part, get_offload)
    if part.unit == "expert_fc1":
        save_whole_input(patches, part.submodule)  # one placeholder, not one per expert
    wrap_method(patches, part.module, "forward", forward.run_module)
    wrap_method(patches, part.submodule, "forward", forward.run_submodule)


Arguments = dict[int | str, Any]
"""Arguments of a method call, keyed by position (from 0) or by name."""


def collect_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Return the positional and keyword arguments of a call in one dict."""
    return dict(enumerate(args)) | kwargs


def call_with(method: Callable[..., Any], owner: Any, arguments: Arguments) -> Any:
    """Call `method` of `owner` with `arguments`, and return its result."""
    positional = [value for key, value in arguments.items() if isinstance(key, int)]
    return method(owner, *positional, **{key: value for key, value in arguments.items() if isinstance(key, str)})


def _find_results(module_args: Arguments, submodule_args: Arguments) -> dict[int | str, torch.Tensor]:
    """Return the first part's results: floating-point tensors in `submodule_args`, without inputs and parameters."""
    known = {id(one) for one in module_args.values()}
    tensors = {key: one for key, one in submodule_args.items() if isinstance(one, torch.Tensor) and id(one) not in known}
    return {key: one for key, one in tensors.items() if one.is_floating_point() and not isinstance(one, torch.nn.Parameter)}


class _SubmoduleReached(BaseException):
    """Ends a recompute at the submodule. Not an `Exception`, so that Megatron's handlers do not catch it."""

    def __init__(self, results: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.results = results


class _PartialForward:
    """State of a module's forward during its first part. These modules do not nest, so only one forward runs at a time."""

    def __init__(self, part: PartialRecompute, get_offload: GetOffload) -> None:
        self._part = part
        self._get_offload = get_offload
        self._random_use = RandomUse()
        self._override: Callable[[Any, Any, Arguments], Any] | None = None
        """Called instead of the submodule's next forward, with that forward, the submodule and its arguments."""

    def run_module(self, original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        module_args = collect_arguments(args, kwargs)
        inputs = {key: one for key, one in module_args.items() if isinstance(one, torch.Tensor) and one.requires_grad}
        # After frozen layers, no input needs a gradient, and nothing is recomputed.
        if is_inert() or not inputs:
            return original(module, *args, **kwargs)
        # `recompute` lives as long as the graph. It must not hold the input, which may be offloaded.
        kept, keys = module_args | dict.fromkeys(inputs), tuple(inputs)

        def recompute(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self._recompute(original, module, kept | dict(zip(keys, tensors, strict=True)))

        offload, tensors = self._get_offload(), tuple(inputs.values())
        name = f"{self._part.unit} of {type(module).__name__}"
        known = offload.open_reruns.find_outputs()  # a norm before the module may also be recomputed
        begin = functools.partial(Rerun, recompute, tensors, name=name, random_use=self._random_use, known_outputs=known)
        rerun = run_in_site(offload, self._part.unit, tensors[0], begin)
        with contextlib.ExitStack() as dropping:
            dropping.enter_context(rerun)
            self._override = functools.partial(self._end, offload, module_args, rerun, dropping)
            try:
                result = original(module, *args, **kwargs)
                self._check_reached()
            finally:
                self._override = None
        return result

    def run_submodule(self, original: Any, submodule: Any, *args: Any, **kwargs: Any) -> Any:
        override, self._override = self._override, None
        if override is None:
            return original(submodule, *args, **kwargs)
        return override(original, submodule, collect_arguments(args, kwargs))

    def _end(
        self,
        offload: Any,
        module_args: Arguments,
        rerun: Rerun,
        dropping: contextlib.ExitStack,
        original: Any,
        submodule: Any,
        submodule_args: Arguments,
    ) -> Any:
        """End the first part, and call `submodule`, which may belong to a copy of the part's module.

        Saved tensors are dropped until `dropping` is closed.
        """
        results = _find_results(module_args, submodule_args)
        outputs = self._copy_views(results.values())
        dropping.close()
        offload.keep_recomputed(rerun.record_outputs(outputs))
        arguments = submodule_args | dict(zip(results, outputs, strict=True))

        def use() -> Any:
            with rerun.detached_outputs():
                return call_with(original, submodule, arguments)

        result = run_in_site(offload, self._part.until_tag, outputs[0], use)
        rerun.empty_outputs()
        # This runs after all hooks on the submodule's output, even those added later. One of them may recompute the norm
        # before a dense MLP. That recompute restores the input of the first part, so it must run first.
        node = torch.autograd.graph.get_gradient_edge(find_tensor(as_tuple(result), {})).node
        node.register_prehook(lambda gradients: rerun.run())
        return result

    def _recompute(self, original: Any, module: Any, module_args: Arguments) -> tuple[torch.Tensor, ...]:
        def stop(_: Any, submodule: Any, submodule_args: Arguments) -> NoReturn:
            raise _SubmoduleReached(self._copy_views(_find_results(module_args, submodule_args).values()))

        self._override = stop
        try:
            with _closed_ranges(), Patches() as patches:
                # Wrap the submodule here, because its original forward may be restored before the last backward.
                wrap_method(patches, getattr(module, self._part.until), "forward", self.run_submodule)
                call_with(original, module, module_args)
            self._check_reached()
        except _SubmoduleReached as reached:
            return reached.results
        finally:
            self._override = None
        raise AssertionError  # unreachable, because `stop` raises

    def _check_reached(self) -> None:
        if self._override is not None:
            raise StateError(
                f"The plan recomputes {self._part.unit!r}, but a forward of {type(self._part.module).__name__} did not call "
                f"its {self._part.until}, so gradients would be missing. Set {self._part.unit!r} to 'keep' in the plan."
            )

    def _copy_views(self, results: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return `results`, with views replaced by copies if the submodule would copy them and save the copies.

        Transformer Engine's attention copies query, key and value if they are not parts of one storage in a known order.
        Source: `get_qkv_layout`, Transformer Engine 2.20.
        """
        tensors = tuple(results)
        copies_views = any(base.__name__ == "TEDotProductAttention" for base in type(self._part.submodule).__mro__)
        own = (one for one in tensors if one.untyped_storage().nbytes() == one.numel() * one.element_size())
        if not copies_views or next(own, None) is None:
            return tensors
        return tuple(tensor.contiguous() for tensor in tensors)


@contextlib.contextmanager
def _closed_ranges() -> Iterator[None]:
    """Close the profiler ranges that Megatron opens inside the context and does not close after an exception."""
    utils = load_module("megatron.core.utils")
    open_ranges = getattr(utils, "_nvtx_range_messages", [])
    before = len(open_ranges)
    try:
        yield
    finally:
        while len(open_ranges) > before:
            utils.nvtx_range_pop(msg=open_ranges[-1])
