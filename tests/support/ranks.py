"""Trains a small plain PyTorch model in several processes with and without offload, and returns the results of each.

Tests import `run_ranks`, which runs this file as a script in each process. The processes connect through a file, not a port,
and the parent ends all of them on a failure or timeout. One start runs many scenarios, since it takes most of the time.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 90
"""The timeout of a whole run."""
IMPORTS = ("torch.distributed.fsdp", "torch._dynamo", "fgoffload.integrations.pytorch")
STEPS, MICROBATCHES = 2, 2
BUDGET = "1040KiB"
"""The memory budget of the small model for a microbatch."""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One training run."""

    wrapper: str
    """`ddp`, `fsdp`, or `fsdp2`."""
    offload: str
    """`none`, `modules`, `before` (`modules` before the model is wrapped), `block` or `budget`. With FSDP also `switch`
    (`enable_activation_offloading`), `checkpoints` (the same with activation checkpoints) and `later` (after a step)."""
    reshard: bool = True
    """FSDP2: free gathered parameters after forward, and gather them again for backward."""
    dtype: str = "float32"
    """FSDP2: the dtype of parameters in compute."""


@dataclasses.dataclass(frozen=True)
class RankResult:
    """Results of one process in one scenario."""

    losses: list[float]
    gradients: list[str]
    """Digests of this rank's shards of all gradients, by step and parameter."""
    moved: dict[str, int]
    """Bytes offloaded in the last step, by tag."""
    asked: list[list[int]]
    """The distinct shapes of all tensors that the filter saw."""
    gathers: int
    """The number of all-gathers in all steps."""
    plan: list[str] = dataclasses.field(default_factory=list)
    """The treatment of each layer under a memory budget."""


def run_ranks(scenarios: Sequence[Scenario], *, processes: int = 2) -> dict[Scenario, list[RankResult]]:
    """Run `scenarios` one after another in `processes` processes, and return their results by rank."""
    from support.processes import run_processes  # not at the top, since a script has no package

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "request.json").write_text(json.dumps([dataclasses.asdict(scenario) for scenario in scenarios]))
        run_processes(__file__, folder, processes=processes, timeout_seconds=TIMEOUT_SECONDS, imports=IMPORTS)
        found = [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(processes)]
        return {scenario: [RankResult(**rank[index]) for rank in found] for index, scenario in enumerate(scenarios)}


def _train(scenario: Scenario, rank: int) -> RankResult:
    import torch

    import fgoffload
    from fgoffload.integrations.pytorch import ModelOffload, SavedTensors
    from support.models import ALL, PATTERNS, Net, make_inputs, make_net

    asked: set[tuple[int, ...]] = set()
    config = dataclasses.replace(ALL, keep=lambda tensor: asked.add(tuple(tensor.shape)))
    net = make_net()
    handle: ModelOffload | SavedTensors | None = None
    if scenario.offload == "before":
        handle = fgoffload.offload(net, PATTERNS, config, device="cpu")
    model = _wrap(net, scenario)
    handle = handle or _offload(model, scenario, config)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    losses, gradients, moved, gathers_before = [], [], {}, len(_gathers)
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            with _accumulate(model, is_last=microbatch == MICROBATCHES - 1):
                with handle if isinstance(handle, SavedTensors) else contextlib.nullcontext():
                    loss = model(make_inputs(seed=100 * rank + 10 * step + microbatch))
                loss.backward()
                losses.append(loss.item())
        for parameter in (one for one in net.parameters() if one.grad is not None):  # FSDP1: this rank may have no shard
            gradients.append(_digest(_get_local(parameter.grad)))
        optimizer.step()
        optimizer.zero_grad()
        if handle is not None:
            moved = {tag: numbers.d2h_bytes for tag, numbers in handle.stats().tags.items()}
    plan = fgoffload.explain(handle).splitlines()[1:] if scenario.offload == "budget" else []
    if handle is not None:
        handle.close()
    assert isinstance(net, Net)
    return RankResult(losses, gradients, moved, sorted(map(list, asked)), len(_gathers) - gathers_before, plan)


def _repeat_step(scenario: Scenario, rank: int) -> RankResult:
    """Train two steps, restore the state before the second, and repeat it with offload.

    The result has the losses during and after the step of both runs, and digests of all parameters after each.
    """
    import copy

    import torch

    from fgoffload.integrations.fsdp import enable_activation_offloading
    from support.models import ALL, make_inputs, make_net

    net = make_net()
    model = _wrap(net, scenario)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    def train(step: int) -> float:
        loss = model(make_inputs(seed=100 * rank + step))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return float(loss.item())

    train(0)
    parameters = [_get_local(parameter).detach().clone() for parameter in net.parameters()]
    states = [copy.deepcopy(one.state_dict()) for one in (optimizer, scheduler)]
    losses, digests, moved = [], [], {}
    for is_offloaded in (False, True):
        handle = enable_activation_offloading(model, scenario.wrapper, config=ALL) if is_offloaded else None
        losses.append(train(1))
        with torch.no_grad():
            losses.append(float(model(make_inputs(seed=7)).item()))
        digests += [_digest(_get_local(parameter).detach()) for parameter in net.parameters()]
        if handle is not None:
            moved = {tag: numbers.d2h_bytes for tag, numbers in handle.stats().tags.items()}
            handle.close()
        for parameter, before in zip(net.parameters(), parameters, strict=True):
            _get_local(parameter).detach().copy_(before)
        for one, state in zip((optimizer, scheduler), states, strict=True):
            one.load_state_dict(copy.deepcopy(state))
    return RankResult(losses, digests, moved, [], 0)


def _get_local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _digest(tensor: Any) -> str:
    import torch

    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _offload(model: Any, scenario: Scenario, config: Any) -> Any:
    import fgoffload
    from fgoffload.integrations.fsdp import enable_activation_offloading
    from support.models import PATTERNS

    if scenario.offload == "modules":
        return fgoffload.offload(model, PATTERNS, config, device="cpu")
    if scenario.offload == "budget":
        return fgoffload.offload(model, memory=BUDGET, config=config, device="cpu")
    if scenario.offload == "block":
        return fgoffload.saved_tensors(config, group_bytes=20_000, device="cpu")
    if scenario.offload in ("switch", "checkpoints"):
        return enable_activation_offloading(model, scenario.wrapper, scenario.offload == "checkpoints", config=config)
    return None


_gathers: list[str] = []
"""One entry for each all-gather of this process."""


def _count_gathers() -> None:
    import torch.distributed as dist

    names = ("all_gather_single", "all_gather_into_tensor", "all_gather")  # the first is new in torch 2.13
    for name in filter(functools.partial(hasattr, dist), names):
        gather = getattr(dist, name)

        def count(*args: Any, _name: str = name, _gather: Any = gather, **kwargs: Any) -> Any:
            _gathers.append(_name)
            return _gather(*args, **kwargs)

        setattr(dist, name, count)


def _wrap(net: Any, scenario: Scenario) -> Any:
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    from support.models import Block

    if scenario.wrapper == "ddp":
        return torch.nn.parallel.DistributedDataParallel(net)
    if scenario.wrapper == "fsdp":
        return FullyShardedDataParallel(
            net, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), use_orig_params=True
        )
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, scenario.dtype), reduce_dtype=torch.float32)
    for layer in net.layers:
        fully_shard(layer, reshard_after_forward=scenario.reshard, mp_policy=policy)
    return fully_shard(net, reshard_after_forward=scenario.reshard, mp_policy=policy)


def _accumulate(model: Any, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
    """Reduce gradients only in the last microbatch."""
    if hasattr(model, "no_sync"):
        return contextlib.nullcontext() if is_last else model.no_sync()
    model.set_requires_gradient_sync(is_last)
    return contextlib.nullcontext()


def _main(rank: int, processes: int, folder: Path) -> None:
    import torch

    scenarios = [Scenario(**scenario) for scenario in json.loads((folder / "request.json").read_text())]
    store = torch.distributed.FileStore(str(folder / "store"), processes)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    _count_gathers()
    results = [dataclasses.asdict((_repeat_step if one.offload == "later" else _train)(one, rank)) for one in scenarios]
    torch.distributed.destroy_process_group()
    (folder / f"result-{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    _main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
