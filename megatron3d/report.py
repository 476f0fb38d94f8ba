"""What a bug report should say about devices and about the axes of a mesh: measured, and naming nobody's machine.

The one idea: figures about a link are worth something where the trouble is, so each axis is timed with the collectives
that training uses on it. Everything that needs no torch (versions, system, packages) is in tools/report_env.py.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from megatron3d.comm import all_reduce, exchange, gather_objects
from megatron3d.mesh import Axis, Mesh

SMALL = 8  # bytes of a message that shows latency
LARGE_ON_CPU, LARGE_ON_GPU = 4 << 20, 64 << 20  # of one that shows bandwidth
REPEATS = 10


@dataclass(frozen=True, kw_only=True)
class AxisSpeed:
    """An axis of the mesh, as its slowest rank saw it."""

    axis: str
    size: int
    operation: str
    """all-reduce, or exchange: a swap with a neighbour, the pattern of a pipeline."""
    latency_seconds: float
    """Of an operation on 8 bytes."""
    message_bytes: int
    """Size of the tensor of the following figure."""
    seconds: float
    """Of an operation on that."""

    @property
    def bytes_per_second(self) -> float:
        """What each rank sends; for an all-reduce its 2 (n - 1) / n tensors, the usual "bus bandwidth"."""
        sent = 2 * (self.size - 1) / self.size if self.operation == "all-reduce" else 1
        return sent * self.message_bytes / self.seconds


def measure_axes(mesh: Mesh) -> list[AxisSpeed]:
    """Every axis of more than one rank; a collective call, with the same result on every rank."""
    return [_measure(axis, mesh) for axis in (mesh.tp, mesh.dp, mesh.pp) if axis.size > 1]


def _measure(axis: Axis, mesh: Mesh) -> AxisSpeed:
    operation = "exchange" if axis.name == "pp" else "all-reduce"
    large = LARGE_ON_CPU if mesh.device.type == "cpu" else LARGE_ON_GPU
    mine = [_time(operation, torch.zeros(size // 4, device=mesh.device), axis, mesh) for size in (SMALL, large)]
    latency, duration = map(max, zip(*gather_objects(mine, mesh.control), strict=True))
    return AxisSpeed(
        axis=axis.name,
        size=axis.size,
        operation=operation,
        latency_seconds=latency,
        message_bytes=large,
        seconds=duration,
    )


def _run(operation: str, x: torch.Tensor, axis: Axis) -> None:
    """One operation; in an exchange positions 0 and 1 swap, 2 and 3, ...; an odd last one rests."""
    if operation == "all-reduce":
        all_reduce(x, axis)
    elif (peer := axis.rank ^ 1) < axis.size:
        exchange(x, axis, peer)


def _time(operation: str, x: torch.Tensor, axis: Axis, mesh: Mesh) -> float:
    """Mean seconds of one operation, after one that does not count."""
    synchronize = torch.get_device_module(mesh.device).synchronize
    _run(operation, x, axis)
    synchronize()
    gather_objects(None, mesh.control)  # all begin together
    begun = time.perf_counter()
    for _ in range(REPEATS):
        _run(operation, x, axis)
    synchronize()
    return (time.perf_counter() - begun) / REPEATS


def devices() -> list[str]:
    """Name and memory of each accelerator; empty where there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    properties = torch.get_device_module(accelerator).get_device_properties
    every = [properties(index) for index in range(torch.accelerator.device_count())]
    return [f"{each.name}, {each.total_memory / 2**30:.0f} GiB" for each in every]
