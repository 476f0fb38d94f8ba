"""Programs that take turns: all of them run, one of them works.

The one idea: a machine that others use too changes its speed within seconds. Programs that ran one after the other
would meet different machines; programs that step in turns meet the same one. Each rank has a named pipe, at which it
waits for its program's turn without using the processor; by one more they all say that they wait.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

FOLDER, WAITING = "BENCHMARK_TURNS", "waiting"  # the variable that names the pipes' folder; the shared pipe in it
LOOK_SECONDS = 0.1  # between two looks whether a program has ended
GRACE = 40  # seconds that torchrun has to end its ranks; it takes 30 to lose patience with one


def wait_for_turn() -> None:
    """Ends this rank's turn and waits for its program's next one; does nothing in a program that runs alone.

    To be called before each step, and after the last one.
    """
    if folder := os.environ.get(FOLDER):
        with (Path(folder) / WAITING).open("wb", buffering=0) as waiting:
            waiting.write(b".")
        with (Path(folder) / os.environ.get("RANK", "0")).open("rb", buffering=0) as turn:
            if not turn.read(1):
                raise SystemExit("nobody gives turns any more")


class Program:
    """One that has been started in `folder` and waits for its first turn, or without `ranks` has run to its end.

    What takes longer than `timeout` seconds, its start or a turn, ends it; so does leaving the context.
    """

    def __init__(self, words: Sequence[str], folder: Path, *, timeout: float, ranks: int = 0) -> None:
        self._ranks, self._timeout, self._late = ranks, timeout, False
        with contextlib.ExitStack() as stack:
            pipes = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            names = [WAITING, *map(str, range(ranks))]
            for name in names:
                os.mkfifo(pipes / name)
            self._waiting, *self._turns = (os.open(pipes / name, os.O_RDWR) for name in names)
            for descriptor in (self._waiting, *self._turns):
                stack.callback(os.close, descriptor)
            self._output = stack.enter_context(tempfile.TemporaryFile("w+"))
            self._process = subprocess.Popen(
                words,
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", FOLDER: str(pipes) if ranks else ""},
                stdout=self._output,
                stderr=subprocess.STDOUT,
            )
            stack.callback(self._end)
            self._await_ranks()
            self._stack = stack.pop_all()

    def turn(self) -> None:
        """Lets it go on until all its ranks wait again, or it has ended."""
        if self._process.poll() is None:
            for turn in self._turns:
                os.write(turn, b".")
            self._await_ranks()

    def result(self) -> tuple[int, str]:
        """Ends it if it has not; its exit code and what it has printed. TimeoutError if it took too long."""
        self._end()
        if self._late:
            raise TimeoutError(f"no result within {self._timeout:.0f} s")
        self._output.seek(0)
        return self._process.returncode, self._output.read()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _await_ranks(self) -> None:
        deadline, missing = time.monotonic() + self._timeout, self._ranks or 1  # one that never comes
        while missing and self._process.poll() is None:
            if select.select([self._waiting], [], [], LOOK_SECONDS)[0]:
                missing -= len(os.read(self._waiting, missing))
            elif time.monotonic() > deadline:
                self._late = True
                self._end()

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
            self._process.kill()
            self._process.wait()
