"""The settings of a benchmark: their names and Megatron flags.

    baseline
    recompute:full                      recompute:layernorm+moe_act
    megatron:core_attn+attn_proj        megatron:expert_fc1/layernorm+moe_act     megatron:expert_fc1@0.5
    ours:expert_fc1                     ours:layer_input/full                     ours:expert_fc1~delay
    te-layers:3                         save_on_cpu
    plan:plan.json                      budget:18.9GiB

Modules after megatron: or ours: are offloaded; modules after recompute: or / are recomputed. The number after @ is the
fraction to offload (`--activation-offload-fraction`). ~delay adds `--delay-offload-until-cuda-graph`. The flags for CUDA
graphs belong in the argument file, so that `baseline` captures the same graphs.
"""

import dataclasses
import enum
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fgoffload.config import OffloadConfig
from fgoffload.errors import ConfigError
from fgoffload.tags import RECOMPUTE_MODULES
from fgoffload.units import format_bytes, parse_bytes

FULL = "full"
"""Value that selects full recompute instead of recompute modules."""

_FULL_RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
_SWITCH = "--fine-grained-activation-offloading"
_OFF = "--no-fine-grained-activation-offloading"
_DELAY, _NO_DELAY = "--delay-offload-until-cuda-graph", "--no-delay-offload-until-cuda-graph"

_NEWER_RECOMPUTE_MODULES = ("gdn_norm_out", "gdp_in_proj", "gdp_qkv", "mhc")
"""Additional values of `--recompute-modules` in Megatron-Core's development branch as of 2026-08-22."""


class System(enum.Enum):
    """Systems to compare. Each has its own color in the plot."""

    BASELINE = "baseline"  # everything stays on the device
    RECOMPUTE = "recompute"  # Megatron-Core's full or selective recompute
    MEGATRON = "megatron"  # Megatron-Core's offload engine
    LAYERS = "te-layers"  # Transformer Engine's offload of whole layers
    SAVE_ON_CPU = "save_on_cpu"  # PyTorch's offload of all saved tensors
    OURS = "ours"  # this package, with selected modules
    PLAN = "plan"  # this package, with a plan file
    BUDGET = "budget"  # this package, with a plan for a memory budget


OWN_HOOKS = (System.MEGATRON, System.LAYERS, System.SAVE_ON_CPU)
"""Systems with their own saved-tensor hooks. The simulator does not model them, and the ledger cannot see their tensors."""


class ProcessKind(enum.Enum):
    """Kinds of processes for different settings, since libraries read environment variables at import or keep global state."""

    MAIN = "main"  # all settings except those of the kinds below
    MEGATRON = "megatron"  # NVTE_CPU_OFFLOAD_V1=1, which Megatron-Core's engine requires
    LAYERS = "te-layers"  # Transformer Engine's offload keeps state for the whole process

    @property
    def environment(self) -> Mapping[str, str | None]:
        """The environment variables to set before heavy imports; None unsets a variable."""
        return {"NVTE_CPU_OFFLOAD_V1": "1" if self is ProcessKind.MEGATRON else None}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One configuration that the benchmark measures."""

    system: System
    modules: tuple[str, ...] = ()
    """Tags to offload, for `megatron` and `ours`."""
    fraction: float = 1.0
    """Fraction of the sites of `modules` to offload, from 0 to 1."""
    is_delayed: bool = False
    """Whether copies start only after the launch of the next CUDA graph, for `megatron` and `ours`."""
    recompute: tuple[str, ...] = ()
    """Megatron's recompute modules, or only `full`."""
    layers: int | None = None
    """Number of layers that Transformer Engine offloads."""
    plan: Path | None = None
    """Plan file of a `plan` setting, or of a `budget` setting after planning."""
    budget_bytes: int | None = None

    @property
    def name(self) -> str:
        """The name as users type it, but without the folder and suffix of a plan file."""
        recomputed = "+".join(self.recompute)
        what = {
            System.RECOMPUTE: recomputed,
            System.MEGATRON: "+".join(self.modules),
            System.OURS: "+".join(self.modules),
            System.LAYERS: str(self.layers),
            System.PLAN: "" if self.plan is None else self.plan.stem,
            System.BUDGET: "" if self.budget_bytes is None else format_bytes(self.budget_bytes).replace(" ", ""),
        }.get(self.system, "")
        name = f"{self.system.value}:{what}" if what else self.system.value
        if self.fraction != 1.0:
            name += f"@{self.fraction:g}"
        if self.is_delayed:
            name += "~delay"
        return f"{name}/{recomputed}" if recomputed and self.system is not System.RECOMPUTE else name

    @property
    def process(self) -> ProcessKind:
        """The kind of process that runs this setting."""
        own = {System.MEGATRON: ProcessKind.MEGATRON, System.LAYERS: ProcessKind.LAYERS}
        return own.get(self.system, ProcessKind.MAIN)

    def list_flags(self) -> tuple[str, ...]:
        """Return the Megatron flags that this setting adds. Raise ConfigError for a budget without a plan."""
        recompute: tuple[str, ...] = ()
        if self.recompute == (FULL,):
            recompute = _FULL_RECOMPUTE
        elif self.recompute:
            recompute = ("--recompute-granularity", "selective", "--recompute-modules", *self.recompute)
        return (*self._list_offload_flags(), *recompute)

    def with_plan(self, plan: Path) -> "Setting":
        """Return a copy of this setting that executes `plan`."""
        return dataclasses.replace(self, plan=plan)

    def _list_offload_flags(self) -> Iterator[str]:
        if self.system is System.LAYERS:
            yield from (_OFF, "--cpu-offloading", "--cpu-offloading-num-layers", str(self.layers))
        elif self.system in (System.MEGATRON, System.OURS):
            yield from (_SWITCH, "--offload-modules", *self.modules, "--activation-offload-fraction", str(self.fraction))
            yield _DELAY if self.is_delayed else _NO_DELAY
        elif self.plan is not None:
            # An empty list overrides the modules of the argument file.
            yield from (_SWITCH, "--offload-modules", "--activation-offload-fraction", "1.0", "--offload-plan", str(self.plan))
        elif self.system in (System.BASELINE, System.RECOMPUTE, System.SAVE_ON_CPU):
            yield _OFF
        else:
            # Do not run the setting without offload: its row would look like the result of a plan.
            raise ConfigError(
                f"{self.name} needs a plan. Pass a plan file, for example plan:plan.json, or use fgoffload bench --budgets, "
                "which makes a plan."
            )


BASELINE = Setting(system=System.BASELINE)

_EXAMPLES = {
    System.RECOMPUTE: "recompute:full",
    System.MEGATRON: "megatron:core_attn+attn_proj",
    System.OURS: "ours:core_attn+attn_proj",
    System.LAYERS: "te-layers:3",
    System.PLAN: "plan:plan.json",
    System.BUDGET: "budget:18.9GiB",
}
"""An example setting for each system whose name needs further text, such as modules."""

_NAME = re.compile(
    r"(?P<system>[\w-]+)(?::(?P<what>[^@/~]+))?(?:@(?P<fraction>[0-9]*\.?[0-9]+))?(?P<delay>~delay)?(?:/(?P<recompute>.+))?"
)


def parse_setting(text: str) -> Setting:
    """Parse the name of a setting. Raise ConfigError with an example if `text` is not a setting."""
    if text.startswith(f"{System.PLAN.value}:") and (path := text.partition(":")[2]):
        # A path can contain characters that have a special meaning in other settings.
        return Setting(system=System.PLAN, plan=Path(path))
    match = _NAME.fullmatch(text)
    system = next((one for one in System if match and one.value == match["system"]), None)
    if match is None or system is None:
        raise ConfigError(
            f"--settings {text!r} is not a setting. Start with one of: {' '.join(one.value for one in System)}. For example: "
            "ours:core_attn+attn_proj."
        )
    what, has_modules = match["what"] or "", system in (System.MEGATRON, System.OURS)
    if bool(what) != (system in _EXAMPLES):
        example = _EXAMPLES.get(system, system.value)
        raise ConfigError(f"--settings {text!r} is not a valid {system.value} setting. Use, for example, {example}.")
    if not has_modules and any(match[name] is not None for name in ("fraction", "delay", "recompute")):
        raise ConfigError(f"--settings {text!r}: a fraction (@), ~delay and recompute (/) need megatron or ours with modules.")
    recompute = tuple((what if system is System.RECOMPUTE else match["recompute"] or "").split("+"))
    setting = Setting(
        system=system,
        modules=tuple(what.split("+")) if has_modules else (),
        fraction=float(match["fraction"] or 1),
        is_delayed=match["delay"] is not None,
        recompute=() if recompute == ("",) else recompute,
        layers=_read_layers(text, what) if system is System.LAYERS else None,
        budget_bytes=parse_bytes(what, name=f"--settings {text}:", needs_unit=True) if system is System.BUDGET else None,
    )
    if has_modules:
        try:
            OffloadConfig(offload_modules=setting.modules, activation_offload_fraction=setting.fraction)
        except ConfigError as error:
            raise ConfigError(f"--settings {text!r}: {error}") from error
    known = (*RECOMPUTE_MODULES, *_NEWER_RECOMPUTE_MODULES)
    for name in setting.recompute:
        # Check only the name. If the installed Megatron-Core does not support the module, only that row fails.
        if name not in known and setting.recompute != (FULL,):
            raise ConfigError(f"--settings {text!r}: {name!r} is not a recompute module. Use one of: {' '.join(known)}.")
    return setting


def list_default_settings(transformer: Mapping[str, Any]) -> tuple[Setting, ...]:
    """Return the settings to measure by default for a model with these Megatron config fields, `baseline` first."""
    recomputes, modules = list_recomputes(transformer), tuple(_list_module_sets(transformer))
    found = [BASELINE, *(Setting(system=System.RECOMPUTE, recompute=one) for one in recomputes)]
    found.append(Setting(system=System.OURS, modules=("layer_input",), recompute=(FULL,)))
    found += [Setting(system=System.OURS, modules=one, recompute=also) for one, also in modules]
    found.append(Setting(system=System.SAVE_ON_CPU))
    if transformer.get("transformer_impl") == "transformer_engine":
        found += [Setting(system=System.MEGATRON, modules=one, recompute=also) for one, also in modules]
        if transformer.get("pipeline_model_parallel_size", 1) == 1:
            layers = transformer["num_layers"]
            counts = sorted({max(1, layers // 3), max(1, 2 * layers // 3)} - {layers})
            found += [Setting(system=System.LAYERS, layers=count) for count in counts]
    return tuple(found)


def list_recomputes(transformer: Mapping[str, Any]) -> Sequence[tuple[str, ...]]:
    """Return the sets of recompute modules to measure by default for a model, `full` first."""
    is_latent, has_experts = bool(transformer.get("multi_latent_attention")), bool(transformer.get("num_moe_experts"))
    norms = ("layernorm",) if has_experts or is_latent else ()  # otherwise fused into the linear layers after them
    # Only grouped experts have a separate module for their activation.
    activations = ("moe_act",) if has_experts and transformer.get("moe_grouped_gemm") else ()
    # Recompute of an MLP with biases hangs in backward; see `trainer.limits`.
    whole = ("moe",) if has_experts else ("mlp",) if transformer.get("add_bias_linear") is False else ()
    sets = [(FULL,), norms, activations, whole, (*norms, *activations), (*norms, *whole), ("core_attn",)]
    if is_latent:
        up = "mla_up_proj"
        sets += [(up,), (up, *norms, *activations), (up, *norms, *whole)]
    return list(dict.fromkeys(one for one in sets if one))


def choose_settings(words: Iterable[str], defaults: Sequence[Setting], extra: Sequence[Setting] = ()) -> tuple[Setting, ...]:
    """Return the settings to measure, without duplicates and with `baseline` first.

    Each of `words` is a setting, or a system, which selects all settings of this system in `defaults` and `extra`. Without
    words, all of `defaults` are selected. Settings in `extra` are always included.
    """
    systems = {one.value: one for one in System}
    chosen = [BASELINE]
    for word in words:
        own = [setting for setting in (*defaults, *extra) if setting.system is systems.get(word)]
        chosen += own or [parse_setting(word)]
    return tuple(dict.fromkeys((*(chosen if words else defaults), *extra)))


def check_names(settings: Iterable[Setting]) -> None:
    """Raise ConfigError if two settings have the same name, for example plan files in different folders."""
    seen: set[str] = set()
    for setting in settings:
        if setting.name in seen:
            raise ConfigError(f"two settings have the name {setting.name}. Rename one of the plan files.")
        seen.add(setting.name)


def _list_module_sets(transformer: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Yield sets of modules to offload, each with modules to recompute. Megatron-Core's engine also supports these sets."""
    attention = ("core_attn", "attn_proj")
    if not transformer.get("num_moe_experts"):
        yield from ((attention, ()), (("qkv_linear", *attention), ()))
        return
    sets: tuple[tuple[str, ...], ...] = (("expert_fc1",), attention, (*attention, "expert_fc1"))
    yield from ((one, ()) for one in (*sets, ("qkv_linear", *attention, "mlp_norm", "expert_fc1", "moe_act")))
    if transformer.get("moe_grouped_gemm"):
        yield from ((one, ("layernorm", "moe_act")) for one in (sets[0], sets[-1]))
    # If the experts are recomputed, only attention tensors can be offloaded.
    yield from ((one, ("layernorm", "moe")) for one in (attention, ("qkv_linear", *attention)))


def _read_layers(text: str, what: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,5}", what):
        raise ConfigError(f"--settings {text!r}: {what!r} is not a number of layers. Use a whole number of at least 1.")
    return int(what)
