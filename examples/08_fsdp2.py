"""FSDP2: one call offloads the layers' saved tensors, or checkpoints the layers and offloads their inputs.

    python examples/08_fsdp2.py
    torchrun --nproc-per-node 2 examples/08_fsdp2.py

Expected output: a line for each setting. It shows whether the gradients are bitwise identical, and the offloaded bytes.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fgoffload.integrations.fsdp import enable_activation_offloading
from fgoffload.units import format_bytes

device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else torch.device("cpu")
dist.init_process_group(**({} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}))
torch.manual_seed(0)
model = nn.Sequential(*[nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True, device=device) for _ in range(4)])
for part in (*model, model):
    fully_shard(part, mesh=dist.init_device_mesh(device.type, (dist.get_world_size(),)))


def compute_gradients() -> list[torch.Tensor]:
    """Run forward and backward, and return this rank's shards of the gradients."""
    model.zero_grad()
    model(torch.ones(2, 512, 256, device=device)).square().mean().backward()
    return [parameter.grad.to_local().clone() for parameter in model.parameters()]


expected = compute_gradients()
for enable_ckpt in (False, True):
    with enable_activation_offloading(model, "fsdp2", enable_ckpt) as handle:
        is_identical, offloaded = all(map(torch.equal, expected, compute_gradients())), format_bytes(handle.stats().d2h_bytes)
    print(f"checkpoints {enable_ckpt}: bitwise identical {is_identical}, {offloaded} to the host")
dist.destroy_process_group()
