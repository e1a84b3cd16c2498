"""Activation offload options for Megatron-Core, checked at construction.

Fields are named after Megatron's flags. For a flag that takes a size as text (`60GiB`), the field is in bytes and its name ends
with `_bytes`.
"""

import argparse
import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fgoffload.defaults import DEFAULT_MIN_OFFLOADED_TENSOR_SIZE, DEFAULT_PREFETCH_BYTES, DEFAULT_WINDOW_BYTES
from fgoffload.errors import ConfigError
from fgoffload.tags import TagRegistry, default_tags
from fgoffload.transfer_schedule import TransferPolicy
from fgoffload.units import check_bytes, format_bytes, parse_bytes

AUTO = "auto"
"""Value of `offload_modules` that makes fgoffload measure the first step and plan from the measurements."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """Activation offload options for Megatron-Core. Pass None instead of a config to disable offload.

    Args:
        offload_modules: Tags to offload, for example `core_attn` and `attn_proj`. `offload_plan` overrides them.
            With `auto`, fgoffload measures the first step and plans the rest to fit `offload_memory_budget_bytes`.
        min_offloaded_tensor_size: Storages with fewer saved elements stay on the GPU.
        activation_offload_fraction: Fraction of each model chunk's sites to offload, from 0 to 1. Tensors of the sites
            that forward reaches last stay on the GPU.
        delay_offload_until_cuda_graph: Whether to delay each group's copies until after the next CUDA graph launch, when the
            CPU is idle.
        delta_offload_bytes_across_pp_ranks: From the second step on, each pipeline rank offloads this many fewer bytes per step
            than the previous rank.
        offload_plan: Plan file with an action for each site: keep, recompute or offload.
        offload_memory_budget_bytes: Limit on peak allocated GPU memory. Used only with `auto`.
        offload_host_budget_bytes: Limit on this rank's host memory. By default, the ranks of a node share 60% of the
            node's free memory equally. Tensors that do not fit stay on the GPU.
        offload_window_bytes: Bytes that may be in flight to the host before compute waits.
        offload_prefetch_bytes: Bytes that may be reloaded before backward needs them.
        tags: Tags that `offload_modules` accepts.
    """

    offload_modules: tuple[str, ...]
    min_offloaded_tensor_size: int = DEFAULT_MIN_OFFLOADED_TENSOR_SIZE
    activation_offload_fraction: float = 1.0
    delay_offload_until_cuda_graph: bool = False
    delta_offload_bytes_across_pp_ranks: int = 0
    offload_plan: Path | None = None
    offload_memory_budget_bytes: int | None = None
    offload_host_budget_bytes: int | None = None
    offload_window_bytes: int = DEFAULT_WINDOW_BYTES
    offload_prefetch_bytes: int = DEFAULT_PREFETCH_BYTES
    tags: TagRegistry = dataclasses.field(default_factory=default_tags)

    def __post_init__(self) -> None:
        """Check every field. Error messages give the flag, the value, the limit and the fix."""
        if self.offload_plan is not None:
            object.__setattr__(self, "offload_plan", Path(self.offload_plan))  # strings are accepted too
        _check_sequence_of_names(self.offload_modules)
        if not self.offload_modules and self.offload_plan is None:
            raise ConfigError(
                "--fine-grained-activation-offloading is on, but --offload-modules is empty, so nothing would be offloaded. "
                f"Add at least one of: {' '.join(self.tags.names)}."
            )
        if self.offload_modules and AUTO not in self.offload_modules:
            self.tags.check(self.offload_modules)
        size, fraction = self.min_offloaded_tensor_size, self.activation_offload_fraction
        if isinstance(size, bool) or not isinstance(size, int):
            raise ConfigError(f"--min-offloaded-tensor-size {size!r} is not a whole number of elements. Pass an int.")
        if size < 0:
            raise ConfigError(f"--min-offloaded-tensor-size {size} is below 0. Use 0 or more; 0 offloads storages of any size.")
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
            raise ConfigError(f"--activation-offload-fraction {fraction!r} is not a number. Use a fraction, for example 0.8.")
        if not (math.isfinite(fraction) and 0 <= fraction <= 1):
            raise ConfigError(f"--activation-offload-fraction {fraction} is not between 0 and 1. Use, for example, 0.8.")
        budget_bytes = self.offload_host_budget_bytes
        if budget_bytes is not None and check_bytes(budget_bytes, name="--offload-host-budget") <= 0:
            raise ConfigError(f"--offload-host-budget {budget_bytes} leaves no host memory. Use a size above 0, such as 64GiB.")
        self._check_auto()
        self._check_choice()
        _ = self.transfer_policy  # checks the window and prefetch sizes

    @property
    def is_auto(self) -> bool:
        """Return whether fgoffload measures the first step and plans from the measurements."""
        return self.offload_modules == (AUTO,)

    @property
    def transfer_policy(self) -> TransferPolicy:
        """Return the window and prefetch sizes."""
        return TransferPolicy(window_bytes=self.offload_window_bytes, prefetch_bytes=self.offload_prefetch_bytes)

    def check_recompute(self, recompute_modules: Iterable[str]) -> None:
        """Reject tags whose modules Megatron recomputes selectively, because these modules save nothing to offload.

        Args:
            recompute_modules: Values of `--recompute-modules` with `--recompute-granularity selective`.

        Raises:
            ConfigError: The module of a tag is recomputed.
        """
        recomputed = set(recompute_modules)
        if self.is_auto:
            if not recomputed:
                return
            raise ConfigError(
                "--offload-modules auto chooses recompute layer by layer, but --recompute-modules "
                f"{' '.join(sorted(recomputed))} applies to all layers. Remove Megatron's recompute flags."
            )
        for name in self.offload_modules:
            for module in self.tags.get(name).excluded_by:
                if module in recomputed:
                    raise ConfigError(
                        f"--offload-modules {name!r} and --recompute-modules {module!r} are mutually exclusive: recomputed "
                        "tensors are not saved, so nothing would be offloaded. Remove one of them."
                    )

    def _check_choice(self) -> None:
        """Reject a negative delta between ranks, and a plan or `auto` combined with another way to choose what to offload."""
        delta_bytes = self.delta_offload_bytes_across_pp_ranks
        flag = "--delta-offload-bytes-across-pp-ranks"
        if check_bytes(delta_bytes, name=flag) < 0:
            raise ConfigError(f"{flag} {delta_bytes} is below 0. Use 0 or more bytes; 0 treats all ranks alike.")
        given = {
            f"--offload-modules {AUTO}": self.is_auto,
            "--offload-plan": self.offload_plan is not None,
            "--activation-offload-fraction": self.activation_offload_fraction != 1.0,
            flag: delta_bytes != 0,
        }
        choices = [name for name, is_given in given.items() if is_given]
        if len(choices) > 1 and (self.is_auto or self.offload_plan is not None):
            raise ConfigError(f"{choices[0]} and {choices[1]} both choose what to offload. Use one of them.")

    def _check_auto(self) -> None:
        """Reject an invalid budget, `auto` without a budget, `auto` with other tags, and a budget without `auto`."""
        flag, budget_bytes = "--offload-memory-budget", self.offload_memory_budget_bytes
        if budget_bytes is not None and check_bytes(budget_bytes, name=flag) <= 0:
            raise ConfigError(f"{flag} {budget_bytes} leaves no GPU memory. Use a size above 0, for example 60GiB.")
        if AUTO in self.offload_modules and not self.is_auto:
            others = " ".join(name for name in self.offload_modules if name != AUTO)
            raise ConfigError(f"--offload-modules lists {AUTO} and {others}, but auto chooses among all tags. Use auto alone.")
        if not self.is_auto:
            if budget_bytes is not None:
                raise ConfigError(
                    f"{flag} {format_bytes(budget_bytes)} has no effect without --offload-modules {AUTO}. Add "
                    f"--offload-modules {AUTO}, or remove {flag}."
                )
            return
        if budget_bytes is None:
            raise ConfigError(f"--offload-modules {AUTO} needs a memory budget. Add {flag}, for example {flag} 60GiB.")

    @classmethod
    def from_flags(cls, flags: argparse.Namespace, *, tags: TagRegistry | None = None) -> "OffloadConfig | None":
        """Build the config from parsed Megatron flags. Return None if offload is off.

        Args:
            flags: Parsed flags that `add_fine_grained_offload_args` adds. Missing flags get their defaults.
            tags: Tags that `--offload-modules` accepts. None means `default_tags()`.

        Raises:
            ConfigError: A flag has an invalid value.
        """
        if not getattr(flags, "fine_grained_activation_offloading", False):
            return None
        options: dict[str, Any] = {field.name: getattr(flags, field.name, None) for field in dataclasses.fields(cls)}
        options |= {"offload_modules": tuple(options["offload_modules"] or ()), "tags": tags}
        for name in ("offload_memory_budget", "offload_host_budget", "offload_window", "offload_prefetch"):
            text = getattr(flags, name, None)
            if text == AUTO and name == "offload_memory_budget":
                raise ConfigError(
                    f"--offload-memory-budget {AUTO} works only with a transformers Trainer. For Megatron, use a size, "
                    "for example 60GiB."
                )
            if text is not None:
                flag = "--" + name.replace("_", "-")
                options[f"{name}_bytes"] = parse_bytes(str(text), name=flag, needs_unit=True)
        return cls(**{name: value for name, value in options.items() if value is not None})


def _check_sequence_of_names(modules: object) -> None:
    """Reject values that are not a sequence of names. A string would be split into its characters."""
    if isinstance(modules, Sequence) and not isinstance(modules, str) and all(isinstance(name, str) for name in modules):
        return
    wanted = (modules,) if isinstance(modules, str) else ("core_attn",)
    raise ConfigError(f"offload_modules {modules!r} is not a sequence of tags. Pass a sequence, for example {wanted!r}.")
