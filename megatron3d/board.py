"""Memory that the ranks of an axis share on one machine: each puts up a notice, the others read it.

The one idea: on one machine a message need not pass through the system. A tensor is copied once, into memory that all
members of the axis have mapped, and a semaphore per pair of ranks says that it is there; who sums it reads it in place.
The loopback interface would copy it twice more, in system calls that take as long as the matrix product before it.

A board has SLOTS places per rank, used in turn. All ranks put up the same notices in the same order, and before a rank
puts up notice t it has read t - SLOTS / 2 of all others, who had read t - SLOTS by then: the place is free, and nobody
has to say so.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

NAME = "megatron3d-board"
SLOTS = 4
CAPACITY = 16 << 20  # bytes of one notice; a place takes memory only as far as it has been used
PAGE = 4096
SEMAPHORE = 64  # bytes set aside for each; glibc needs 32
LOOK_SECONDS = 0.5  # between two looks whether a silent peer is still alive


class Offer(NamedTuple):
    """Where the first rank of an axis has made a board, for the others to open."""

    process: int
    descriptor: int
    token: bytes


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class Board:
    """One rank's view. `processes` are the members' process ids, in rank order. Raises OSError if they cannot be
    watched."""

    def __init__(self, memory: mmap.mmap, rank: int, processes: list[int], timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, len(processes), timeout
        self._memory, self._bytes = memory, torch.frombuffer(memory, dtype=torch.uint8)
        self._libc, base = ctypes.CDLL(None), self._bytes.data_ptr() + PAGE
        self._lives = {peer: os.pidfd_open(pid) for peer, pid in enumerate(processes) if peer != rank}
        self._to, self._from = (
            {peer: ctypes.c_void_p(base + SEMAPHORE * (a * self.size + b)) for peer, a, b in pairs}
            for pairs in ([(peer, rank, peer) for peer in self._lives], [(peer, peer, rank) for peer in self._lives])
        )
        self._next = 0
        self._unread: list[Notice] = []
        self._heard = [0] * self.size  # notices of each rank whose semaphore has been taken

    @staticmethod
    def offer(size: int) -> tuple[Offer, mmap.mmap] | None:
        """Makes the memory of a board for `size` ranks; None where the system has no such memory."""
        if sys.platform != "linux":
            return None
        token = secrets.token_bytes(16)
        try:
            descriptor = os.memfd_create(NAME)
            os.ftruncate(descriptor, _start(size) + size * SLOTS * CAPACITY)
            memory = mmap.mmap(descriptor, 0)
        except OSError:  # forbidden, or no room
            return None
        memory[: len(token)] = token
        libc, base = ctypes.CDLL(None), _address(memory)
        for pair in range(size * size):
            libc.sem_init(ctypes.c_void_p(base + PAGE + pair * SEMAPHORE), 1, 0)
        return Offer(os.getpid(), descriptor, token), memory

    @staticmethod
    def accept(offer: Offer | None) -> mmap.mmap | None:
        """The memory that another process offers; None where it is out of reach, as on another machine."""
        if offer is None:
            return None
        path = Path(f"/proc/{offer.process}/fd/{offer.descriptor}")
        try:
            if not os.readlink(path).startswith(f"/memfd:{NAME}"):  # here, that number may be any process's any file
                return None
            with path.open("r+b") as file:
                memory = mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError):
            return None
        return memory if memory[: len(offer.token)] == offer.token else None

    def post(self, x: Tensor) -> Notice | None:
        """Puts up x (contiguous, on the CPU); None where it is too large. Reads old notices first, if need be."""
        if x.numel() * x.element_size() > CAPACITY:
            return None
        while self._unread and self._unread[0].ticket <= self._next - SLOTS // 2:
            self._unread[0].read()
        notice = Notice(self, self._next, x)
        self._slot(self.rank, notice.ticket, x).copy_(x)
        self._unread.append(notice)
        self._next += 1
        self._call_all()
        return notice

    def leave(self) -> None:
        """Tells all that wait for this rank, now or later, that it has gone."""
        self._memory[PAGE // 2 + self.rank] = 1
        self._call_all()

    def _call_all(self) -> None:
        for semaphore in self._to.values():
            self._libc.sem_post(semaphore)

    def _slot(self, rank: int, ticket: int, like: Tensor) -> Tensor:
        first = _start(self.size) + (rank * SLOTS + ticket % SLOTS) * CAPACITY
        size = like.numel() * like.element_size()
        return self._bytes[first : first + size].view(like.dtype).view(like.shape)

    def _hear(self, peer: int, ticket: int) -> None:
        """Returns when `peer` has put up `ticket`. RuntimeError if it has gone, or after the time-out."""
        deadline = time.monotonic() + self.timeout
        while self._heard[peer] <= ticket:
            if self._take(peer):
                self._heard[peer] += 1
            elif self._has_ended(peer):
                raise RuntimeError("its process has ended")
            elif time.monotonic() > deadline:
                raise RuntimeError(f"timed out after {self.timeout:g} s")
            if self._memory[PAGE // 2 + peer]:
                raise RuntimeError("it has failed")

    def _has_ended(self, peer: int) -> bool:
        watch = select.poll()  # unlike select(), for any descriptor
        watch.register(self._lives[peer])
        return bool(watch.poll(0))

    def _take(self, peer: int) -> bool:
        """Whether a semaphore of that peer could be taken within LOOK_SECONDS."""
        until = time.time() + LOOK_SECONDS
        moment = _Timespec(int(until), int(until % 1 * 1e9))
        return bool(self._libc.sem_timedwait(self._from[peer], ctypes.byref(moment)) == 0)


class Notice:
    """What this rank has put up, and will read of the others."""

    read: Callable[[], object]
    """Set by who put it up: waits, reads all that is needed, and calls `taken`."""

    def __init__(self, board: Board, ticket: int, like: Tensor) -> None:
        self.ticket = ticket
        self._board, self._like = board, like

    def wait(self) -> None:
        """Until all others have put up theirs. Raises RuntimeError if one does not."""
        for peer in self._board._lives:
            self._board._hear(peer, self.ticket)

    def of(self, rank: int) -> Tensor:
        """What `rank` has put up, in shape and dtype like one's own; to be read before `taken`."""
        return self._like if rank == self._board.rank else self._board._slot(rank, self.ticket, self._like)

    def taken(self) -> None:
        """Says that this rank has read all it needs."""
        self._board._unread.remove(self)
        del self.read  # or it and this notice would hold each other, and all that is to be freed


def _start(size: int) -> int:
    """Where the slots begin: after a page of flags and the semaphores."""
    return PAGE + -(-size * size * SEMAPHORE // PAGE) * PAGE


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
