"""Manual regions in a model's code."""

from types import TracebackType

import torch

from fgoffload.errors import ConfigError, StateError
from fgoffload.integrations.pytorch.forward import SavingRegion, find_running, record_inert
from fgoffload.integrations.pytorch.patterns import check_tag


def region(tensor: torch.Tensor, tag: str, *, layer: int | None = None) -> "PlacedRegion":
    """Return a context manager that offloads the tensors autograd saves inside it.

        with fgoffload.region(hidden, "attn") as region:
            output = attention(hidden)
            region.end(output)

    The region belongs to the innermost offloaded model or `fgoffload.saved_tensors` block that this thread is running. Outside
    of both, the region does nothing.

    Args:
        tensor: Input of the region. Backward leaves the region when it computes the gradient of this tensor.
        tag: Name of the region in the statistics.
        layer: Layer number for logs and errors. None means the layer of the enclosing region, or 0.

    Raises:
        ConfigError: `tag` is not an identifier, `tensor` is not a tensor, or `layer` is not a whole number.
    """
    check_tag(tag)
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"region {tag!r} got a {type(tensor).__name__}. Pass its input tensor.")
    if layer is not None and (isinstance(layer, bool) or not isinstance(layer, int)):
        raise ConfigError(f"layer {layer!r} of region {tag!r} is not a whole number. Pass an int or None.")
    return PlacedRegion(tensor, tag, layer)


class PlacedRegion:
    """Manual region that can be entered only once. Returned by `region`."""

    __slots__ = ("_has_ended", "_layer", "_output", "_saving", "_tag", "_tensor")

    def __init__(self, tensor: torch.Tensor, tag: str, layer: int | None) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._tag = tag
        self._layer = layer
        self._output: torch.Tensor | None = None
        self._saving: SavingRegion | None = None
        self._has_ended = False

    def end(self, output: torch.Tensor) -> None:
        """Set the region's output. The reload starts when backward computes the gradient of `output`.

        Without an output, the reload starts later, when backward unpacks the first saved tensor.

        Raises:
            ConfigError: `output` is not a tensor.
            StateError: The `with` block has ended.
        """
        if not isinstance(output, torch.Tensor):
            raise ConfigError(f"`end` of region {self._tag!r} got a {type(output).__name__}. Pass the region's output tensor.")
        if self._has_ended:
            raise StateError(f"`end` of region {self._tag!r} was called after its block. Call it inside the `with` block.")
        self._output = output

    def __enter__(self) -> "PlacedRegion":
        """Begin the region.

        Raises:
            StateError: The region was already entered.
        """
        self._enter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the region, and offload its last group unless an exception was raised."""
        self._exit(is_failed=error is not None)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter(self) -> None:
        tensor, self._tensor = self._tensor, None
        if tensor is None:
            # A second entry would lose the saved tensors of the first run and never remove its hooks from the thread.
            raise StateError(f"region {self._tag!r} was already entered. Call `fgoffload.region` for each run.")
        forward = find_running()
        if forward is None:
            return
        forward.owner.expect_tag(self._tag)
        record_inert(forward.owner, self._tag)
        self._saving = forward.begin_region(self._tag, tensor, layer=self._layer)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _exit(self, *, is_failed: bool) -> None:
        saving, self._saving = self._saving, None
        output, self._output = self._output, None
        self._has_ended = True
        if saving is not None:
            saving.close(output, is_failed=is_failed)
