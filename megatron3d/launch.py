"""Which process of the job this is, and which one speaks: the only reader of the environment.

The one idea: whatever started the processes (torchrun, srun, or nobody) is read once into a `Launch`, so that no other
module asks the environment, and a wrong launch or setting is refused by one voice before torch is imported. Groups of
processes are in mesh.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from megatron3d.config import ConfigError, JobError
from megatron3d.words import paragraph, tell

TORCHRUN_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
SLURM_RANKS = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID")
RANKS = ("RANK", "SLURM_PROCID", *LOCAL_RANKS)  # who one is, from the surest to the least sure
FIRST_LINGERS, OTHERS_LINGER = 3.0, 7.0  # seconds between an error and the exit of a rank


@dataclass(frozen=True, kw_only=True)
class Launch:
    """This process among all those of the job; the defaults are a single process that nobody launched."""

    rank: int = 0
    """Index among all processes."""
    world_size: int = 1
    """Number of processes of the job."""
    local_rank: int = 0
    """Index among the processes of this node: the GPU to take."""
    local_world_size: int = 1
    """Number of processes on this node (from srun: at most this many)."""
    master_addr: str = "127.0.0.1"
    """Where the processes meet."""
    master_port: int = 29500
    """Port of the meeting point."""
    attempt: int = 0
    """How often torchrun has restarted the job."""
    agent_store: bool = False
    """Whether torchrun itself serves the meeting point, so that no rank has to."""
    from_torchrun: bool = False
    """Whether a launcher (torchrun or srun) set these values."""


def launch_from_environment() -> Launch:
    """`read_launch` of this process."""
    return read_launch(os.environ)


def read_launch(env: Mapping[str, str]) -> Launch:
    """The place of a process in its job, from torchrun's variables, else from srun's, else a single process.

    srun's are believed only where MASTER_ADDR and MASTER_PORT are set too: the shell of an allocation has SLURM_NTASKS
    without being one of the tasks. Raises ConfigError where variables are missing, no integers, or contradict another.
    """
    with shared_mistakes():
        if any(env.get(name) for name in TORCHRUN_RANKS):
            rank, world_size, local_rank, local_world_size = (_integer(env, name) for name in TORCHRUN_RANKS)
        elif all(env.get(name) for name in SLURM_RANKS + RENDEZVOUS):
            rank, world_size, local_rank = (_integer(env, name) for name in SLURM_RANKS)
            nodes = _integer(env, "SLURM_NNODES") if env.get("SLURM_NNODES") else 1
            local_world_size = -(-world_size // max(nodes, 1))
        else:
            return Launch()
        if not 1 <= local_world_size <= world_size:
            raise ConfigError(
                f"The launcher's variables say that {local_world_size} processes run on this node (LOCAL_WORLD_SIZE) "
                f"of {world_size} in all (WORLD_SIZE). Neither can be less than 1, nor the first more than the second."
            )
        address, port = _text(env, "MASTER_ADDR"), _integer(env, "MASTER_PORT")
        attempt = _integer(env, RESTARTS) if env.get(RESTARTS) else 0
    for name, index, size in (("rank", rank, world_size), ("local rank", local_rank, local_world_size)):
        if not 0 <= index < size:
            raise ConfigError(
                f"The launcher's variables say {name} {index} of {size} processes, but ranks count from 0 to one less "
                f"than the number of processes. Start all processes of the job the same way, e.g. with torchrun."
            )
    return Launch(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_addr=address,
        master_port=port,
        attempt=attempt,
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        from_torchrun=True,
    )


@contextlib.contextmanager
def shared_mistakes() -> Iterator[None]:
    """Around what all processes of a machine judge alike, since they have the same words, variables and files."""
    try:
        yield
    except ConfigError as error:
        error.shared = True
        raise


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Around a whole program: a ConfigError or JobError is told in one paragraph by one rank, and all ranks exit, with
    code 2 for a user's mistake and 1 for a failure of the job.

    A launcher kills the other ranks as soon as one has failed. So those that have nothing to say wait for the first
    one, and take the kill for their sign to leave; and that one gives the others the time to get so far. If nobody has
    come to kill them, either there is no launcher, or the first one has no such mistake. What it is sure to have told
    (`_is_told_by_another`) is not told again; else the mistake may be theirs alone (a file that this machine lacks),
    and they tell it themselves.
    """
    try:
        yield
    except (ConfigError, JobError) as error:
        code = 2 if isinstance(error, ConfigError) else 1
        rank, told = _first_index(RANKS), paragraph(str(error))
        if not rank:
            tell(f"error: {told}\n")
        if any(os.environ.get(name) for name in (*TORCHRUN_RANKS, *SLURM_RANKS)):
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))
            time.sleep(OTHERS_LINGER if rank else FIRST_LINGERS)
        if rank and not _is_told_by_another(error):
            tell(f"error on rank {rank}: {told}\n")
        sys.exit(code)


def _is_told_by_another(error: ConfigError | JobError) -> bool:
    """Of a rank that is not the job's first: a JobError is known to all, a shared mistake to all of this machine."""
    return isinstance(error, JobError) or (error.shared and _first_index(LOCAL_RANKS) != 0)


def _first_index(names: Sequence[str]) -> int | None:
    """The first of these variables that has an index, in an environment that may be the mistake."""
    for name in names:
        with contextlib.suppress(ValueError):
            if (index := int(os.environ.get(name, ""))) >= 0:
                return index
    return None


def leave(code: int) -> NoReturn:
    """Ends this process at once: no teardown that waits for other ranks, no time for a signal to change the code."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # whoever read it may have gone
            stream.flush()
    os._exit(code)


def use_repeatable_cublas() -> None:
    """Asks cuBLAS for the workspace with which its results repeat; must come before CUDA starts. A user's own wins."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _text(env: Mapping[str, str], name: str) -> str:
    if not (value := env.get(name)):
        wanted = TORCHRUN_RANKS + RENDEZVOUS
        present = [other for other in wanted if env.get(other)]
        raise ConfigError(
            f"The environment describes a launch only in part: {', '.join(present)} set, {name} not. Start the program "
            f"with torchrun, set all of {', '.join(wanted)}, or unset {', '.join(TORCHRUN_RANKS)} for a single process."
        )
    return value


def _integer(env: Mapping[str, str], name: str) -> int:
    value = _text(env, name)
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"The environment variable {name} must be an integer, not {value!r}.") from None
