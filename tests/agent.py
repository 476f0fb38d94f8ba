"""torchrun with ranks that are forked: a job of four starts in a moment, because nobody imports torch again.

The one idea: torch.distributed.run starts a rank through a single method, and only that one is replaced: it asks a copy
of the agent, made when everything had been imported and nothing started, for a copy of itself that runs the script as
__main__. (A copy of the agent would not do: one of its threads may hold a lock of the C library, such as that of the
name service, which nobody would ever release in the copy.) Options, rendezvous, environment, the watch over the ranks,
restarts and the closing report are torchrun's own. What an interpreter does when it starts and ends is left out, so
some tests go through the real torchrun.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import logging
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend

from megatron3d import trainer
from megatron3d.tether import end_with_launcher
from tests import ranks

BEFORE_THE_FORK = (c10d_rendezvous_backend, trainer, ranks)  # imported here once, and not by each process

ROOT = Path(__file__).resolve().parent.parent
SIZE = 4
POLL = 0.002  # seconds between two looks at a process
PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>


class Job:
    """A running torchrun with four ranks; what they all print is in the file `out`. `real` executes torchrun itself,
    which starts a fresh Python for each rank."""

    def __init__(self, out: Path, *words: str, restarts: int = 0, real: bool = False) -> None:
        options = ["--nproc-per-node", str(SIZE), "--max-restarts", str(restarts), "--monitor-interval", "0.05"]
        options += ["--log-dir", f"{out}.torchrun"]
        self.out = out
        self.process = Child(fork(lambda: _agent(out, [*options, *words], real)))

    def ranks(self) -> list[int]:
        """Process ids of the first attempt's ranks, in rank order, as soon as all have started."""
        while len(found := self._children()) < SIZE:
            assert self.process.poll() is None, self.out.read_text()
            time.sleep(POLL)
        return found

    def _children(self) -> list[int]:
        pid = self.process.pid
        with contextlib.suppress(OSError):
            children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
            return [child for child in children if os.getpgid(child) == child]  # before, it has yet to begin its life
        return []

    def says(self, words: str, timeout: float = 200) -> None:
        """Waits until these words have been printed."""
        deadline, over = time.monotonic() + timeout, False
        while not self.out.exists() or words not in self.out.read_text():
            if over:
                self.lose()
                raise AssertionError(f"no {words!r} in: {self.out.read_text()}")
            over = self.process.poll() is not None or time.monotonic() > deadline  # then one more look
            time.sleep(POLL)

    def end(self, timeout: float = 400) -> tuple[int, str]:
        """torchrun's exit code and everything that was printed."""
        try:
            return self.process.wait(timeout), self.out.read_text()
        except subprocess.TimeoutExpired:
            self.lose()
            raise AssertionError(f"still running after {timeout} s: {self.out.read_text()}") from None

    def lose(self) -> None:
        """Ends whatever still runs."""
        for pid in [*self._children(), self.process.pid] if self.process.poll() is None else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Child:
    """A process that this one has to wait for; what the agent asks of a subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None

    def poll(self) -> int | None:
        """The exit code, once there is one; torchrun does not tell those of an attempt that it follows by another."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
            if self.code:
                print(f"process {self.pid} ended with {self.code}", file=sys.stderr, flush=True)
        return self.code

    def wait(self, timeout: float) -> int:
        """The exit code."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(POLL)
        return code


def fork(body: Callable[[], None]) -> int:
    """The id of a child whose whole life is `body`, and which shares nothing open with its parent."""
    sys.stdout.flush()
    sys.stderr.flush()
    begun, begins = os.pipe()
    pid = os.fork()
    if pid == 0:
        _live(body)
    os.close(begins)
    os.read(begun, 1)  # returns when the child has its own session, or is dead: one may signal its group then
    os.close(begun)
    return pid


def _live(body: Callable[[], None]) -> None:
    code: object = 1
    try:
        gc.freeze()  # what the parent had open is not this process's to close
        faulthandler.disable()  # it would write to a file that is closed now
        os.setsid()
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        body()
        code = 0
    except SystemExit as leaving:
        code = leaving.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # or this process would go on as a second pytest
            os._exit(code if isinstance(code, int) else 1)


def _agent(out: Path, words: Sequence[str], real: bool) -> None:
    end_with_launcher()
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    for logger in logging.root.manager.loggerDict.values():
        for handler in getattr(logger, "handlers", []):
            if type(handler) is logging.StreamHandler:  # that of torch, which took what was stderr when it was imported
                handler.stream = sys.stderr  # setStream would flush what may be closed
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    os.chdir(ROOT)
    if real:
        os.execve(sys.executable, [sys.executable, "-m", "torch.distributed.run", *words], os.environ)
    ranks_from = _nursery()

    def start_rank(handler: SubprocessHandler, command: Sequence[str], env: dict[str, str]) -> Child:
        executable, unbuffered, *script = command
        assert (executable, unbuffered) == (sys.executable, "-u")
        ranks_from.send((script, env))
        pid, _ = ranks_from.recv(), ranks_from.recv()  # it has been made, and is ours
        return Child(pid)

    SubprocessHandler._popen = start_rank  # type: ignore[assignment, method-assign]
    torchrun.main(words)


def _nursery() -> Connection:
    """A copy of this process as it is now, without threads: for each (words, environment) sent to it, it answers with
    the id of a new process that runs them as a script, and with None when that is a child of this one."""
    agent, (asked, asks) = os.getpid(), multiprocessing.Pipe()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # a grandchild whose parent has gone becomes a child
    if os.fork() == 0:
        asks.close()
        end_with_launcher()
        with contextlib.suppress(EOFError):  # the agent has gone
            while True:
                words, env = asked.recv()
                between = os.fork()
                if between == 0:
                    asked.send(fork(partial(_run_script, agent, os.getpid(), words, env)))
                    os._exit(0)
                os.waitpid(between, 0)
                asked.send(None)
        os._exit(0)
    asked.close()
    return asks


def _run_script(agent: int, between: int, words: Sequence[str], env: dict[str, str]) -> None:
    while os.getppid() == between:  # it asks to be told of the end of its parent: let it be the lasting one
        time.sleep(POLL / 10)
    if os.getppid() != agent:  # which has gone already
        return
    os.environ.clear()
    os.environ.update(env)
    sys.argv = list(words)
    sys.path.insert(0, str((ROOT / words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")
