"""Recomputes the first part of a module's forward, up to the submodule that saves its result.

    forward     first part, which saves only its input  ->  submodule  ->  rest
    backward    rest  ->  recompute of the first part  ->  submodule  ->  first part

The submodule does not save the result of the first part (`detached_outputs.py`). The result is emptied after the submodule and
recomputed before the submodule's backward (`reruns.py`). So only the first part's input is kept, and the submodule runs once.

Any other result of the first part that the rest of forward uses would stay on the GPU, and no plan would count it. So a unit
exists only if the module's forward is Megatron's own and uses no other result. That excludes an output gate and biases of the
experts' second linear.
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
    """Unit in `fgoffload.tags.RECOMPUTE_UNITS`, and tag of the first part's input."""
    module: Any
    until: str
    """Attribute name of the submodule whose call ends the part."""
    until_tag: str | None = None
    """Tag of that submodule if Megatron opens its site before the call, where our hooks make regions do nothing."""

    @property
    def submodule(self) -> Any:
        """Return the submodule whose call ends the part."""
        return getattr(self.module, self.until)


def find_partial_recomputes(layer: Any) -> dict[str, PartialRecompute]:
    """Return the first parts of a Megatron layer that can be recomputed, by unit."""
    if is_quantized(layer.config):
        return {}  # a recompute would quantize again, and so advance the scaling
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
    """Return whether `module` runs the forward of the class `path` in `megatron.core.transformer`."""
    module_name, _, class_name = path.partition(":")
    base = getattr(load_module(f"megatron.core.transformer.{module_name}"), class_name)
    return isinstance(module, base) and type(module).forward is base.forward and not has_op_fuser(module)


def run_again(patches: Patches, get_offload: GetOffload, part: PartialRecompute) -> None:
    """Recompute `part` in backward, until `patches` are removed."""
    runs = _Runs(part, get_offload)
    if part.unit == "expert_fc1":
        save_whole_input(patches, part.submodule)  # one stand-in instead of one per expert
    wrap_method(patches, part.module, "forward", runs.run_module)
    wrap_method(patches, part.submodule, "forward", runs.run_submodule)


Arguments = dict[int | str, Any]
"""Arguments of a method call, by position from 0 or by name."""


def collect_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Return all arguments of a call."""
    return dict(enumerate(args)) | kwargs


def call_with(method: Callable[..., Any], owner: Any, arguments: Arguments) -> Any:
    """Call `method` of `owner` with `arguments`, and return its result."""
    positional = [value for key, value in arguments.items() if isinstance(key, int)]
    return method(owner, *positional, **{key: value for key, value in arguments.items() if isinstance(key, str)})


def _find_made(given: Arguments, reached: Arguments) -> dict[int | str, torch.Tensor]:
    """Return the tensors in `reached` that were computed from `given`: floating-point ones, but no parameters."""
    known = {id(one) for one in given.values()}
    tensors = {key: one for key, one in reached.items() if isinstance(one, torch.Tensor) and id(one) not in known}
    return {key: one for key, one in tensors.items() if one.is_floating_point() and not isinstance(one, torch.nn.Parameter)}


class _Reached(BaseException):
    """Ends a recompute that has reached the submodule. Not an `Exception`, so that no handler catches it."""

    def __init__(self, made: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.made = made


class _Runs:
    """State of one module's forward in its first part. Such modules do not nest, so only one forward can be there."""

    def __init__(self, part: PartialRecompute, get_offload: GetOffload) -> None:
        self._part = part
        self._get_offload = get_offload
        self._random_use = RandomUse()
        self._take_over: Callable[[Any, Any, Arguments], Any] | None = None
        """Replaces the next forward of the submodule. Gets that forward, the submodule and its arguments."""

    def run_module(self, original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        given = collect_arguments(args, kwargs)
        inputs = {key: one for key, one in given.items() if isinstance(one, torch.Tensor) and one.requires_grad}
        # After frozen layers, no input needs a gradient, and nothing is recomputed.
        if is_inert() or not inputs:
            return original(module, *args, **kwargs)
        # `run_again` lives as long as the graph, and must not hold the input, which may be offloaded.
        kept, keys = given | dict.fromkeys(inputs), tuple(inputs)

        def run_again(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self._run_again(original, module, kept | dict(zip(keys, tensors, strict=True)))

        offload, tensors = self._get_offload(), tuple(inputs.values())
        name = f"{self._part.unit} of {type(module).__name__}"
        found = offload.open_reruns.find_made()  # a norm before the module may be recomputed too
        begin = functools.partial(Rerun, run_again, tensors, name=name, random_use=self._random_use, found=found)
        rerun = run_in_site(offload, self._part.unit, tensors[0], begin)
        with contextlib.ExitStack() as dropping:
            dropping.enter_context(rerun)
            self._take_over = functools.partial(self._end, offload, given, rerun, dropping)
            try:
                result = original(module, *args, **kwargs)
                self._check_reached()
            finally:
                self._take_over = None
        return result

    def run_submodule(self, original: Any, submodule: Any, *args: Any, **kwargs: Any) -> Any:
        take_over, self._take_over = self._take_over, None
        if take_over is None:
            return original(submodule, *args, **kwargs)
        return take_over(original, submodule, collect_arguments(args, kwargs))

    def _end(
        self,
        offload: Any,
        given: Arguments,
        rerun: Rerun,
        dropping: contextlib.ExitStack,
        original: Any,
        submodule: Any,
        reached: Arguments,
    ) -> Any:
        """End the first part, which got the arguments `given`, and run the submodule with the arguments `reached`.

        `dropping` drops saved tensors until it is closed. The submodule may belong to a copy of the part's module.
        """
        made = _find_made(given, reached)
        outputs = self._separate(made.values())
        dropping.close()
        offload.keep_recomputed(rerun.note_outputs(outputs))
        arguments = reached | dict(zip(made, outputs, strict=True))

        def use() -> Any:
            with rerun.detached_outputs():
                return call_with(original, submodule, arguments)

        result = run_in_site(offload, self._part.until_tag, outputs[0], use)
        rerun.empty_outputs()
        # Runs after all hooks of the submodule's output, which may include the recompute of the norm before a dense MLP. That
        # hook is added later, and must restore the input of the first part before this recompute.
        node = torch.autograd.graph.get_gradient_edge(find_tensor(as_tuple(result), {})).node
        node.register_prehook(lambda gradients: rerun.run())
        return result

    def _run_again(self, original: Any, module: Any, given: Arguments) -> tuple[torch.Tensor, ...]:
        def stop(_: Any, submodule: Any, reached: Arguments) -> NoReturn:
            raise _Reached(self._separate(_find_made(given, reached).values()))

        self._take_over = stop
        try:
            with _closed_ranges(), Patches() as patches:
                # Wrapped again, since the modules' own forward may be restored before the last backward.
                wrap_method(patches, getattr(module, self._part.until), "forward", self.run_submodule)
                call_with(original, module, given)
            self._check_reached()
        except _Reached as reached:
            return reached.made
        finally:
            self._take_over = None
        raise AssertionError  # `stop` has raised

    def _check_reached(self) -> None:
        if self._take_over is not None:
            raise StateError(
                f"The plan recomputes {self._part.unit!r}, but a forward of {type(self._part.module).__name__} did not call "
                f"its {self._part.until}: gradients would be missing. Keep {self._part.unit!r} in the plan."
            )

    def _separate(self, made: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return `made`, with copies in place of views that the submodule would copy itself, and save.

        Transformer Engine's attention copies query, key and value if they are not parts of one storage in a known order.
        Source: `get_qkv_layout`, Transformer Engine 2.20.
        """
        tensors = tuple(made)
        copies_views = any(base.__name__ == "TEDotProductAttention" for base in type(self._part.submodule).__mro__)
        own = (one for one in tensors if one.untyped_storage().nbytes() == one.numel() * one.element_size())
        if not copies_views or next(own, None) is None:
            return tensors
        return tuple(tensor.contiguous() for tensor in tensors)


@contextlib.contextmanager
def _closed_ranges() -> Iterator[None]:
    """Close the profiler ranges that Megatron opens inside and leaves open after an exception."""
    utils = load_module("megatron.core.utils")
    open_ranges = getattr(utils, "_nvtx_range_messages", [])
    before = len(open_ranges)
    try:
        yield
    finally:
        while len(open_ranges) > before:
            utils.nvtx_range_pop(msg=open_ranges[-1])
