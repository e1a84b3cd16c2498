"""Runs Transformer Engine's attention once in a separate process, and checks which kernel and cuDNN it uses.

If a process loads two copies of cuDNN, Transformer Engine silently falls back to the unfused kernel. That kernel saves a
sequence x sequence matrix for each head, so training needs much more memory.
"""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from fgoffload.doctor.machine import CommandResult, Machine
from fgoffload.doctor.result import CheckResult, fail, ok, skip

PROBE = """
import torch
from transformer_engine.pytorch import DotProductAttention
attention = DotProductAttention(num_attention_heads=8, kv_channels=64, attn_mask_type="causal")
query, key, value = (torch.randn(512, 2, 8, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3))
attention(query, key, value).sum().backward()
torch.cuda.synchronize()
print("probe: forward and backward ran", flush=True)
print(open("/proc/self/maps").read(), flush=True)
"""
"""Program that runs causal attention in bf16, with sizes that both fused and flash attention support."""

_VARIABLES = {"NVTE_DEBUG": "1", "NVTE_DEBUG_LEVEL": "2"}
_SELECTED = re.compile(r"Selected backend = (\w+)")
_CUDNN = re.compile(r"(/\S*libcudnn[\w.]*\.so[\w.]*)")


def check_attention(machine: Machine, reason: str) -> Iterator[CheckResult]:
    """Run attention once, and check its kernel and its cuDNN. If no GPU is usable, `reason` explains why."""
    if not reason and machine.find_version("transformer-engine") is None:
        reason = "Transformer Engine is not installed"
    if reason:
        yield skip("attention kernel", reason)
        yield skip("cuDNN", reason)
        return
    ended = machine.run(("python", "-c", PROBE), _VARIABLES)
    yield check_kernel(ended)
    yield check_cudnn(ended.output)


def check_kernel(ended: CommandResult) -> CheckResult:
    """Check that the probe ran, and that it used a fused or flash kernel."""
    name = "attention kernel"
    if ended.exit_code != 0 or "probe: forward and backward ran" not in ended.output:
        lines = [line for line in ended.output.strip().splitlines() if line.strip()]
        fix = "install Transformer Engine for this torch and CUDA, and check that `import transformer_engine.pytorch` works"
        return fail(name, f"Transformer Engine's attention failed: {lines[-1] if lines else 'no output'}", fix)
    selected = _SELECTED.findall(ended.output)
    if not selected:
        return skip(name, "Transformer Engine does not report the selected kernel")
    if selected[-1].startswith("Unfused"):
        found = f"{selected[-1]}, which saves a sequence x sequence matrix for each head"
        why = "set NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 to log why the other kernels are unavailable"
        return fail(name, found, f"see the rows 'cuDNN' and 'attention allowed'; {why}")
    return ok(name, selected[-1])


def check_cudnn(output: str) -> CheckResult:
    """Check that the probe loaded cuDNN from a single folder."""
    folders = sorted({str(PurePosixPath(path).parent) for path in _CUDNN.findall(output)})
    if not folders:
        return skip("cuDNN", "the attention kernel did not load cuDNN")
    if len(folders) > 1:
        bundled = next((folder for folder in folders if "nvidia/cudnn" in folder), folders[0])
        home, path = PurePosixPath(bundled).parent, f"{bundled}:$LD_LIBRARY_PATH"
        found = f"several copies in one process: {' and '.join(folders)}; attention falls back to the unfused kernel"
        return fail("cuDNN", found, f"put torch's copy first: export CUDNN_HOME={home} LD_LIBRARY_PATH={path}")
    return ok("cuDNN", f"one copy, in {folders[0]}")
