"""W&B and TensorBoard as guests: one run a job, no point lost, and no way for them to end a run.

A stand-in for the package records what it is told; where the real packages are installed, they are tried too.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import struct
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron3d import trackers
from megatron3d.config import CheckpointConfig, Config, ConfigError, LogConfig
from megatron3d.mesh import Mesh
from megatron3d.shelf import find
from megatron3d.trainer import Trainer
from megatron3d.validate import resolve
from tests import toy
from tests.ranks import on_mesh


class FakeWandb(types.ModuleType):
    """What the library uses of wandb; files what it is told."""

    def __init__(self, *, fails: str = "") -> None:
        super().__init__("wandb")
        self.fails = fails
        self.inits: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.axes: list[tuple[str, str | None]] = []
        self.ends: list[int] = []
        self.Settings = lambda: types.SimpleNamespace(login_timeout=None)

    def init(self, **settings: Any) -> FakeWandb:
        self._maybe_fail("init")
        self.inits.append(settings)
        self.id = settings["id"] or "made-up"
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes.append((name, step_metric))

    def log(self, numbers: dict[str, Any]) -> None:
        self._maybe_fail("log")
        self.logged.append(numbers)

    def finish(self, exit_code: int) -> None:
        self.ends.append(exit_code)
        self._maybe_fail("finish")

    def _maybe_fail(self, call: str) -> None:
        if call == self.fails:
            raise ConnectionError("no route\nto host")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    return put_in_place(monkeypatch, FakeWandb())


def put_in_place(monkeypatch: pytest.MonkeyPatch, module: FakeWandb) -> FakeWandb:
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def small(folder: Path, log: LogConfig, *, load: bool = False, save_interval: int = 0, **knobs: Any) -> Config:
    """A run of cheap steps that logs and saves in `folder`."""
    model = replace(toy.LLAMA, num_layers=2)
    config = toy.config(model, **{"global_batch_size": 2, "train_steps": 4, **knobs})
    saved = str(folder / "checkpoints")
    checkpoint = CheckpointConfig(save=saved, load=saved if load else "", save_interval=save_interval)
    log = replace(log, log_dir=str(folder / "log"), progress=False)
    return replace(config, checkpoint=checkpoint, log=log)


def run(config: Config, mesh: Mesh | None = None) -> Trainer:
    trainer = Trainer(config, mesh or Mesh.single(), toy.datasets(config.model))
    trainer.run()
    return trainer


def text_log(folder: Path) -> list[int]:
    """The steps in metrics.jsonl."""
    return [json.loads(line)["step"] for line in (folder / "log" / "metrics.jsonl").read_text().splitlines()]


def warnings(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]


WANDB = LogConfig(wandb_project="toys", wandb_name="small", wandb_mode="offline")


def test_what_wandb_is_told(fake: FakeWandb, tmp_path: Path) -> None:
    """One run with the config, ended as good, its own step axis; the row of every second step and of evaluations."""
    config = small(tmp_path, replace(WANDB, log_interval=2), eval_interval=3, eval_steps=1)
    run(config)
    (init,) = fake.inits
    assert (init["project"], init["name"], init["mode"], init["id"]) == ("toys", "small", "offline", None)
    assert init["config"]["model"]["num_layers"] == 2 and init["resume"] == "allow"
    assert init["settings"] == {"login_timeout": 15.0}, (
        "a setting that this wandb knows; a quarter of --timeout-seconds"
    )
    assert fake.axes == [("step", None), ("*", "step")] and fake.ends == [0]
    assert [numbers["step"] for numbers in fake.logged] == [2, 3, 4]
    assert all({"loss", "grad_norm", "lr", "tokens_per_second"} <= numbers.keys() for numbers in fake.logged)
    assert ["eval_perplexity" in numbers for numbers in fake.logged] == [False, True, True]
    assert "mfu" not in fake.logged[0], "unknown on a CPU: nothing to draw"


def test_modes_left_to_wandb(fake: FakeWandb, tmp_path: Path) -> None:
    """Without --wandb-mode and --wandb-name, WANDB_MODE and WANDB_NAME decide, which wandb reads itself."""
    run(small(tmp_path, LogConfig(wandb_project="toys")))
    assert fake.inits[0]["mode"] is None and fake.inits[0]["name"] is None


def test_a_resumed_run_goes_on_in_the_same_wandb_run(fake: FakeWandb, tmp_path: Path) -> None:
    """METR-08, METR-09: run to 4, resume from 2: the same id, every point of both, one init and one finish a run."""
    run(small(tmp_path, WANDB, save_interval=2))
    saved = tmp_path / "checkpoints"
    assert find(saved).index.meta["wandb_id"] == "made-up"
    (saved / "latest").write_text("step-00000002\n")
    resumed = run(small(tmp_path, WANDB, save_interval=2, load=True))
    assert [init["id"] for init in fake.inits] == [None, "made-up"] and fake.ends == [0, 0]
    assert [numbers["step"] for numbers in fake.logged] == [1, 2, 3, 4, 3, 4]
    assert resumed.wandb_id == "made-up" and find(saved).index.meta["wandb_id"] == "made-up"


def test_a_restart_before_the_first_checkpoint_goes_on_in_the_same_wandb_run(
    fake: FakeWandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a job that restarts by itself; one that is started anew begins a run of its own."""
    config = small(tmp_path, WANDB)
    by_itself = replace(config, checkpoint=replace(config.checkpoint, auto_resume=True))
    with monkeypatch.context() as failing:
        failing.setattr(Trainer, "step", lambda self: 1 // 0)
        with pytest.raises(ArithmeticError):
            run(by_itself)
    assert run(by_itself).wandb_id == "made-up"
    assert [init["id"] for init in fake.inits] == [None, "made-up"]
    run(replace(config, log=replace(config.log, log_dir="")))
    assert fake.inits[-1]["id"] is None


def test_the_id_outlives_a_resume_without_wandb(fake: FakeWandb, tmp_path: Path) -> None:
    """Neither a resume without the flag nor one whose init fails loses the run for the next resume."""
    run(small(tmp_path, WANDB))
    run(small(tmp_path, LogConfig(), load=True, train_steps=5))
    fake.fails = "init"
    run(small(tmp_path, WANDB, load=True, train_steps=6))
    fake.fails = ""
    run(small(tmp_path, WANDB, load=True, train_steps=7))
    assert [init["id"] for init in fake.inits] == [None, "made-up"]


def test_finish_also_on_error(fake: FakeWandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """METR-09: a run that fails is ended once, with a code that says so."""

    def fail(self: Trainer) -> Any:
        raise ArithmeticError

    monkeypatch.setattr(Trainer, "step", fail)
    with pytest.raises(ArithmeticError):
        run(small(tmp_path, WANDB))
    assert len(fake.inits) == 1 and fake.ends == [1]


def test_a_failure_is_not_held_up(fake: FakeWandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a network that is away: the other ranks have yet to hear of it."""
    answer, ended = threading.Event(), threading.Event()

    def finish(exit_code: int) -> None:
        answer.wait(20)
        ended.set()

    monkeypatch.setattr(trackers, "LAST_SECONDS", 0.1)
    monkeypatch.setattr(fake, "finish", finish)
    monkeypatch.setattr(Trainer, "step", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(small(tmp_path, WANDB))
    assert not ended.is_set()
    answer.set()


@pytest.mark.parametrize(("call", "logged", "ends"), [("init", 0, 0), ("log", 0, 0), ("finish", 4, 1)])
def test_one_warning_whatever_fails(
    call: str, logged: int, ends: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """METR-10: no network at the start, in the middle or at the end: one line, and the text log is whole."""
    fake = put_in_place(monkeypatch, FakeWandb(fails=call))
    run(small(tmp_path, WANDB))
    (warning,) = warnings(capsys)
    assert warning.startswith("warning: --wandb-project: ") and "ConnectionError: no route to host" in warning
    assert text_log(tmp_path) == [1, 2, 3, 4] and (len(fake.logged), len(fake.ends)) == (logged, ends)


@pytest.mark.parametrize(
    ("package", "log"),
    [("wandb", WANDB), ("tensorboard", LogConfig(tensorboard_dir="events"))],
    ids=["wandb", "tensorboard"],
)
def test_a_package_that_is_not_there(
    package: str, log: LogConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """METR-10: one warning that names the package; training goes on."""
    monkeypatch.setitem(sys.modules, package, None)  # makes its import fail
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    run(small(tmp_path, log))
    (warning,) = warnings(capsys)
    assert f"pip install {package}" in warning
    assert text_log(tmp_path) == [1, 2, 3, 4] and not Path("events").exists()


def test_options_of_a_run_that_is_not_recorded() -> None:
    """A name or a mode without a project has no effect, and is refused; so is a level or an interval out of range."""
    for log in (LogConfig(wandb_name="x"), LogConfig(wandb_mode="offline")):
        with pytest.raises(ConfigError, match="no effect without --wandb-project"):
            resolve(Config(log=log), world_size=1)
    for log in (LogConfig(log_interval=0), LogConfig(log_level=2), LogConfig(log_level=-1)):
        with pytest.raises(ConfigError, match="--log-"):
            resolve(Config(log=log), world_size=1)


# The real packages ----------------------------------------------------------------------------------------------------


def train_offline(mesh: Mesh, config: Config) -> str:
    return run(config, mesh).wandb_id


def recorded_points(run_file: Path) -> list[dict[str, Any]]:
    """The history in a .wandb file: records in LevelDB's log format, each a protocol buffer."""
    record_type, points = importlib.import_module("wandb.proto.wandb_internal_pb2").Record, []
    for payload in _log_records(run_file.read_bytes()):
        record = record_type.FromString(payload)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            points.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return points


def _log_records(data: bytes, header: int = 7, block: int = 32768) -> Iterator[bytes]:
    """Payloads after the file's own header; a record may be cut into parts at the end of a block."""
    at, parts = header, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


@pytest.fixture
def real_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that wandb, if installed, writes to."""
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    return tmp_path / "wandb"


@pytest.mark.slow
def test_one_offline_run_of_four_ranks(real_wandb: Path, tmp_path: Path) -> None:
    """METR-06, METR-08: 4 ranks, pp 2: exactly one run, with loss, lr and gradient norm at every step.

    Resumed from step 2: the same id, and every point of both parts is kept.
    """
    config = small(tmp_path, LogConfig(wandb_project="toys"), pp=2, dp=2, save_interval=2)
    run_id = on_mesh(config.parallel, train_offline, config)[0]
    first = sorted(real_wandb.glob("offline-run-*/run-*.wandb"))
    assert [file.name for file in first] == [f"run-{run_id}.wandb"]
    points = recorded_points(first[0])
    assert [point["step"] for point in points] == [1, 2, 3, 4]
    assert all(point["loss"] > 0 and point["grad_norm"] > 0 and point["lr"] > 0 for point in points)

    (tmp_path / "checkpoints" / "latest").write_text("step-00000002\n")
    resumed = small(tmp_path, LogConfig(wandb_project="toys"), pp=2, dp=2, load=True)
    assert on_mesh(config.parallel, train_offline, resumed)[0] == run_id
    (second,) = set(real_wandb.glob("offline-run-*/run-*.wandb")) - set(first)
    assert second.name == f"run-{run_id}.wandb"
    assert [point["step"] for point in recorded_points(second)] == [3, 4]
    assert recorded_points(first[0]) == points


@pytest.mark.slow
def test_a_wandb_folder_that_cannot_be_written(
    real_wandb: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """METR-10: WANDB_DIR below a file: training goes on, with all numbers in the text log."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "file" / "folder"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where wandb falls back to
    config = small(tmp_path, LogConfig(wandb_project="toys"))
    on_mesh(config.parallel, train_offline, config)
    assert text_log(tmp_path) == [1, 2, 3, 4]


@pytest.mark.slow
def test_event_files(tmp_path: Path) -> None:
    """TensorBoard draws loss and perplexity over the step; after a resume from step 2, each step has one point."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = LogConfig(tensorboard_dir=str(tmp_path / "events"))
    first = small(tmp_path, log, save_interval=2, eval_interval=4, eval_steps=1)
    run(first)
    (tmp_path / "checkpoints" / "latest").write_text("step-00000002\n")
    run(replace(first, checkpoint=replace(first.checkpoint, load=first.checkpoint.save)))
    assert len(os.listdir(tmp_path / "events")) == 2
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]
    (perplexity,) = events.Scalars("eval_perplexity")
    assert perplexity.step == 4 and perplexity.value > 1


def test_an_event_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One warning, and the numbers are in the text log."""
    pytest.importorskip("tensorboard")
    (tmp_path / "file").touch()
    run(small(tmp_path, LogConfig(tensorboard_dir=str(tmp_path / "file" / "events"))))
    assert len(warnings(capsys)) == 1 and text_log(tmp_path) == [1, 2, 3, 4]
