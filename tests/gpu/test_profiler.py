"""Tests that profiles name the copied groups, and that copies run on separate streams."""

import json

import pytest
import torch
from support.chain import make_weights, run_chain
from torch.profiler import ProfilerActivity, profile

from fgoffload import TransferPolicy
from fgoffload.engine import AcceleratorDevice, OffloadEngine

SIZE = 1024
NBYTES = SIZE * SIZE * 2
LAYERS = 4


def test_profiles_name_the_groups_and_show_copies_on_separate_streams(tmp_path):
    weights = make_weights("cuda", LAYERS, size=SIZE)
    policy = TransferPolicy(window_bytes=0, prefetch_bytes=2 * NBYTES)
    engine = OffloadEngine(device=AcceleratorDevice(), policy=policy, host_budget_bytes=64 << 20)
    run_chain(engine, weights)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        run_chain(engine, weights)
        torch.cuda.synchronize()
    engine.close()

    names = [event.name for event in profiler.events()]
    for layer in range(1, LAYERS + 1):
        assert names.count(f"fgoffload::offload (layers.{layer}.core_attn mb=0)") >= 1
    assert any(name.startswith("fgoffload::reload (layers.") for name in names)

    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    compute = find_streams(events, "kernel", "")
    if not compute:
        pytest.skip("the profiler receives no kernels from CUPTI on this machine")
    to_host, to_device = find_streams(events, "gpu_memcpy", "Memcpy DtoH"), find_streams(events, "gpu_memcpy", "Memcpy HtoD")
    assert 1 <= len(to_host) <= 2  # see [Note: Pieces of a copy]
    assert 1 <= len(to_device) <= 2
    assert to_host.isdisjoint(to_device)
    assert compute.isdisjoint(to_host | to_device)


def find_streams(events: list[dict], category: str, name: str) -> set[int]:
    """Return the streams of large events of `category` whose names start with `name`."""
    return {
        event["args"]["stream"]
        for event in events
        if event.get("cat") == category and event["name"].startswith(name) and event["args"].get("bytes", NBYTES) >= NBYTES
    }
