"""What the environment says about the launch, and that one process tells a user's mistake."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from megatron3d import rendezvous
from megatron3d.config import ConfigError, JobError
from megatron3d.launch import (
    FIRST_LINGERS,
    OTHERS_LINGER,
    Launch,
    launch_from_environment,
    read_launch,
    shared_mistakes,
    user_errors,
)
from megatron3d.rendezvous import check_rendezvous

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
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher's variables; what a rank that waits does with SIGTERM is undone."""
    for name in (*TORCHRUN, *SLURM):
        monkeypatch.delenv(name, raising=False)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def killed_while_waiting(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Instead of sleeping, the process gets SIGTERM, as from a launcher; the list has how long it meant to sleep."""
    asked: list[float] = []

    def sleep(seconds: float) -> None:
        asked.append(seconds)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(time, "sleep", sleep)
    return asked


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


@pytest.mark.parametrize("name", sorted({*TORCHRUN, "TORCHELASTIC_RESTART_COUNT"} - {"MASTER_ADDR"}))
@pytest.mark.parametrize("value", ["two", "1.5", "node0:1"])
def test_no_integer(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be an integer, not '{value}'"):
        read_launch(TORCHRUN | {name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "8"}, "rank 8 of 8 processes"),
        ({"RANK": "-1"}, "rank -1 of 8 processes"),
        ({"LOCAL_RANK": "4"}, "local rank 4 of 4 processes"),
        ({"WORLD_SIZE": "0"}, "4 processes run on this node .LOCAL_WORLD_SIZE. of 0 in all .WORLD_SIZE."),
        ({"LOCAL_WORLD_SIZE": "0"}, "0 processes run on this node .LOCAL_WORLD_SIZE. of 8 in all"),
        ({"LOCAL_WORLD_SIZE": "9"}, "9 processes run on this node .LOCAL_WORLD_SIZE. of 8 in all"),
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


COOKS = "Too many cooks: 7. Choose 1."


def fail(capsys: pytest.CaptureFixture[str], error: Exception | None = None) -> tuple[object, str]:
    """Exit code and standard error of a program that ends with a mistake that may be this process's alone."""
    with pytest.raises(SystemExit) as leaving, user_errors():
        raise error or ConfigError(COOKS)
    told = capsys.readouterr()
    assert told.out == ""
    return leaving.value.code, told.err


def fail_like_all(capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    """The same where every process of the machine finds the mistake."""
    with pytest.raises(ConfigError) as shared, shared_mistakes():
        raise ConfigError(COOKS)
    return fail(capsys, shared.value)


def test_a_process_of_its_own_speaks_and_waits_for_nobody(
    capsys: pytest.CaptureFixture[str], no_launcher: None, killed_while_waiting: list[float]
) -> None:
    assert fail(capsys) == fail_like_all(capsys) == (2, f"error: {COOKS}\n")
    assert killed_while_waiting == []


@pytest.mark.parametrize(("rank", "told"), [("0", f"error: {COOKS}\n"), ("1", "")])
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
    assert len(killed_while_waiting) == 1 and killed_while_waiting[0] <= 10


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


UNKILLED = [  # variables; what is told of a mistake of one's own, and of one that all of the machine make
    ("RANK=0 LOCAL_RANK=0", "error: ", "error: "),
    ("RANK=3 LOCAL_RANK=3", "error on rank 3: ", ""),
    ("RANK=8 LOCAL_RANK=0", "error on rank 8: ", "error on rank 8: "),
    ("RANK=3", "error on rank 3: ", ""),
    ("SLURM_PROCID=3 SLURM_LOCALID=1", "error on rank 3: ", ""),
    ("SLURM_PROCID=2 SLURM_LOCALID=0", "error on rank 2: ", "error on rank 2: "),
    ("RANK=first LOCAL_RANK=0", "error: ", "error: "),
    ("RANK=-1 LOCAL_RANK=1", "error on rank 1: ", ""),
    (f"RANK={'1' * 5000} LOCAL_RANK=1", "error on rank 1: ", ""),
    ("WORLD_SIZE=2", "error: ", "error: "),
]


@pytest.mark.parametrize(("variables", "own", "shared"), UNKILLED, ids=[case[0][:40] for case in UNKILLED])
def test_without_a_launcher_one_process_of_a_machine_speaks(
    variables: str,
    own: str,
    shared: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    no_launcher: None,
) -> None:
    """Nobody has come to end the others. What all of the machine find wrong, its first one tells; what may be wrong
    with one process alone, e.g. the device that it lacks, it tells itself."""
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    for assignment in variables.split():
        monkeypatch.setenv(*assignment.split("="))
    assert fail(capsys) == (2, f"{own}{COOKS}\n")
    assert fail_like_all(capsys) == (2, f"{shared}{COOKS}\n" if shared else "")
    assert waited == [FIRST_LINGERS if own == "error: " else OTHERS_LINGER] * 2


def test_mistakes_in_the_launch_are_shared_unless_an_index_is_out_of_range() -> None:
    shared = {"WORLD_SIZE": ["", "two", "0"], "LOCAL_WORLD_SIZE": ["9"], "MASTER_PORT": ["http"], "MASTER_ADDR": [""]}
    for name, value in [(name, value) for name, values in shared.items() for value in values]:
        with pytest.raises(ConfigError) as refusal:
            read_launch(TORCHRUN | {name: value})
        assert refusal.value.shared, name
    for name in ("RANK", "LOCAL_RANK"):
        with pytest.raises(ConfigError) as refusal:
            read_launch(TORCHRUN | {name: "8"})
        assert not refusal.value.shared


@pytest.mark.parametrize("address", ["node..0", "n" * 70 + ".example"])
def test_a_meeting_point_that_is_no_name(address: str) -> None:
    """Python's own encoding of host names fails before any name service is asked."""
    with pytest.raises(ConfigError, match=f"{address}.*cannot be resolved.*label") as refusal:
        check_rendezvous(address, 29400, hosts=False)
    assert refusal.value.shared


def test_a_name_service_that_is_slow_for_one_rank_is_told_by_that_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is a matter of time may be a rank's alone: as a mistake of all, nobody would ever hear of it."""
    release = threading.Event()
    monkeypatch.setattr(rendezvous, "RESOLVE_SECONDS", 0.01)
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: release.wait(10))
    with pytest.raises(ConfigError, match=r"did not answer in 0\.01 s") as refusal:
        check_rendezvous("node0", 29400, hosts=False)
    release.set()
    assert not refusal.value.shared


def test_what_ends_a_job_is_known_to_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_launcher: None
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setenv("RANK", "8")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert fail(capsys, JobError("rank 2: the disk is full")) == (1, "")
    monkeypatch.setenv("RANK", "0")
    assert fail(capsys, JobError("rank 2: the disk is full")) == (1, "error: rank 2: the disk is full\n")


def test_whatever_is_quoted_one_paragraph_is_told(capsys: pytest.CaptureFixture[str], no_launcher: None) -> None:
    assert fail(capsys, ConfigError("--save a\nb\x1b[31m: no.")) == (2, "error: --save a\\nb\\x1b[31m: no.\n")


def test_a_failed_job_leaves_with_another_code(capsys: pytest.CaptureFixture[str], no_launcher: None) -> None:
    with pytest.raises(SystemExit) as leaving, user_errors():
        raise JobError("rank 2: the disk is full")
    assert (leaving.value.code, capsys.readouterr().err) == (1, "error: rank 2: the disk is full\n")


def test_other_errors_pass() -> None:
    with pytest.raises(ZeroDivisionError), user_errors():
        1 / 0  # noqa: B018
