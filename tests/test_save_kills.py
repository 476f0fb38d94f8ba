"""Killed around a save: whatever the moment, the next attempt goes on and nothing is lost."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron3d import shelf
from megatron3d.signals import STOPPED
from tests.agent import POLL, SIZE, Job
from tests.disturbed import SETTINGS, STEPS, Peace, assert_undisturbed, words

SEEDS = [pytest.param(seed, marks=() if seed < 10 else pytest.mark.soak) for seed in range(100)]
SAVE_SECONDS = 0.06  # from the making of the folder to a while after the commit


def wait_for_save(job: Job, save: Path, step: int) -> list[int]:
    """The ranks of the first attempt, as soon as the save of `step` has begun."""
    processes = job.ranks()
    over = False
    while not (shelf.aside(save, step).exists() or (save / shelf.name_of(step)).exists()):
        assert not over, job.out.read_text()
        over = job.process.poll() is not None  # then one more look
        time.sleep(0.0005)
    return processes


def wait_until_still(job: Job, process: int) -> None:
    """Until a rank has stopped itself."""
    while Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert job.process.poll() is None, job.out.read_text()
        time.sleep(POLL)


def kill_around_save(job: Job, save: Path, step: int, victims: list[int], moment: float) -> bool:
    """Kills these ranks of the first attempt so long after the save of `step` has begun; False if it had ended."""
    processes = wait_for_save(job, save, step)
    time.sleep(moment)
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(processes[victim], signal.SIGKILL)
    return "ended with -9\n" in job.end()[1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.usefixtures("quick_roll_call")
def test_a_kill_around_a_save_loses_nothing(seed: int, in_peace: Callable[[str], Peace], tmp_path: Path) -> None:
    """CKPT-01: SIGKILL of one rank or of all at a random moment around a save, at once or behind training, on all
    settings: `latest` names a whole checkpoint, and the run ends in the bytes of one in peace."""
    generator = random.Random(seed)
    name = list(SETTINGS)[seed % len(SETTINGS)]
    behind, everyone = generator.random() < 0.5, generator.random() < 0.3
    victims = list(range(SIZE)) if everyone else [generator.randrange(SIZE)]
    step, moment, killed = generator.choice(range(2, STEPS + 1, 2)), generator.uniform(0, SAVE_SECONDS), False
    folder = tmp_path
    while not killed:
        folder = tmp_path / f"{moment:.5f}"
        folder.mkdir()
        line = [*words(folder, SETTINGS[name]), *(["--async-save"] if behind else [])]
        job = Job(folder / "out", "pretrain_gpt.py", *line, restarts=1)
        killed = kill_around_save(job, folder / "save", step, victims, moment)
        moment /= 2  # it was too late
    assert shelf.find(folder / "save").passed_over == ()
    assert_undisturbed(*job.end(), folder, in_peace(name))


@pytest.mark.slow
@pytest.mark.parametrize("behind", [False, True])
def test_two_signals_around_a_save_stop_all_at_one_step(
    behind: bool, in_peace: Callable[[str], Peace], tmp_path: Path
) -> None:
    """To one rank, while it saves: all save one step and leave, and the next job ends as one in peace. The rank stands
    still until it has the first one: the run would soon have no step left to stop after."""
    name = "tp 2, pp 2"
    line = [*words(tmp_path, SETTINGS[name]), *(["--async-save"] if behind else [])]
    place = ("evaluate", "1", "3") if behind else ("save", "1", "2")  # before step 3 is over, nothing is committed
    job = Job(tmp_path / "out", "tests/injected.py", "SIGSTOP", *place, "once", *line)
    rank = job.ranks()[1]
    wait_until_still(job, rank)
    for number in (signal.SIGUSR1, signal.SIGCONT, signal.SIGUSR1):
        os.kill(rank, number)
        time.sleep(0.003)
    code, text = job.end()
    assert code == 1 and set(re.findall(r"exitcode\s*: (-?\d+)", text)) == {str(STOPPED)}, text
    (step,) = re.findall(r"stopped after step (\d+), as asked", text)
    found = shelf.find(tmp_path / "save")
    assert found.path.name == shelf.name_of(int(step)) and found.passed_over == ()
    assert_undisturbed(*Job(tmp_path / "again", "pretrain_gpt.py", *line).end(), tmp_path, in_peace(name))
