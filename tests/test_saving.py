"""Saving behind training: what is written is the state of the step that began it; all commit it at once."""

from __future__ import annotations

import hashlib
import re
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron3d import checkpoint, crashes
from megatron3d.config import CheckpointConfig, Config, FolderTaken, JobError
from megatron3d.failures import told
from megatron3d.launch import Launch
from megatron3d.mesh import Mesh
from megatron3d.shelf import find, occupied
from megatron3d.trainer import Trainer
from tests import toy
from tests.ranks import on_mesh

ADAM: dict[str, Any] = {"optimizer": "adamw", "lr": 0.01, "train_steps": 6}
TINY = replace(toy.LLAMA, num_layers=2, dropout=0.1)


def config_of(save: Path, *, tp: int = 1, **options: Any) -> Config:
    config = toy.config(TINY, tp=tp, dp=2, dtype="bf16", global_batch_size=2, **ADAM)
    return replace(config, checkpoint=CheckpointConfig(save=str(save), **options))


def files(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*")}


def held_back(mesh: Mesh, config: Config, folder: str, more: int) -> list[str]:
    """Begins a save after two steps, takes more steps while no rank can write, then lets go."""
    may_write, write = threading.Event(), checkpoint.write_pieces

    def late(*args: Any) -> Any:
        assert may_write.wait(60)
        return write(*args)

    checkpoint.write_pieces = late
    trainer = Trainer(config, mesh, toy.datasets(config.model))
    trainer.step(), trainer.step()
    trainer.saver.begin(folder, trainer._counts(), behind=True)
    votes = [str(trainer.step().written_votes) for _ in range(more)]
    may_write.set()
    trainer.saver.finish()
    checkpoint.write_pieces = write
    return votes


@pytest.mark.slow
def test_later_steps_change_nothing_of_what_is_written(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert on_mesh(config.parallel, held_back, config, str(tmp_path / "late"), 3) == [["0"] * 3] * 2
    on_mesh(config.parallel, held_back, config, str(tmp_path / "soon"), 0)
    late, soon = (files(tmp_path / name / "step-00000002") for name in ("late", "soon"))
    assert late == soon and len(late) == 3


def whole_run(mesh: Mesh, config: Config) -> tuple[list[Any], bool]:
    trainer = Trainer(config, mesh, toy.datasets(config.model))
    finished = trainer.run()
    return [trainer.steps, trainer.result], finished


@pytest.mark.slow
def test_a_run_saves_the_same_either_way(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every checkpoint byte by byte but for the flag itself, the last one whole when the run ends."""
    outcomes = {}
    for name in ("at-once", "behind"):
        config = config_of(tmp_path / name, save_interval=2, async_save=name == "behind")
        outcomes[name] = on_mesh(config.parallel, whole_run, config)
        said = capfd.readouterr().out
        assert [said.count(f"saved {tmp_path / name}/step-{step:08d}") for step in (2, 4, 6)] == [1, 1, 1]
    assert outcomes["at-once"] == outcomes["behind"]
    for step in (2, 4, 6):
        one, other = (files(tmp_path / name / f"step-{step:08d}") for name in outcomes)
        assert {k: v for k, v in one.items() if k != "index.json"} == {
            k: v for k, v in other.items() if k != "index.json"
        }
    assert (tmp_path / "behind" / "latest").read_text() == "step-00000006\n"


def failing_run(mesh: Mesh, config: Config) -> str:
    write = checkpoint.write_pieces

    def fail(path: Path, pieces: Any) -> Any:
        if mesh.rank == 1 and "00000004" in str(path):
            raise OSError(28, "No space left on device", str(path))
        return write(path, pieces)

    checkpoint.write_pieces = fail
    try:
        Trainer(config, mesh, toy.datasets(config.model)).run()
    except JobError as error:
        return str(error)
    finally:
        checkpoint.write_pieces = write
    return "nothing happened"


@pytest.mark.slow
def test_a_write_that_fails_ends_all_ranks_and_leaves_the_last_one(tmp_path: Path) -> None:
    config = config_of(tmp_path, save_interval=2, async_save=True)
    texts = on_mesh(config.parallel, failing_run, config)
    assert texts[0] == texts[1] and "rank 1: saving step 4 failed: OSError: [Errno 28] No space left" in texts[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000002"]


def stopped_run(mesh: Mesh, config: Config) -> str:
    """A run whose fourth step has no finite gradient, and which ends for it."""
    trainer = Trainer(config, mesh, toy.datasets(config.model))
    step = trainer.step

    def poisoned() -> Any:
        if trainer.steps == 2:
            trainer.weights.buckets[0].fill_(float("nan"))
        return step()

    trainer.step = poisoned  # type: ignore[method-assign]
    try:
        trainer.run()
    except JobError as error:
        return str(error)
    return "nothing happened"


@pytest.mark.slow
def test_a_job_that_gives_up_still_keeps_what_it_has_begun_to_save(tmp_path: Path) -> None:
    config = config_of(tmp_path, save_interval=2, async_save=True)
    config = replace(config, run=replace(config.run, max_bad_steps=1))
    texts = on_mesh(config.parallel, stopped_run, config)
    assert texts[0] == texts[1] and "no finite gradient" in texts[0]
    assert (tmp_path / "latest").read_text() == "step-00000002\n"


# Disks that do not take it --------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 5 MB, enough for two checkpoints or three."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("nobody may mount a file system here; the limit on file sizes is tested in any case")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def run_until_full(mesh: Mesh, config: Config, limit: int) -> str:
    """A run in which rank 1 may only write files of so many bytes, if that is not 0."""
    if limit and mesh.rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    begin = time.monotonic()
    try:
        Trainer(config, mesh, toy.datasets(config.model)).run()
    except JobError as error:
        assert time.monotonic() - begin < 60
        return str(error)
    return "it went well"


@pytest.mark.slow
@pytest.mark.parametrize("behind", [False, True])
def test_a_disk_that_fills_up(behind: bool, small_disk: Path) -> None:
    """CKPT-05: four ranks, 5 MB: all say so, with the path; `latest` names the checkpoint before, and nothing is left
    of the new one."""
    config = config_of(small_disk, tp=2, save_interval=1, async_save=behind)
    texts = on_mesh(config.parallel, run_until_full, config, 0)
    assert len(texts) == 4 and set(texts) == {texts[0]}
    failed = re.match(r"rank \d: saving step (\d) failed: .*No space left on device", texts[0])
    assert failed and str(small_disk) in texts[0]
    whole = [f"step-{step:08d}" for step in range(1, int(failed[1]))]
    assert whole and sorted(path.name for path in small_disk.iterdir()) == ["latest", *whole]
    assert (small_disk / "latest").read_text() == f"{whole[-1]}\n"
    assert find(small_disk).passed_over == () and find(small_disk).path.name == whole[-1]


@pytest.mark.slow
def test_a_folder_that_becomes_read_only(small_disk: Path) -> None:
    """All ranks say so; what was there before still loads."""
    config = config_of(small_disk, save_interval=4)
    config = replace(config, run=replace(config.run, train_steps=4))
    on_mesh(config.parallel, run_until_full, config, 0)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    texts = on_mesh(config.parallel, run_until_full, config, 0)
    assert texts[0] == texts[1] and "Read-only file system" in texts[0] and str(small_disk) in texts[0]
    assert find(small_disk).path.name == "step-00000004"


@pytest.mark.slow
def test_a_file_that_one_rank_cannot_finish(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    texts = on_mesh(config.parallel, run_until_full, config, 100_000)
    assert texts[0] == texts[1] and "rank 1: saving step 6 failed: OSError: [Errno 27] File too large" in texts[0]
    assert "rank-00001.safetensors" in texts[0] and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_keeping_one_never_means_having_none(tmp_path: Path) -> None:
    """CKPT-03: the second save fails, the first is still there and whole."""
    config = config_of(tmp_path, save_interval=2, keep_last=1)
    texts = on_mesh(config.parallel, failing_run, config)
    assert "saving step 4 failed" in texts[0]
    assert find(tmp_path).path.name == "step-00000002"


def test_two_runs_never_save_into_one_folder(tmp_path: Path) -> None:
    """Each would take what the other has begun for the remains of a crash."""
    config = toy.config(TINY, global_batch_size=1, **ADAM)
    config = replace(config, checkpoint=CheckpointConfig(save=str(tmp_path)))
    trainer = Trainer(config, Mesh.single(), toy.datasets(config.model))
    with occupied(tmp_path), pytest.raises(FolderTaken, match=f"another run is saving into {tmp_path} now"):
        trainer.run()
    assert trainer.run() and find(tmp_path).index.meta["step"] == 6


def test_a_failure_that_all_know_of_is_counted_too(tmp_path: Path) -> None:
    """A disk that is full would be full again; a folder that is another's is no failure of this run."""
    config = replace(toy.config(TINY), checkpoint=CheckpointConfig(save=str(tmp_path)))
    for error, counted in ((FolderTaken("taken"), (-1, 0)), (JobError("full"), (0, 1))):
        with pytest.raises(JobError), told(config, Mesh.single(), Launch()):
            raise error
        assert crashes.read(tmp_path) == counted
