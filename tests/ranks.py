"""Runs a function on several forked ranks and returns what each of them returned.

Forked, not spawned: eight gloo ranks start in a fifth of a second. A rank that raises, dies or stays too long fails the
test with that rank's traceback; the others are ended.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.utils.checkpoint

from megatron3d.comm import agree
from megatron3d.config import ParallelConfig
from megatron3d.launch import Launch
from megatron3d.mesh import Mesh

# Both pull in lazily loaded modules, here once rather than after every fork: half a second in each rank.
torch.testing.assert_close(torch.zeros(1), torch.zeros(1))
torch.utils.checkpoint.checkpoint(torch.neg, torch.zeros(1), use_reentrant=False)


class RankFailure(AssertionError):
    """A rank raised or died; the text has its traceback."""


def run_ranks(size: int, body: Callable[..., Any], *args: Any, timeout: float = 400) -> list[Any]:
    """Calls body(launch, init_method, *args) on `size` ranks; the results in rank order."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        init_method = f"file://{folder}/rendezvous"
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        processes = [
            context.Process(target=_child, args=(rank, size, init_method, pipes[rank][1], body, args), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        try:
            return _collect(processes, [receiver for receiver, _ in pipes], timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _child(
    rank: int, size: int, init_method: str, sender: Connection, body: Callable[..., Any], args: Sequence[Any]
) -> None:
    torch.set_num_threads(1)
    launch = Launch(rank=rank, world_size=size, local_rank=rank, local_world_size=size)
    try:
        outcome = (True, body(launch, init_method, *args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    buffer = io.BytesIO()  # torch.save: tensors by value, not by shared memory of a process that is about to end
    torch.save(outcome, buffer)
    sender.send_bytes(buffer.getvalue())
    sender.close()
    os._exit(0)  # no interpreter shutdown: gloo's threads may outlive their groups


def _collect(processes: list[Any], receivers: list[Connection], timeout: float) -> list[Any]:
    results: list[Any] = [None] * len(receivers)
    deadline, waiting = time.monotonic() + timeout, dict(enumerate(receivers))
    failures: list[str] = []
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailure(f"ranks {sorted(waiting)} did not finish within {timeout} s")
        for rank in [rank for rank, receiver in waiting.items() if receiver in ready]:
            try:
                good, value = torch.load(io.BytesIO(waiting.pop(rank).recv_bytes()), weights_only=False)
            except EOFError:
                good, value = False, f"died with exit code {processes[rank].exitcode}"
            if good:
                results[rank] = value
            else:
                failures.append(f"rank {rank} of {len(receivers)}: {value}")
                deadline = min(deadline, time.monotonic() + 2)  # the others may now wait for it in vain
        if failures and len(waiting) == 0:
            break
        if failures and time.monotonic() >= deadline:
            break
    if failures:
        raise RankFailure("\n".join(failures))
    return results


def on_mesh(parallel: ParallelConfig, body: Callable[..., Any], *args: Any, timeout: float = 400) -> list[Any]:
    """Calls body(mesh, *args) on every rank of the mesh of `parallel` (dp stated)."""
    size = parallel.tp * parallel.pp * parallel.dp
    return run_ranks(size, _with_mesh, parallel, body, args, timeout=timeout)


def _with_mesh(
    launch: Launch, init_method: str, parallel: ParallelConfig, body: Callable[..., Any], args: Sequence[Any]
) -> Any:
    mesh = Mesh.create(parallel, launch, torch.device("cpu"), init_method=init_method)
    result = body(mesh, *args)
    agree(None, mesh.control)  # a rank that ends while others still connect would break their connections
    return result
