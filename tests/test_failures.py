"""How runs end early: failures are told and leave nobody behind, requests to stop save one and the same step."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron3d import crashes, failures
from megatron3d.config import CheckpointConfig, ConfigError
from megatron3d.data import MockDataset
from megatron3d.flight import FAILED
from megatron3d.launch import Launch
from megatron3d.mesh import Mesh
from megatron3d.signals import STOPPED, StopRequest
from tests import toy
from tests.agent import POLL, SIZE, Child, Job, fork
from tests.disturbed import MESH, RUN, SETTINGS, STEPS, Peace, assert_undisturbed, outcome, rows, words


def inject(
    folder: Path,
    kind: str,
    place: str,
    rank: int | str,
    step: int,
    *flags: str,
    times: str = "always",
    restarts: int = 0,
    real: bool = False,
) -> Job:
    """A job with one mishap (injected.py), and with its log in `folder`."""
    mishap = ("tests/injected.py", kind, place, str(rank), str(step), times)
    run = (*RUN, *MESH, "--log-dir", str(folder), *flags)
    return Job(folder / "out", *mishap, *run, restarts=restarts, real=real)


FORKED = [(place, rank, False) for place in ("forward", "backward", "data", "collective", "save") for rank in (0, 3)]


@pytest.mark.slow
@pytest.mark.parametrize(("place", "rank", "real"), [*FORKED, ("forward", 3, True)])
def test_an_exception_on_one_rank_ends_all(place: str, rank: int, real: bool, tmp_path: Path) -> None:
    """FAIL-01: non-zero, the first traceback with its rank, stage and step; every rank leaves by itself."""
    flags = ["--save", str(tmp_path / "save"), "--save-interval", "2"]
    step = 2 if place == "save" else 3
    code, text = inject(tmp_path, "raise", place, rank, step, *flags, real=real).end(timeout=60)
    assert code == 1
    if place == "save":
        assert f"error: rank {rank}: saving step 2 failed: ArithmeticError: injected in save" in text
        assert not (tmp_path / "save" / "latest").exists()
        return
    assert text.count("ArithmeticError: injected in") >= 1 and "Traceback" in text
    assert re.search(rf"^rank {rank} \(stage {rank // 2}, .*\) failed at step 3: ArithmeticError", text, re.M), text
    assert "no answer from rank" in text and "no word from" not in text
    assert json.loads((tmp_path / f"flight-rank-{rank}.json").read_text()), "the flight record"
    assert "(SIGKILL)" not in text and "(SIGABRT)" not in text


def assert_named(rank: int, text: str) -> None:
    """Who was absent, at which step, in what."""
    assert f"no word from rank {rank}: absent at step 3" in text
    assert re.search(rf"failed at step 3: no answer from rank {rank}; step 3, \w+ over \w+ with ranks", text), text


def until_missed(job: Job, rank: int) -> tuple[int, str, list[int]]:
    """The end of a job in which this rank stands still, until another has missed it: exit code, words, processes."""
    ranks = job.ranks()
    job.says(f"no word from rank {rank}: absent at step 3")
    os.kill(ranks[rank], signal.SIGCONT)
    return *job.end(), ranks


@pytest.mark.slow
def test_a_rank_that_has_left_is_named(tmp_path: Path) -> None:
    """Without a word, and with code 0."""
    code, text = inject(tmp_path, "exit", "step", 2, 3).end()
    assert code == 1
    assert_named(2, text)


@pytest.mark.slow
def test_a_rank_that_stands_still_is_named(tmp_path: Path) -> None:
    """Beyond --timeout-seconds. When it wakes up, it finds the others gone and leaves too."""
    code, text, ranks = until_missed(inject(tmp_path, "SIGSTOP", "step", 1, 3, "--timeout-seconds", "5"), 1)
    assert code == 1
    assert_named(1, text)
    assert f"process {ranks[1]} ended with 1\n" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rank", "real"),
    [
        ("SIGUSR1", 1, False),
        ("SIGTERM", 1, False),
        ("SIGTERM", "all", False),
        ("SIGINT", "all", False),
        pytest.param("SIGUSR1", 1, True, marks=pytest.mark.soak),
    ],
)
def test_a_signal_stops_all_at_one_step(name: str, rank: int | str, real: bool, tmp_path: Path) -> None:
    """CKPT-07: to one rank or to the whole group: all save the same step and leave with the documented code; the run
    goes on at the next step. (There are no loader workers that could die first.)"""
    save = str(tmp_path / "save")
    code, text = inject(tmp_path, name, "step", rank, 3, "--save", save, real=real).end()
    assert code == 1 and "stopped after step 3, as asked" in text
    assert set(re.findall(r"exitcode\s*: (-?\d+)", text)) == {str(STOPPED)}, text
    assert (tmp_path / "save" / "latest").read_text().strip() == "step-00000003"
    resumed = [*RUN, *MESH, "--log-dir", str(tmp_path), "--save", save, "--load", save]
    code, text = Job(tmp_path / "resumed", "pretrain_gpt.py", *resumed).end()
    assert code == 0, text
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rank"), [("raise", 0), ("raise", "all"), ("SIGKILL", 1)])
def test_a_crash_that_repeats_is_given_up(
    kind: str, rank: int | str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """After the second time; ranks that fail together have failed once, and one that is killed has failed, too."""
    if kind == "SIGKILL":
        request.getfixturevalue("quick_roll_call")
    flags = ["--save", str(tmp_path / "save"), "--auto-resume"]
    code, text = inject(tmp_path, kind, "forward", rank, 3, *flags, restarts=2).end()
    assert code == 1 and "has failed 2 times in a row at step 3" in text
    told = (
        "ArithmeticError: injected in forward\nrank 0" if kind == "raise" else "no word from rank 1: absent at step 3"
    )
    assert text.count(told) == 2


def test_nobody_stays_where_the_store_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host may stand still, too: who has failed leaves all the same."""

    class Silent:
        def __init__(self, *_: object) -> None:
            time.sleep(200)

    def body() -> None:
        with failures.told(toy.config(), Mesh.single(), Launch()):
            raise ArithmeticError("injected")

    monkeypatch.setattr(failures, "RollCall", Silent)
    monkeypatch.setattr(failures, "FAREWELL_SECONDS", 0.2)
    assert Child(fork(body)).wait(timeout=100) == FAILED


def test_a_failure_that_many_ranks_tell_is_one(tmp_path: Path) -> None:
    """Where no store says who is the first: the host that had it may have been the failure."""
    config = replace(toy.config(), checkpoint=CheckpointConfig(save=str(tmp_path)))
    begun = [tmp_path / f"begun-{rank}" for rank in range(3)]

    def body(rank: int) -> None:
        with failures.told(config, Mesh.single(), Launch()):
            begun[rank].touch()
            while not all(path.exists() for path in begun):
                time.sleep(POLL)
            raise ArithmeticError

    children = [Child(fork(partial(body, rank))) for rank in range(3)]
    assert [child.wait(timeout=100) for child in children] == [FAILED] * 3
    assert crashes.read(tmp_path) == (0, 1)


@pytest.mark.slow
def test_damaged_samples_are_the_failure_of_their_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in the middle of a run, by one rank: no silence, and nobody is called absent."""
    damaged = MockDataset.sample

    def sample(self: MockDataset, index: int) -> Any:
        if index == 11:  # of step 3
            raise ConfigError("id 999 is outside the vocabulary")
        return damaged(self, index)

    monkeypatch.setattr(MockDataset, "sample", sample)
    code, text = Job(tmp_path / "out", "pretrain_gpt.py", *words(tmp_path, ["--pp", "2"])).end()
    assert code == 1 and "no word from" not in text
    what = "failed at step 3: RuntimeError: samples 10 to 11: id 999"
    assert re.search(rf"^rank \d \(stage \d, data-parallel 1, .*\) {what}", text, re.M), text


# Kills ----------------------------------------------------------------------------------------------------------------


def kill(job: Job, rank: int, moment: float) -> bool:
    """Kills a rank of the first attempt so many seconds after it has started; False if it had ended by then."""
    victim = job.ranks()[rank]
    time.sleep(moment)
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
    return f"process {victim} ended with -9\n" in job.end()[1]


SEEDS = [pytest.param(seed, marks=() if seed < 10 else pytest.mark.soak) for seed in range(100)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.usefixtures("quick_roll_call")
def test_killed_ranks_change_nothing(seed: int, in_peace: Callable[[str], Peace], tmp_path: Path) -> None:
    """SIGKILL of a random rank at a random moment under --max-restarts: the final state is that of a run in peace."""
    generator = random.Random(seed)
    name = list(SETTINGS)[seed % len(SETTINGS)]
    peace = in_peace(name)
    rank, moment = generator.randrange(SIZE), generator.uniform(0, peace.seconds)
    folder, killed = tmp_path, False
    while not killed:
        folder = tmp_path / f"{moment:.3f}"
        folder.mkdir()
        job = Job(folder / "out", "pretrain_gpt.py", *words(folder, SETTINGS[name]), restarts=1)
        killed = kill(job, rank, moment)
        moment /= 2  # it was too late
    code, text = job.end()
    assert_undisturbed(code, text, folder, peace)


PLACES = [
    ("groups", 1, 0),
    ("load", 2, 0),
    ("save", 3, 4),
    ("index", 0, 4),
    ("rename", 0, 4),
    ("latest", 0, 4),
    ("evaluate", 1, 3),
    ("close", 2, STEPS),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "rank", "step", "real"), [*((*place, False) for place in PLACES), ("step", 3, 5, True)]
)
@pytest.mark.usefixtures("quick_roll_call")
def test_kills_where_they_hurt(
    place: str, rank: int, step: int, real: bool, in_peace: Callable[[str], Peace], tmp_path: Path
) -> None:
    """Of a run that goes on at step 2, so that loading and the rows of lost steps are among them: while the groups are
    made, inside a save and between its renames, in an evaluation, and when all is done but the leaving."""
    settings = "tp 2, pp 2"
    peace = in_peace(settings)
    shutil.copytree(peace.folder / "save" / "step-00000002", tmp_path / "save" / "step-00000002")
    shutil.copy(peace.folder / "metrics.jsonl", tmp_path)
    mishap = ("tests/injected.py", "SIGKILL", place, str(rank), str(step), "once")
    job = Job(tmp_path / "out", *mishap, *words(tmp_path, SETTINGS[settings]), restarts=1, real=real)
    code, text = job.end()
    assert f"injected SIGKILL in {place}\n" in text, text
    assert_undisturbed(code, text, tmp_path, peace)


@pytest.mark.slow
def test_ranks_that_fail_together_are_tried_again(in_peace: Callable[[str], Peace], tmp_path: Path) -> None:
    """Four ranks that raise at one step are one failure, not four in a row."""
    settings = "tp 2, pp 2"
    mishap = ("tests/injected.py", "raise", "forward", "all", "3", "once")
    code, text = Job(tmp_path / "out", *mishap, *words(tmp_path, SETTINGS[settings]), restarts=1).end()
    assert code == 0, text
    assert text.count("ArithmeticError: injected in forward\nrank") > 1
    assert outcome(tmp_path) == outcome(in_peace(settings).folder)


# What a rank of the agent in agent.py sees ----------------------------------------------------------------------------

WHAT_IT_SEES = """
import json, os, signal, sys
from pathlib import Path
mine = {"argv": sys.argv, "name": __name__, "path": sys.path[0], "session": os.getsid(0) == os.getpid()}
mine["folder"] = os.getcwd()
mine["environment"] = dict(os.environ)
mine["signals"] = [str(signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
mine["open"] = sorted(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(mine))
"""
ITS_OWN = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}


@pytest.mark.slow
def test_forked_ranks_see_what_torchrun_gives(tmp_path: Path) -> None:
    """These tests are worth as much as their agent is like torchrun."""
    script = tmp_path / "script.py"
    script.write_text(WHAT_IT_SEES)
    seen = []
    for real in (False, True):
        code, text = Job(tmp_path / f"{real}.out", str(script), str(tmp_path), real=real).end()
        assert code == 0, text
        seen.append([json.loads((tmp_path / str(rank)).read_text()) for rank in range(SIZE)])
    for forked, executed in zip(*seen, strict=True):
        assert ITS_OWN.issubset(forked["environment"])
        for name in ITS_OWN:
            del forked["environment"][name], executed["environment"][name]
        assert forked == executed


# Requests to stop -----------------------------------------------------------------------------------------------------


def test_signals_are_noted_and_handlers_restored() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    stop = StopRequest()
    with stop.listening():
        assert not stop
        for _ in range(2):
            signal.raise_signal(signal.SIGUSR1)
        assert stop and stop.reason == "SIGUSR1"
    assert signal.getsignal(signal.SIGUSR1) is before


def test_time_runs_out() -> None:
    assert not StopRequest(3600.0)
    stop = StopRequest(1e-6)
    time.sleep(0.01)
    assert stop and stop.reason == "--exit-after-seconds"
