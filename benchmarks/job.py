"""A contender's process among its ranks: flags, gloo, memory before the model, the report, and the end.

The one idea: whatever could make contenders differ by accident (threads, time-outs, the moment at which memory is
first read) happens here, once. ours.py alone starts and ends with its own library. argparse, because a peer's
environment has torch and the peer only.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from benchmarks import problem

TIMEOUT = timedelta(seconds=90)  # of a collective; a rank that waits longer fails the run


def flags() -> argparse.ArgumentParser:
    """Parser of what all know."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=problem.STEPS)
    return parser


def begin() -> float:
    """Starts gloo if a launcher started this process and no library has yet; MiB that imports have taken.

    torch imports its compiler (70 MiB) with the first of its optimizers that is built, so one is built here.
    """
    torch.set_num_threads(1)
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("gloo", timeout=TIMEOUT)
    torch.optim.AdamW([torch.zeros(1)])
    return problem.resident_mib()


def finish(name: str, measured: problem.Measured) -> NoReturn:
    """Reports from the first rank and ends the process.

    At once: with a DistributedDataParallel alive, gloo's threads abort a normal exit in about half of the runs.
    """
    ranks = [measured]
    if dist.is_initialized():
        ranks *= dist.get_world_size()
        dist.all_gather_object(ranks, measured)
    if not dist.is_initialized() or dist.get_rank() == 0:
        problem.report(name, ranks)
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)
