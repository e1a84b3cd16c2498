"""Runs every example and checks its output."""

import importlib.util
import re
from pathlib import Path

import pytest
from support.commands import NOT_NEEDED, run_commands

LOGGED = r"\{'loss': .*\}"
OFFLOADED = r"\{'loss': .*'offload/saved_gib': '0\.0\d+', 'offload/percent': '9\d\.\d+', 'offload/wait_ms': .*\}"
ENDED = r"\{'train_runtime': .*\}"
PACKAGES = {
    "06_trainer.py": ("transformers", "accelerate"),
    "07_trl.py": ("trl", "datasets", "pandas"),
    "09_qlora.py": ("accelerate", "peft", "bitsandbytes"),
}
"""Packages that an example needs besides torch. Each example runs without the other packages in `NOT_NEEDED`."""
SLOW = ("07_trl.py", "09_qlora.py")
"""Examples that spend most of their time on imports. `tests/unit/huggingface` tests the same runs in seconds."""

ROOT = Path(__file__).parents[2]
EXPECTED_LINES = {
    "01_plain_pytorch.py": [
        r"estimate: 64\.\d+ MiB saved, 56\.\d+ MiB would be offloaded \(87\.\d%\), 56\.\d+ MiB of host memory needed",
        r"gradients bitwise identical: True",
        r"attn: 20\.\d+ MiB to the host, 4 groups",
        r"mlp: 36\.\d+ MiB to the host, 4 groups",
    ],
    "02_megatron_in_code.py": [
        *(rf"step {step}: loss \d\.\d+" for step in (1, 2, 3)),
        *(rf"{tag}: .+ offloaded, .+ reloaded" for tag in ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")),
        *(rf"{tag}: .+ offloaded, .+ reloaded" for tag in ("expert_fc1", "moe_act")),
    ],
    "03_block_of_code.py": [
        *[r"loss (\d\.\d{6}), offloaded \1, equal: True"] * 3,
        r"72\.00 MiB to the host in \d+ groups",
        r"host memory in use: 0 B",
    ],
    "04_by_hand.py": [
        r"the region offloaded 4\.00 MiB from 2 saved tensors",
        r"on the host: True",
        r"reloaded and bitwise identical: True",
    ],
    "05_engine_alone.py": [
        r"gradients bitwise identical: True",
        r"offloaded 8\.00 MiB, reloaded .+, cancelled .+",
        r"host memory in use: 0 B",
    ],
    "06_trainer.py": [*[LOGGED] * 3, ENDED, *[OFFLOADED] * 3, ENDED, r"losses are bitwise identical: True"],
    "07_trl.py": [*[LOGGED] * 3, ENDED, *[LOGGED] * 3, ENDED, r"\d+\.\d+ MiB to the host"],
    "08_fsdp2.py": [
        r"checkpoints False: bitwise identical True, 48\.00 MiB to the host",
        r"checkpoints True: bitwise identical True, 4\.00 MiB to the host",
    ],
    "09_qlora.py": [*[OFFLOADED] * 3, ENDED],
}


def test_every_example_has_expected_output():
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(EXPECTED_LINES)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in EXPECTED_LINES])
def test_an_example_prints_its_expected_output(name):
    missing = [package for package in PACKAGES.get(name, ()) if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    path = ROOT / "examples" / name
    assert "Expected output:" in path.read_text(encoding="utf-8")
    (done,) = run_commands((str(path),), without=[package for package in NOT_NEEDED if package not in PACKAGES.get(name, ())])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(EXPECTED_LINES[name])
    for line, pattern in zip(lines, EXPECTED_LINES[name], strict=True):
        assert re.fullmatch(pattern, line), line
