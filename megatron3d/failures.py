"""How a failing run ends: every rank says where it was, one of them says who is missing, and all are gone in seconds.

The one idea: a rank that fails does not tidy up, since tidying up means waiting for others; it tells, leaves its flight
record, and hangs up, which ends the messages that others wait for, so that they follow. The first one that was left
alone stays a moment and calls the roll: whoever has not said a word is the one that was absent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from megatron3d import crashes
from megatron3d.comm import PeerError
from megatron3d.config import Config, ConfigError, JobError
from megatron3d.flight import FAILED, flight_file, watchdog
from megatron3d.launch import Launch, leave
from megatron3d.mesh import Mesh, RollCall


@contextlib.contextmanager
def told(config: Config, mesh: Mesh, launch: Launch) -> Iterator[None]:
    """Around a run: any exception but those of launch.user_errors ends this process, with exit code 1, after it has
    been told. A message that never ends does too (flight.watchdog)."""
    folder, timeout = config.log.log_dir, config.parallel.timeout_seconds
    try:
        with watchdog(mesh.recorder, rank=mesh.rank, timeout=timeout, folder=folder):
            yield
    except (ConfigError, JobError):
        raise
    except Exception as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends everyone once one has gone: not before a word
        _tell(error, mesh)
        if folder:
            with contextlib.suppress(OSError):
                mesh.recorder.dump(flight_file(folder, mesh.rank))
        _hang_up()
        if not isinstance(error, PeerError) and config.checkpoint.save:
            crashes.note(Path(config.checkpoint.save), mesh.recorder.step)
        if launch.from_torchrun and mesh.grid.size > 1:
            _call_the_roll(RollCall(launch, mesh), mesh, alone=isinstance(error, PeerError))
        leave(FAILED)


def _tell(error: Exception, mesh: Mesh) -> None:
    """The traceback where the failure began; one line where it is only felt."""
    if not isinstance(error, PeerError):
        traceback.print_exc()
    where = f"stage {mesh.pp.rank}, data-parallel {mesh.dp.rank}, tensor-parallel {mesh.tp.rank}"
    what = str(error) if isinstance(error, PeerError) else f"{type(error).__name__}: {error}"
    print(f"rank {mesh.rank} ({where}) failed at step {mesh.recorder.step}: {what}", file=sys.stderr, flush=True)


def _hang_up() -> None:
    """Ends this process's connections, where the system lists them, while the process itself has yet to say a word."""
    folder = Path("/proc/self/fd")
    for entry in list(folder.iterdir()) if folder.is_dir() else []:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.getpeername()  # fails for one that listens: the back-end aborts when that goes
                connection.shutdown(socket.SHUT_RDWR)


def _call_the_roll(roll: RollCall, mesh: Mesh, *, alone: bool) -> None:
    roll.answer()
    if not alone or not roll.is_first():
        return
    absent = roll.absent()
    if absent:
        ranks = f"rank {absent[0]}" if len(absent) == 1 else f"ranks {', '.join(map(str, absent))}"
        print(f"no word from {ranks}: absent at step {mesh.recorder.step}", file=sys.stderr, flush=True)
