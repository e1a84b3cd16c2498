"""Exchanges between pipeline stages: the host waits for no copy that is under way beside them, and with experts for nothing.

[Note: Waits behind an exchange]
Megatron has the host wait for the whole device behind each exchange, since what `batch_isend_irecv` returned once waited for
nothing. That is mended since PyTorch 1.13 (https://github.com/pytorch/pytorch/pull/82450): the current stream waits for the
exchange, and what is queued and freed behind that comes after it. So the host has nothing to wait for, and Megatron has taken
one of its two waits out (https://github.com/NVIDIA/Megatron-LM/pull/6919). Without, the host begins each pass ahead of the
device.

It must not get too far ahead: it lets go of the copies to the host that it sees done, and sees none of a pass that the device
has not begun. Where layers let it wait for their routing they bound that. Elsewhere it still waits for the current stream, and
not for copies on others.
"""

from collections.abc import Sequence
from typing import Any

import torch

from fgoffload.integrations.megatron.adapter.regions import GetOffload
from fgoffload.integrations.megatron.host_waits.host_writes import write_to_host

NO_SHAPE = (0, 0, 0)
"""What Megatron takes for the shape of nothing."""


def wrap_exchange(get_offload: GetOffload, original: Any) -> Any:
    """Return what exchanges tensors with neighbours as `original`, `P2PCommunicator._communicate`, does.

    Args:
        get_offload: Returns what knows whether layers of this stage let the host wait.
        original: Megatron's.
    """

    def communicate(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.config
        if not (config.batch_p2p_comm and config.batch_p2p_sync):
            return original(self, *args, **kwargs)
        config.batch_p2p_sync = False
        try:
            result = original(self, *args, **kwargs)
        finally:
            config.batch_p2p_sync = True
        if not get_offload().has_waiting_layers:
            # Copies that are done free their sources only where the host sees that. See [Note: Waits behind an exchange].
            torch.cuda.current_stream().synchronize()
        return result

    return communicate


def wrap_shapes(original: Any) -> Any:
    """Return what exchanges shapes with neighbours as `original`, `P2PCommunicator._communicate_shapes`, does."""

    def communicate_shapes(
        self: Any,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,  # noqa: FBT001 - Megatron's
        recv_next: bool,  # noqa: FBT001
    ) -> Any:
        sent = [tensor for tensor in (tensor_send_next, tensor_send_prev) if tensor is not None]
        # Of a stage that sends nothing the device is the current one, if there are devices.
        is_cuda = sent[0].is_cuda if sent else torch.cuda.is_available()
        if self.config.use_ring_exchange_p2p or not is_cuda:
            return original(self, tensor_send_next, tensor_send_prev, recv_prev, recv_next)
        device = torch.device("cuda", torch.cuda.current_device())
        return exchange_shapes(self, tensor_send_next, tensor_send_prev, recv_prev, recv_next, device=device)

    return communicate_shapes


def exchange_shapes(
    communicator: Any,
    tensor_send_next: torch.Tensor | None,
    tensor_send_prev: torch.Tensor | None,
    recv_prev: bool,  # noqa: FBT001 - Megatron's
    recv_next: bool,  # noqa: FBT001
    *,
    device: torch.device,
) -> tuple[Sequence[int], Sequence[int]]:
    """Tell neighbours the shapes of what comes, and return those of what they send.

    What goes over the wire is what Megatron sends, in its order, so that a neighbour may run Megatron's own. Neither way does a
    number take a copy engine: on the device kernels write them, and to the host too.

    Returns:
        Of the stage before and of the next one, each of three numbers; `NO_SHAPE` where nothing comes.

    Source: `_communicate_shapes` of megatron/core/pipeline_parallel/p2p_communication.py, megatron-core 0.16.1, for the order.
    """
    from_previous, from_next = (_make_room(device) if comes else None for comes in (recv_prev, recv_next))
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
    hosts = [shape if shape is None else _bring(shape) for shape in (from_previous, from_next)]
    if device.type == "cuda":
        # The host needs the shapes now. And what was sent may be freed behind this. See [Note: Waits behind an exchange].
        torch.cuda.current_stream().synchronize()
    previous, following = (NO_SHAPE if host is None else host.tolist() for host in hosts)
    return previous, following


def _make_room(device: torch.device) -> torch.Tensor:
    return torch.empty(len(NO_SHAPE), dtype=torch.int64, device=device)


def _write_shape(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """Return the shape of `tensor` on the device, where kernels have written it."""
    if tensor is None:
        return None
    room = _make_room(device)
    for index, size in enumerate(tensor.shape):
        room[index].fill_(size)  # the number comes with the kernel; from a list it would come by a copy
    return room


def _bring(shape: torch.Tensor) -> torch.Tensor:
    host = write_to_host(shape)
    return shape if host is None else host
