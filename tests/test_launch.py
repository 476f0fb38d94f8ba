"""What the environment says about the launch, and that one process tells a user's mistake."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from megatron3d.config import ConfigError, JobError
from megatron3d.launch import Launch, launch_from_environment, read_launch, user_errors

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NNODES": "2"}
MEETING = {"MASTER_ADDR": "node0", "MASTER_PORT": "29400"}
PLACE = Launch(
    rank=5,
    world_size=8,
    local_rank=1,
    local_world_size=4,
    master_addr="node0",
    master_port=29400,
    from_torchrun=True,
)


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, *SLURM):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def killed_while_waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Instead of sleeping, the process gets SIGTERM, as from a launcher; the list has how long it meant to sleep."""
    asked: list[float] = []

    def sleep(seconds: float) -> None:
        asked.append(seconds)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(time, "sleep", sleep)
    before = signal.getsignal(signal.SIGTERM)
    yield asked
    signal.signal(signal.SIGTERM, before)


def test_torchrun() -> None:
    assert read_launch(TORCHRUN) == PLACE
    assert read_launch(TORCHRUN | SLURM | {"SLURM_PROCID": "0"}) == PLACE


def test_nobody() -> None:
    assert read_launch({}) == Launch() == Launch(rank=0, world_size=1, local_rank=0, local_world_size=1)
    assert read_launch(MEETING) == Launch()
    assert read_launch(dict.fromkeys(TORCHRUN, "")) == Launch()


def test_slurm_needs_a_meeting_point() -> None:
    assert read_launch(SLURM | MEETING) == PLACE
    assert read_launch(SLURM) == Launch()
    uneven = SLURM | MEETING | {"SLURM_NTASKS": "7"}
    assert read_launch(uneven).local_world_size == 4


@pytest.mark.parametrize("missing", TORCHRUN)
def test_half_set(missing: str) -> None:
    env = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(ConfigError, match=f"RANK.* set, {missing} not"):
        read_launch(env)


@pytest.mark.parametrize("name", sorted(set(TORCHRUN) - {"MASTER_ADDR"}))
@pytest.mark.parametrize("value", ["two", "1.5", "node0:1"])
def test_no_integer(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be an integer, not '{value}'"):
        read_launch(TORCHRUN | {name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "8"}, "rank 8 of 8 processes"),
        ({"RANK": "-1"}, "rank -1 of 8 processes"),
        ({"WORLD_SIZE": "0"}, "rank 5 of 0 processes"),
        ({"LOCAL_RANK": "4"}, "local rank 4 of 4 processes"),
    ],
)
def test_out_of_range(change: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_launch(TORCHRUN | change)


def test_reads_this_process(monkeypatch: pytest.MonkeyPatch, no_launcher: None) -> None:
    assert launch_from_environment() == Launch()
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert launch_from_environment() == PLACE


def fail(capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    """Exit code and standard error of a program that ends with a user's mistake."""
    with pytest.raises(SystemExit) as leaving, user_errors():
        raise ConfigError("Too many cooks: 7. Choose 1.")
    told = capsys.readouterr()
    assert told.out == ""
    return leaving.value.code, told.err


def test_a_single_process_speaks_and_leaves(
    capsys: pytest.CaptureFixture[str], no_launcher: None, killed_while_waiting: list[float]
) -> None:
    assert fail(capsys) == (2, "error: Too many cooks: 7. Choose 1.\n")
    assert killed_while_waiting == []


@pytest.mark.parametrize(("rank", "told"), [("0", "error: Too many cooks: 7. Choose 1.\n"), ("1", "")])
def test_one_rank_speaks_and_all_leave_alike(
    rank: str,
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    no_launcher: None,
    killed_while_waiting: list[float],
) -> None:
    """Half the variables are missing here: the mistake may be in them."""
    monkeypatch.setenv("RANK", rank)
    assert fail(capsys) == (2, told)
    assert len(killed_while_waiting) == 1 and killed_while_waiting[0] <= 5


def test_tasks_of_srun_are_told_apart(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    no_launcher: None,
    killed_while_waiting: list[float],
) -> None:
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert fail(capsys) == (2, "")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert fail(capsys)[1].startswith("error: ")


def test_a_rank_alone_with_its_mistake_tells_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_launcher: None
) -> None:
    """Nobody has come to end it: the first rank has no such mistake, e.g. has the file that this node lacks."""
    waited: list[float] = []
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr("time.sleep", waited.append)
    assert fail(capsys) == (2, "error on rank 3: Too many cooks: 7. Choose 1.\n")
    assert waited == [5.0]


def test_a_failed_job_leaves_with_another_code(capsys: pytest.CaptureFixture[str], no_launcher: None) -> None:
    with pytest.raises(SystemExit) as leaving, user_errors():
        raise JobError("rank 2: the disk is full")
    assert (leaving.value.code, capsys.readouterr().err) == (1, "error: rank 2: the disk is full\n")


def test_other_errors_pass() -> None:
    with pytest.raises(ZeroDivisionError), user_errors():
        1 / 0  # noqa: B018
