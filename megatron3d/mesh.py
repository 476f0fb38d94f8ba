"""The mesh as communicators: start and end of torch.distributed, and one `Axis` per direction.

The one idea: grid.py says who belongs together; this file creates those groups, all of them, in one order on every
rank, and hands each rank its own. There is no default group to fall back to: code communicates over the axis it was
given. The collectives themselves are in comm.py.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from megatron3d.board import Board
from megatron3d.config import ConfigError, ParallelConfig
from megatron3d.flight import SPOKEN_SECONDS, FlightRecorder
from megatron3d.grid import Grid
from megatron3d.launch import Launch

ROLL_CALL = timedelta(seconds=SPOKEN_SECONDS + 1)
"""How long the first rank to fail waits for a word from the others."""


@dataclass(frozen=True)
class Axis:
    """One rank's view of one communicator."""

    name: str
    size: int
    rank: int
    """Position of this rank within the axis."""
    ranks: tuple[int, ...]
    """World ranks of the members."""
    group: dist.ProcessGroup | None
    """None at size 1: there is nobody to talk to."""
    ordered: bool = True
    """Sums run in rank order, so that their bits depend on the values alone; False leaves the order to the back-end."""
    recorder: FlightRecorder = field(default_factory=FlightRecorder, compare=False, repr=False)
    """Where messages over this axis are entered; one for all axes of a mesh."""
    board: Board | None = field(default=None, compare=False, repr=False)
    """Memory that the members share, where all of them are CPU processes of one machine."""

    @property
    def others(self) -> tuple[int, ...]:
        """World ranks of the other members."""
        return tuple(rank for rank in self.ranks if rank != self.ranks[self.rank])


@dataclass(frozen=True)
class Mesh:
    """All axes of this rank. `pp` carries activations downstream, `pp_back` gradients upstream: one communicator per
    direction, because NCCL ignores tags. `control` is a CPU group over the world for decisions and errors."""

    grid: Grid
    rank: int
    device: torch.device
    tp: Axis
    dp: Axis
    pp: Axis
    pp_back: Axis
    world: Axis
    control: Axis
    owns_world: bool = False
    """Whether close() ends torch.distributed itself, because this mesh began it."""

    @staticmethod
    def single(device: torch.device | str = "cpu") -> Mesh:
        """A mesh of one process; torch.distributed stays untouched."""
        names = ("tp", "dp", "pp", "pp_back", "world", "control")
        tp, dp, pp, pp_back, world, control = (Axis(name, 1, 0, (0,), None) for name in names)
        return Mesh(Grid(pp=1, dp=1, tp=1), 0, torch.device(device), tp, dp, pp, pp_back, world, control)

    @staticmethod
    def create(
        parallel: ParallelConfig,
        launch: Launch,
        device: torch.device,
        *,
        deterministic: bool = False,
        init_method: str | None = None,
    ) -> Mesh:
        """The mesh of a resolved `parallel` on the processes of `launch`; a collective call.

        A world of one is `Mesh.single`. A second mesh in the same processes shares the running torch.distributed.
        """
        grid = Grid(pp=parallel.pp, dp=parallel.dp, tp=parallel.tp)
        if grid.size != launch.world_size:
            raise ConfigError(
                f"the mesh {dict(grid.sizes)} has {grid.size} ranks, the job {launch.world_size} processes"
            )
        if grid.size == 1:
            return Mesh.single(device)
        timeout = timedelta(seconds=parallel.timeout_seconds)
        backend = "nccl" if device.type == "cuda" else "gloo"
        begins = not dist.is_initialized()
        if begins:
            dist.init_process_group(
                backend,
                **({"init_method": init_method} if init_method else _meeting_point(launch, timeout)),
                rank=launch.rank,
                world_size=launch.world_size,
                timeout=timeout,
                device_id=device if device.type == "cuda" else None,
            )
        ordered = device.type == "cpu" or deterministic
        recorder = FlightRecorder()

        def axis(name: str, along: Sequence[str], on: str = backend) -> Axis:
            return _axis(name, grid.groups(*along), launch.rank, on, timeout, ordered, recorder)

        def with_board(axis: Axis) -> Axis:
            return replace(axis, board=_share_memory(axis, timeout)) if device.type == "cpu" else axis

        everyone = ("pp", "dp", "tp")
        return Mesh(
            grid,
            launch.rank,
            device,
            tp=with_board(axis("tp", ["tp"])),
            dp=with_board(axis("dp", ["dp"])),
            pp=axis("pp", ["pp"]),
            pp_back=axis("pp_back", ["pp"]),
            world=axis("world", everyone),
            control=axis("control", everyone, "gloo"),
            owns_world=begins,
        )

    @property
    def coordinates(self) -> dict[str, int]:
        """Position of this rank: {"pp": ..., "dp": ..., "tp": ...}."""
        return self.grid.coordinates(self.rank)

    @property
    def recorder(self) -> FlightRecorder:
        """Of the messages over all axes."""
        return self.world.recorder

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that speaks for all."""
        return self.rank == 0

    def meet(self) -> None:
        """Returns when all ranks have come here, so that none leaves while another still needs it."""
        if self.control.group is not None:
            with self.recorder.waiting("closing barrier", self.control.name, self.control.others):
                dist.barrier(group=self.control.group)

    def close(self) -> None:
        """Meets all ranks; then destroys this mesh's groups, and torch.distributed if this mesh began it."""
        self.meet()
        for axis in (self.tp, self.dp, self.pp, self.pp_back, self.world, self.control):
            if axis.group is not None:
                dist.destroy_process_group(axis.group)
        if self.owns_world and dist.is_initialized():
            dist.destroy_process_group()


class RollCall:
    """Who of a failing job still speaks: kept in the store that the launcher serves, since groups are broken by
    then. Where there is none (any more), nobody is absent and everybody is the first."""

    def __init__(self, launch: Launch, mesh: Mesh) -> None:
        self.mesh, self.prefix = mesh, f"megatron3d/{launch.attempt}"
        self.store: Any = None
        if not launch.from_torchrun or mesh.grid.size == 1:
            return
        with contextlib.suppress(RuntimeError, ValueError):  # the store's host may have gone
            self.store = TCPStore(
                launch.master_addr, launch.master_port, is_master=False, timeout=ROLL_CALL, wait_for_workers=False
            )

    def answer(self) -> None:
        """Says that this rank is here."""
        with contextlib.suppress(RuntimeError):
            if self.store is not None:
                self.store.set(f"{self.prefix}/{self.mesh.rank}", "here")

    def is_first(self, doing: str) -> bool:
        """Whether no other rank has come to do this before."""
        with contextlib.suppress(RuntimeError):
            return self.store is None or self.store.add(f"{self.prefix}/{doing}", 1) == 1
        return True

    def absent(self) -> list[int]:
        """Ranks that have not answered within ROLL_CALL."""
        if self.store is None:
            return []
        silent = [rank for rank in range(self.mesh.grid.size) if rank != self.mesh.rank]
        deadline = time.monotonic() + ROLL_CALL.total_seconds()
        while silent and time.monotonic() < deadline:
            time.sleep(0.2)
            silent = [rank for rank in silent if not self._has_answered(rank)]
        return silent

    def _has_answered(self, rank: int) -> bool:
        with contextlib.suppress(RuntimeError):
            return bool(self.store.check([f"{self.prefix}/{rank}"]))
        return True


def pick_device(wanted: str, launch: Launch) -> torch.device:
    """The device of this process: `auto` is the GPU with this process's local rank where there is one, else the CPU.

    Raises `ConfigError` where CUDA is asked for and absent, or where a node has fewer GPUs than processes.
    """
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and available == 0):
        return torch.device("cpu")
    if available == 0:
        raise ConfigError("--device cuda: this machine shows no CUDA device; use --device cpu, or auto")
    if launch.local_world_size > available:
        raise ConfigError(
            f"{launch.local_world_size} processes on this node share {available} GPUs, and each needs one of its own; "
            f"start {available} per node, or use --device cpu"
        )
    device = torch.device("cuda", launch.local_rank)
    torch.cuda.set_device(device)
    return device


def _meeting_point(launch: Launch, timeout: timedelta) -> dict[str, Any]:
    """How the ranks find each other: an address, or the store that torchrun serves. That store outlives a restart of
    the job, whose ranks must not meet the addresses of the last attempt: each attempt has its own names in it."""
    if not launch.agent_store:
        return {"init_method": f"tcp://{launch.master_addr}:{launch.master_port}"}
    store = TCPStore(launch.master_addr, launch.master_port, is_master=False, timeout=timeout)
    return {"store": PrefixStore(f"megatron3d/attempt-{launch.attempt}", store)}


def _share_memory(axis: Axis, timeout: timedelta) -> Board | None:
    """A board for the members of an axis; None where one of them cannot reach it. A collective call."""
    if axis.group is None:
        return None
    board, made = None, Board.offer(axis.size) if axis.rank == 0 else None
    told: list[Any] = [None] * axis.size
    joined: list[Any] = [None] * axis.size
    with axis.recorder.waiting("share_memory", axis.name, axis.others):
        dist.all_gather_object(told, (os.getpid(), made and made[0]), group=axis.group)
        memory = made[1] if made else Board.accept(told[0][1])
        with contextlib.suppress(OSError):
            processes = [process for process, _ in told]
            board = Board(memory, axis.rank, processes, timeout.total_seconds()) if memory else None
        dist.all_gather_object(joined, board is not None, group=axis.group)
    if made:
        os.close(made[0].descriptor)
    return board if all(joined) else None


def _axis(
    name: str,
    groups: list[list[int]],
    rank: int,
    backend: str,
    timeout: timedelta,
    ordered: bool,
    recorder: FlightRecorder,
) -> Axis:
    """Creates every group of one kind, in the same order on all ranks, and returns the one that has `rank`."""
    mine: Axis | None = None
    for ranks in groups:
        group = dist.new_group(ranks, timeout=timeout, backend=backend) if len(ranks) > 1 else None
        if rank in ranks:
            mine = Axis(name, len(ranks), ranks.index(rank), tuple(ranks), group, ordered, recorder)
    assert mine is not None, f"rank {rank} is in no {name} group of {groups}"
    return mine
