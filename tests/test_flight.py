"""The flight recorder, and the watchdog over messages that hang without the back-end noticing, as NCCL's may."""

from __future__ import annotations

import array
import fcntl
import functools
import json
import multiprocessing
import os
import re
import signal
import termios
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron3d import failures, flight
from megatron3d.comm import gather_objects, start_receive, start_send
from megatron3d.config import ParallelConfig
from megatron3d.flight import FlightRecorder, flight_file, watchdog
from megatron3d.launch import Launch
from megatron3d.mesh import Mesh
from megatron3d.trainer import Trainer
from tests import toy
from tests.test_failures import inject, until_missed

LONG = 60.0
QUICK = functools.partial(watchdog, rank=3, timeout=0.2, grace=0.1, lost=lambda: False)
FORK = multiprocessing.get_context("fork")


def watched(body: Callable[[], object]) -> int | None:
    """Exit code of a process that does this; None if it is there for long."""
    process = FORK.Process(target=body)
    process.start()
    process.join(LONG / 2)
    code = process.exitcode
    process.kill()
    return code


def enter(recorder: FlightRecorder) -> None:
    recorder.step = 7
    recorder.begin("all_reduce", "tp", (1, 2), 40).ended = time.time()
    recorder.begin("receive", "pp", (1,), 80)


def test_a_message_that_never_ends_ends_the_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It says in what it was stuck, leaves its record, and takes leave."""

    def body() -> None:
        recorder = FlightRecorder()
        with QUICK(recorder, folder=str(tmp_path), farewell=(tmp_path / "farewell").touch):
            enter(recorder)
            time.sleep(LONG)

    assert watched(body) == 1
    told = r"^rank 3: no end after the time-out: step 7, receive over pp with ranks \[1\]: waiting for (\d+\.\d) s$"
    found = re.search(told, capfd.readouterr().err, re.M)
    assert found and float(found[1]) >= 0.3, "not before the time-out and the grace are over"
    record = json.loads(flight_file(str(tmp_path), 3).read_text())
    assert [(message["operation"], message["ended"] is None) for message in record] == [
        ("all_reduce", False),
        ("receive", True),
    ]
    assert (tmp_path / "farewell").exists()


def test_the_process_ends_whatever_else_is_broken(tmp_path: Path) -> None:
    """Here the folder of its record is a file, or the leave-taking fails."""

    def body(folder: Path) -> None:
        recorder = FlightRecorder()
        with QUICK(recorder, folder=str(folder), farewell=lambda: 1 // 0):
            enter(recorder)
            time.sleep(LONG)

    (tmp_path / "file").touch()
    for folder in ("file", "folder"):
        assert watched(functools.partial(body, tmp_path / folder)) == 1


def test_messages_that_end_in_time_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long all of them together. The clock moves by hand, for each is looked at when it is nearly too old."""
    now, looked = [100.0], threading.Event()
    monkeypatch.setattr(flight, "time", SimpleNamespace(time=lambda: now[0]))

    def lost() -> bool:  # asked at each look
        looked.set()
        return False

    def body() -> None:
        recorder = FlightRecorder()
        with QUICK(recorder, folder=str(tmp_path), lost=lost, farewell=lambda: 1 // 0):
            for _ in range(4):
                with recorder.waiting("gather_objects", "control", (1,)):
                    now[0] += 0.25
                    for _ in range(3):  # the first may have begun before, and the second has judged it by the third
                        looked.clear()
                        assert looked.wait(LONG)
        assert not recorder.open()

    assert watched(body) == 0 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "knobs",
    [{"tp": 2, "dp": 2}, {"pp": 2, "dp": 2, "zero": 0}, {"pp": 2, "tp": 2, "overlap": False, "recompute": "full"}],
    ids=str,
)
def test_a_healthy_run_leaves_no_message_open(knobs: dict[str, Any]) -> None:
    """One that nobody waits for any more would end it."""

    def left(trainer: Trainer) -> list[str]:
        trainer.evaluate()
        trainer.weights.finish_gather()
        return [str(message) for message in trainer.mesh.recorder.open()]

    assert toy.train(toy.config(**knobs), steps=2, after=left).extra == [[]] * 4


def half_way(operation: str, folder: Path, rank: int) -> None:
    """Rank 0 kills rank 1 in the middle of a long message between the two, and waits for the end of it."""
    config, launch = toy.config(pp=2), Launch(rank=rank, world_size=2)
    mesh = Mesh.create(config.parallel, launch, torch.device("cpu"), init_method=f"file://{folder}/rendezvous")
    message = torch.full((1 << 25,), float(rank))
    processes = gather_objects(os.getpid(), mesh.control)
    here = (start_send if (operation == "send") == (rank == 0) else start_receive)(message, mesh.pp, 1 - rank)
    if rank == 1:
        if operation == "send":
            signal.raise_signal(signal.SIGSTOP)  # it has said that it is ready, and reads no more
        here.wait()
        time.sleep(LONG)
    while not (unread() if operation == "send" else message[0]):
        pass
    os.kill(processes[1], signal.SIGSTOP)  # at once: what follows takes its time
    with failures.told(config, mesh, launch):
        os.kill(processes[1], signal.SIGKILL)
        assert operation == "send" or not message[-1], "all of it has come"
        here.wait()


def unread() -> bool:
    """Whether a peer has stopped reading: far more than it reads at once is still on the way to it."""
    count, most = array.array("i", [0]), 0
    for connection, _ in failures._connections():
        fcntl.ioctl(connection, termios.TIOCOUTQ, count)
        most = max(most, count[0])
    return most > 1 << 16


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["send", "receive"])
def test_a_message_that_gloo_forgets(operation: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One that was half-way when its peer died: gloo would wait for its time-out, which is beyond this test's."""
    other = FORK.Process(target=half_way, args=(operation, tmp_path, 1))
    other.start()
    assert watched(functools.partial(half_way, operation, tmp_path, 0)) == 1
    other.kill()  # or it might stand still for ever
    other.join()
    told = rf"^rank 0: no end after a connection was lost: step 0, {operation} over pp with ranks \[1\]: waiting for"
    assert re.search(told, capfd.readouterr().err, re.M)


@pytest.mark.slow
def test_a_hang_that_the_back_end_does_not_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 stands still, and gloo would wait for an hour: the watchdogs end the others after --timeout-seconds, each
    says what it was stuck in, and rank 1 is named as absent."""
    create = Mesh.create

    def patient(parallel: ParallelConfig, *args: Any, **kwargs: Any) -> Mesh:
        return create(replace(parallel, timeout_seconds=3600), *args, **kwargs)

    monkeypatch.setattr(Mesh, "create", patient)
    monkeypatch.setattr(failures, "watchdog", functools.partial(watchdog, grace=1.0))
    code, text, ranks = until_missed(inject(tmp_path, "SIGSTOP", "step", 1, 3, "--timeout-seconds", "4"), 1)
    assert code == 1
    found = re.findall(r"^rank (\d): no end after the time-out: step 3, \w+ over \w+ with ranks (\[.*\]): ", text, re.M)
    assert any("1" in peers for _, peers in found), text
    for rank, _ in found:
        record = json.loads(flight_file(str(tmp_path), int(rank)).read_text())
        assert any(message["ended"] is None and message["step"] == 3 for message in record)
        assert f"process {ranks[int(rank)]} ended with 1\n" in text
