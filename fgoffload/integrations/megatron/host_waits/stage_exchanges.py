"""Exchanges tensors between pipeline stages with fewer host waits than Megatron, none of which waits for offload copies.

[Note: Waits after an exchange]
Megatron's host waits for the whole device after each exchange, because in old PyTorch versions, the requests of
`batch_isend_irecv` did not order later work after the exchange. PyTorch 1.13 fixed that
(https://github.com/pytorch/pytorch/pull/82450): the current stream waits for the exchange before it runs later work or reuses
freed memory. So the host need not wait, and Megatron has removed one of its two waits
(https://github.com/NVIDIA/Megatron-LM/pull/6919). Without these waits, the host begins each pass ahead of the device.

The host must not get too far ahead. It frees offloaded tensors only after their copies to the host are done, and no copy of a
pass is done before the device begins the pass. If layers synchronize on token counts, those waits limit the lead. Otherwise the
host still waits for the current stream, but not for copies on other streams.
"""

from collections.abc import Sequence
from typing import Any

import torch

from fgoffload.integrations.megatron.adapter.regions import GetOffload
from fgoffload.integrations.megatron.host_waits.host_writes import write_to_host

NO_SHAPE = (0, 0, 0)
"""Shape that Megatron sends if a stage has no tensor to send."""


def communicate(get_offload: GetOffload, original: Any, communicator: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `P2PCommunicator._communicate` with fewer host waits. See [Note: Waits after an exchange]."""
    config = communicator.config
    if not (config.batch_p2p_comm and config.batch_p2p_sync):
        return original(communicator, *args, **kwargs)
    config.batch_p2p_sync = False
    try:
        result = original(communicator, *args, **kwargs)
    finally:
        config.batch_p2p_sync = True
    if not get_offload().has_waiting_layers:
        # Limits how far the host gets ahead of the device.
        torch.cuda.current_stream().synchronize()
    return result


def communicate_shapes(
    original: Any,
    communicator: Any,
    tensor_send_next: torch.Tensor | None,
    tensor_send_prev: torch.Tensor | None,
    recv_prev: bool,  # noqa: FBT001 - Megatron's signature
    recv_next: bool,  # noqa: FBT001
) -> Any:
    """Replace `P2PCommunicator._communicate_shapes` on GPUs, to exchange the shapes without a copy engine."""
    sent = [tensor for tensor in (tensor_send_next, tensor_send_prev) if tensor is not None]
    # A stage that sends nothing uses the current GPU, if there is one.
    is_cuda = sent[0].is_cuda if sent else torch.cuda.is_available()
    if communicator.config.use_ring_exchange_p2p or not is_cuda:
        return original(communicator, tensor_send_next, tensor_send_prev, recv_prev, recv_next)
    device = torch.device("cuda", torch.cuda.current_device())
    return exchange_shapes(communicator, tensor_send_next, tensor_send_prev, recv_prev, recv_next, device=device)


def exchange_shapes(
    communicator: Any,
    tensor_send_next: torch.Tensor | None,
    tensor_send_prev: torch.Tensor | None,
    recv_prev: bool,  # noqa: FBT001 - Megatron's signature
    recv_next: bool,  # noqa: FBT001
    *,
    device: torch.device,
) -> tuple[Sequence[int], Sequence[int]]:
    """Exchange the shapes of the next tensors with the neighboring stages. Return the shapes from both neighbors.

    Messages have the same order as in Megatron, so a neighbor may run Megatron's own method. Kernels write the shapes to the
    device and to the host, without the copy engines. `NO_SHAPE` stands for a missing tensor.

    Source of the order: `_communicate_shapes` of megatron/core/pipeline_parallel/p2p_communication.py, megatron-core 0.16.1.
    """
    from_previous, from_next = (_make_buffer(device) if expected else None for expected in (recv_prev, recv_next))
    send, receive = torch.distributed.isend, torch.distributed.irecv
    exchanges = (
        (send, _write_shape(tensor_send_prev, device), communicator.prev_rank),
        (receive, from_previous, communicator.prev_rank),
        (send, _write_shape(tensor_send_next, device), communicator.next_rank),
        (receive, from_next, communicator.next_rank),
    )
    operations = [
        torch.distributed.P2POp(operation, shape, rank, communicator.pp_group)
        for operation, shape, rank in exchanges
        if shape is not None
    ]
    for request in torch.distributed.batch_isend_irecv(operations) if operations else ():
        request.wait()
    hosts = [shape if shape is None else _copy_to_host(shape) for shape in (from_previous, from_next)]
    if device.type == "cuda":
        # The host needs the shapes now. See [Note: Waits after an exchange].
        torch.cuda.current_stream().synchronize()
    previous, following = (NO_SHAPE if host is None else host.tolist() for host in hosts)
    return previous, following


def _make_buffer(device: torch.device) -> torch.Tensor:
    return torch.empty(len(NO_SHAPE), dtype=torch.int64, device=device)


def _write_shape(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """Return the shape of `tensor` in a device tensor, which kernels fill."""
    if tensor is None:
        return None
    buffer = _make_buffer(device)
    for index, size in enumerate(tensor.shape):
        buffer[index].fill_(size)  # the size is a kernel argument; a list would need a copy
    return buffer


def _copy_to_host(shape: torch.Tensor) -> torch.Tensor:
    host = write_to_host(shape)
    return shape if host is None else host
