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
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron3d import crashes
from megatron3d.config import Config, ConfigError, FolderTaken, JobError
from megatron3d.flight import FAILED, PeerError, flight_file, watchdog
from megatron3d.launch import Launch, leave
from megatron3d.mesh import Mesh, RollCall
from megatron3d.words import tell

FAREWELL_SECONDS = 30.0
"""All that a failing rank may take to tell the others: the host of the store may stand still, too."""


@contextlib.contextmanager
def meeting(launch: Launch) -> Iterator[None]:
    """Around the making of the mesh: a peer that dies or cannot be reached meanwhile ends this process too, with exit
    code 1, after one word of what was missed. There is no step yet, and nobody to wait for."""
    try:
        yield
    except RuntimeError as error:  # PeerError, or what torch.distributed raises while ranks connect
        what = str(error).partition("Exception raised from")[0].strip()  # there the addresses of C++ functions begin
        line = f"rank {launch.rank} failed while the process groups were made: {what}\n"
        tell(line)
        leave(FAILED)


@contextlib.contextmanager
def told(config: Config, mesh: Mesh, launch: Launch) -> Iterator[None]:
    """Around a run: any exception but those of launch.user_errors ends this process, with exit code 1, after it has
    been told. A message that never ends does too (flight.watchdog)."""
    folder, timeout = config.log.log_dir, config.parallel.timeout_seconds
    lost = _connection_lost(mesh)
    save = Path(config.checkpoint.save) if config.checkpoint.save else None
    before = crashes.read(save) if save else (-1, 0)

    def note() -> None:
        if save:
            crashes.note(save, mesh.recorder.step, before)

    def farewell(*, alone: bool = True) -> None:
        _end_within(FAREWELL_SECONDS)
        _hang_up(mesh)
        roll = RollCall(launch, mesh)
        roll.answer()
        if not alone or _call_the_roll(roll, mesh):  # whoever has died without a word has failed here, too
            note()

    try:
        with watchdog(mesh.recorder, rank=mesh.rank, timeout=timeout, folder=folder, lost=lost, farewell=farewell):
            try:
                yield
            except Exception:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a launcher ends everyone once one has gone: not before
                raise  # a word, be it the watchdog's
    except ConfigError:
        raise
    except JobError as error:
        if mesh.is_main and not isinstance(error, FolderTaken):  # all ranks know of it, and one can tell
            note()
        raise
    except Exception as error:
        _tell(error, mesh)
        if folder:
            with contextlib.suppress(OSError):
                mesh.recorder.dump(flight_file(folder, mesh.rank))
        farewell(alone=isinstance(error, PeerError))
        leave(FAILED)


def _end_within(seconds: float) -> None:
    """Ends this process then, whatever it is stuck in."""
    timer = threading.Timer(seconds, os._exit, [FAILED])
    timer.daemon = True
    timer.start()


def _tell(error: Exception, mesh: Mesh) -> None:
    """The traceback where the failure began; one line where it is only felt."""
    trace = "" if isinstance(error, PeerError) else traceback.format_exc()
    where = f"stage {mesh.pp.rank}, data-parallel {mesh.dp.rank}, tensor-parallel {mesh.tp.rank}"
    what = str(error) if isinstance(error, PeerError) else f"{type(error).__name__}: {error}"
    line = f"rank {mesh.rank} ({where}) failed at step {mesh.recorder.step}: {what}\n"
    tell(trace + line)


def _hang_up(mesh: Mesh) -> None:
    """Ends this process's connections while the process itself has yet to say a word."""
    for axis in (mesh.tp, mesh.dp):
        if axis.board is not None:
            axis.board.leave()
    for connection, _ in _connections():
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _connection_lost(mesh: Mesh) -> Callable[[], bool]:
    """A test of whether any of the connections that there are now has gone.

    When a connection breaks, gloo forgets to end the send or receive that was half-way through it (of what it is
    writing, its Pair::signalException looks at one kind of buffer alone). NCCL opens and closes connections of its own,
    and has a watchdog of its own: the answer is no.
    """
    present = {ends for _, ends in _connections()} if mesh.device.type == "cpu" else set()

    def lost() -> bool:
        with contextlib.suppress(OSError):  # there may be too many open files to list them
            return bool(present) and not present <= {ends for _, ends in _connections()}
        return False

    return lost


def _connections() -> Iterator[tuple[socket.socket, tuple[object, object]]]:
    """This process's connections over the network and their two addresses, where the system lists them."""
    folder = Path("/proc/self/fd")
    for entry in list(folder.iterdir()) if folder.is_dir() else []:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            connection = socket.socket(fileno=int(entry.name))  # fails for what is none
            stack.callback(connection.detach)  # it is not ours to close
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                peer = connection.getpeername()  # fails for one that listens: the back-end aborts when that goes
                yield connection, (connection.getsockname(), peer)


def _call_the_roll(roll: RollCall, mesh: Mesh) -> bool:
    """Asks for the others, unless another rank does; whether some of them were absent."""
    absent = roll.absent() if roll.is_first("calling") else []
    if absent:
        ranks = f"rank {absent[0]}" if len(absent) == 1 else f"ranks {', '.join(map(str, absent))}"
        tell(f"no word from {ranks}: absent at step {mesh.recorder.step}\n")
    return bool(absent)
