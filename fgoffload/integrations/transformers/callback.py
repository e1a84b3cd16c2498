"""Callback that offloads the activations of a `Trainer`'s model."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import strtobool

from fgoffload.engine import TimeKind
from fgoffload.errors import ConfigError
from fgoffload.integrations.budget.memory import check_memory
from fgoffload.integrations.pytorch.entry import explain, offload
from fgoffload.integrations.pytorch.layers import find_layers
from fgoffload.integrations.pytorch.model import ModelOffload, find_handle, offload_sites
from fgoffload.integrations.pytorch.patterns import Patterns, find_sites, read_patterns
from fgoffload.integrations.pytorch.tensors import check_config
from fgoffload.transfer_config import TransferConfig
from fgoffload.units import GIB, is_size

logger = logging.getLogger(__name__)

KEY = "activation_cpu_offload"
"""Key in `fsdp_config` that enables or disables offload, with or without FSDP."""

REPORTED_STEP = 3
"""Step after which the saved memory is logged. Earlier steps may be warm-up."""


class OffloadCallback(TrainerCallback):  # type: ignore[misc]
    """Offloads the activations of a trainer's model while it trains.

        trainer = Trainer(model, args, train_dataset=data, callbacks=[OffloadCallback()])

    Losses and gradients are bitwise identical to training without offload. With gradient checkpointing, the layers' inputs are
    offloaded. The callback adds three numbers from the last step to the trainer's log. `offload/saved_gib` is the memory freed
    between a forward and its backward. `offload/percent` is the same memory as a percentage of the bytes that the layers save;
    it is omitted with a memory budget. `offload/wait_ms` is how long compute waited for copies.
    `fsdp_config={"activation_cpu_offload": False}` disables offload.

    Args:
        modules: Globs as for `fgoffload.offload`. None selects the layers.
        config: Offload options. `offload/wait_ms` is logged only with `is_timed`.
        memory: Memory budget as for `fgoffload.offload`, instead of `modules`. During training, the callback sets `use_cache`
            of the model's config to False, since a layer that fills a cache cannot be recomputed.
        memory_reserve: Memory that `auto` reserves, as for `fgoffload.offload`.
    """

    def __init__(
        self,
        modules: "Patterns | None" = None,
        config: TransferConfig | None = None,
        *,
        memory: str | int | None = None,
        memory_reserve: str | int | None = None,
    ) -> None:
        if memory is not None and modules is not None:
            raise ConfigError(f"modules {modules!r} and memory {memory!r} are mutually exclusive. Pass only one of them.")
        if isinstance(modules, str) and is_size(modules):
            raise ConfigError(f"modules {modules!r} is a size. For a memory budget, use OffloadCallback(memory={modules!r}).")
        if memory is not None or memory_reserve is not None:
            check_memory(memory, reserve=memory_reserve)
        if modules is not None:
            tags = read_patterns(modules)
            modules = modules if isinstance(modules, Mapping) else list(tags)  # an iterator would be empty the second time
        self.handle: ModelOffload | None = None
        """Handle of the model. None outside training."""
        self._modules = modules
        self._memory, self._memory_reserve = memory, memory_reserve
        self._config = check_config(config) or TransferConfig(is_timed=True)
        self._plan = ""
        """Text of the last plan, for `explain` after training."""
        self._steps = 0
        self._uses_cache: bool | None = None
        """Value of the model config's `use_cache` before training with a memory budget."""

    def add_to(self, trainer: Trainer) -> None:
        """Add the callback to `trainer` before all others, so that reporters such as TensorBoard and W&B see its numbers."""
        trainer.callback_handler.callbacks.insert(0, self)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: Any = None, **others: Any
    ) -> None:
        """Offload the model. If training restarts with a smaller batch, reuse the handle."""
        self._steps = 0
        if not _read_switch((args.fsdp_config or {}).get(KEY, True)):
            logger.info("offload is off: fsdp_config has %s=False.", KEY)
            return
        if self.handle is None:
            earlier = find_handle(model)
            if earlier is not None and earlier.trainer_state is state:
                logger.warning(
                    "The Trainer has two OffloadCallbacks and uses only the first. Remove the other. `fgoffload run` adds one "
                    "unless Trainer(callbacks=[...]) contains one."
                )
                return
            _warn_of_other_offload(args, model)
            if earlier is not None and earlier.trainer_state is not None:
                earlier.close()  # an error or interrupt ended that training run
        elif not self.handle.is_for(model):
            self.handle.close()
        elif self._memory is not None:
            self.handle.trainer_state = state
            return
        if self._memory is not None:
            self._uses_cache = getattr(getattr(model, "config", None), "use_cache", None)
            if self._uses_cache:
                model.config.use_cache = False
            self.handle = offload(model, config=self._config, memory=self._memory, memory_reserve=self._memory_reserve)
        else:
            sites = find_layers(model) if self._modules is None else find_sites(model, self._modules)
            self.handle = offload_sites(model, sites, self._config)
        self.handle.trainer_state = state

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Read the statistics of the step, and log the saved memory once. With a budget, the handle logs its plan instead."""
        if self.handle is None:
            return
        self.handle.stats()
        self._steps += 1
        if self._memory is None and self._steps == REPORTED_STEP and state.is_local_process_zero:
            totals = self.handle.last_totals
            logger.info("Memory saved: %.3g GiB (%.0f%%)", totals.freed_bytes_per_forward / GIB, totals.percent)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, float] | None = None,
        **others: Any,
    ) -> None:
        """Add the last step's numbers to the trainer's log."""
        if self.handle is None or logs is None or "loss" not in logs:
            return
        totals, stats = self.handle.last_totals, self.handle.last_stats
        found = {"offload/saved_gib": totals.freed_bytes_per_forward / GIB}
        if self._memory is None:
            found["offload/percent"] = totals.percent
        if stats is not None and self.handle.config.is_timed:
            found["offload/wait_ms"] = 1e3 * sum(tag.seconds.get(TimeKind.WAIT, 0.0) for tag in stats.tags.values())
        logs.update(found)
        state.log_history[-1].update(found)  # the last entry is a copy of `logs`

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: Any = None, **others: Any
    ) -> None:
        """Restore the model's forwards and config, and release all host memory."""
        if self._uses_cache and model is not None:
            model.config.use_cache = True
        if self.handle is not None:
            if self._memory is not None:
                self._plan = explain(self.handle)
            self.handle.close()
            self.handle = None

    def explain(self) -> str:
        """Return the plan of the current or last training run. See `fgoffload.explain`.

        Raises:
            ConfigError: The callback has no memory budget, or training has not begun.
        """
        if self._memory is None:
            raise ConfigError(
                "this OffloadCallback has no memory budget, so it has no plan. See `offload/saved_gib` in the Trainer's log, "
                "or use OffloadCallback(memory=...)."
            )
        if self.handle is None and not self._plan:
            raise ConfigError("this OffloadCallback has no plan yet. Call `explain` after training has begun.")
        return self._plan if self.handle is None else explain(self.handle)


def _read_switch(value: Any) -> bool:
    """Return `value` as a bool. Strings such as `no` are parsed as in other keys of `fsdp_config`."""
    try:
        return bool(strtobool(value) if isinstance(value, str) else value)
    except ValueError:
        raise ConfigError(f"fsdp_config has {KEY}={value!r}, which is not a boolean. Use True or False.") from None


def _warn_of_other_offload(args: Any, model: torch.nn.Module) -> None:
    """Warn if another kind of activation offload is enabled, in `args` or by wrappers in `model`."""
    others = []
    names = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")  # if both exist, their values are equal
    found = next((name for name in names if (getattr(args, name, None) or {}).get("offload")), None)
    if found:
        others.append(f"transformers' {found}={{'offload': True}}")
    if any(type(module).__name__ == "OffloadWrapper" for module in model.modules()):
        others.append("accelerate's fsdp_activation_checkpointing_offload")
    if getattr(args, "activation_offloading", False):
        others.append("TRL's activation_offloading")
    if others:
        logger.warning(
            "%s %s also on. Only one of them offloads: the innermost saved-tensor hooks take every tensor. Disable the others. "
            "Results stay bitwise identical.",
            " and ".join(others),
            "are" if len(others) > 1 else "is",
        )
