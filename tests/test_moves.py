"""Runs that stop and move: resumed, rescheduled, converted or imported, they go on as if nothing had happened.

Everything here trains, or measures whole processes. Run as a program, this file is the driver of the memory test: it
imports what a conversion needs and forks each of them, so that the peak of a process is told beside that of one whose
model is next to nothing. The boxes of a checkpoint are tested without processes in test_archive.py, a rank's state in
test_checkpoint.py, the files of a conversion in test_convert.py.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron3d import rng
from megatron3d.cli import parse
from megatron3d.config import CheckpointConfig, Config, ConfigError, LogConfig, ModelConfig
from megatron3d.convert import write_native
from megatron3d.data import IGNORE
from megatron3d.launch import Launch
from megatron3d.lr import learning_rate
from megatron3d.mesh import Mesh
from megatron3d.optimizer import StepResult
from megatron3d.params import ParamSpec, num_parameters, param_table
from megatron3d.resume import check_loadable
from megatron3d.sources import open_source
from megatron3d.trainer import Trainer
from megatron3d.validate import resolve
from tests import toy
from tests.lone import lone_trainer, whole_weights
from tests.ranks import on_mesh
from tools import convert_checkpoint

ROOT = Path(__file__).resolve().parent.parent
TINY = replace(toy.LLAMA, num_layers=2)
ADAM: dict[str, Any] = {"optimizer": "adamw", "lr": 0.01, "lr_schedule": "cosine", "train_steps": 10}


@dataclass
class Stretch:
    """What one rank did in some steps of a run."""

    results: list[StepResult]
    masks: list[str]
    """Digest of all dropout masks of each step."""
    weights: list[tuple[str, Any, Tensor]]
    """Boxes, at its end."""


def go(mesh: Mesh, config: Config, steps: int, load: str = "", save: str = "") -> Stretch:
    """Takes steps, from a checkpoint if there is one, and saves if asked. Torch's own generator is in another state in
    every process: nobody restores it."""
    torch.manual_seed(os.getpid())
    digest, draw = hashlib.sha256(), rng.dropout_mask

    def watched(*shape: Any, **key: Any) -> Tensor:
        mask = draw(*shape, **key)
        digest.update(mask.numpy().tobytes())
        return mask

    rng.dropout_mask = watched  # in this process alone, which ends after it
    trainer = Trainer(config, mesh, toy.datasets(config.model))
    if load:
        trainer.load(load)
    results, masks = [], []
    for _ in range(steps):
        digest = hashlib.sha256()
        results.append(trainer.step())
        masks.append(digest.hexdigest())
    if save:
        trainer.save(save)
    trainer.weights.finish_gather()
    return Stretch(results, masks, toy.local_boxes(trainer))


@pytest.mark.slow
def test_every_rank_goes_on_with_its_own_dropout(tmp_path: Path) -> None:
    """RES-09: dropout 0.1 on tp 2, pp 2, dp 2, stopped at step 5: losses of steps 6 to 10 and all weights are bit-equal
    to the uninterrupted run's, and so are the masks of each of the eight ranks, no two of which draw the same."""
    config = toy.config(replace(TINY, dropout=0.1), tp=2, pp=2, dp=2, global_batch_size=4, **ADAM)
    whole = on_mesh(config.parallel, go, config, 10)
    on_mesh(config.parallel, go, config, 5, "", str(tmp_path))
    resumed = on_mesh(config.parallel, go, config, 5, str(tmp_path))
    assert len({rank.masks[0] for rank in resumed}) == 8
    for there, here in zip(whole, resumed, strict=True):
        assert here.results == there.results[5:] and here.masks == there.masks[5:]
        for (name, box, value), (*at, expected) in zip(here.weights, there.weights, strict=True):
            assert at == [name, box] and torch.equal(value, expected), name


@pytest.mark.slow
def test_moments_survive_a_conversion_to_another_layout(tmp_path: Path) -> None:
    """CONV-14: tp 2, pp 2, dp 1, converted to tp 1, pp 1 and resumed on dp 4 under ZeRO-1: five losses and norms are
    those of the unconverted run to 1e-5."""
    knobs: dict[str, Any] = {"global_batch_size": 4, "zero": 1, **ADAM}
    old, new = toy.config(TINY, tp=2, pp=2, dp=1, **knobs), toy.config(TINY, dp=4, **knobs)
    on_mesh(old.parallel, go, old, 3, "", str(tmp_path / "old"))
    write_native(open_source(tmp_path / "old").source, tmp_path / "new", tp=1, pp=1)
    there = on_mesh(old.parallel, go, old, 5, str(tmp_path / "old"))[0].results
    here = on_mesh(new.parallel, go, new, 5, str(tmp_path / "new"))[0].results
    for key in ("loss", "grad_norm"):
        expected, found = ([getattr(result, key) for result in results] for results in (there, here))
        assert len(found) == 5 and found == pytest.approx(expected, rel=1e-5)


# Another schedule -----------------------------------------------------------------------------------------------------

NEW = {"lr": 0.1, "min_lr": 0.05, "lr_schedule": "wsd", "warmup_steps": 0, "decay_steps": 4}


def moved(config: Config, folder: Path) -> tuple[float, dict[str, Tensor]]:
    """The rate of the first step after a resume, and by how much it changes each weight."""
    trainer = Trainer(config, Mesh.single(), toy.datasets(config.model))
    trainer.load(str(folder))
    before, rate = whole_weights(trainer), trainer.learning_rate()
    trainer.step()
    return rate, {name: value - before[name] for name, value in whole_weights(trainer).items()}


def test_a_new_schedule_holds_from_the_first_step(tmp_path: Path) -> None:
    """RES-04: with --override-schedule another peak, minimum and decay are in the log and in the updates from the first
    step on; without it the run is refused. Never mixed."""
    save = tmp_path / "checkpoints"
    old = toy.config(replace(TINY, num_layers=1), global_batch_size=1, dtype="fp64", **ADAM | {"lr": 0.4})
    trainer = lone_trainer(old)
    for _ in range(3):
        trainer.step()
    trainer.save(str(save))
    log = LogConfig(log_dir=str(tmp_path / "log"), progress=False)
    new = replace(old, optim=replace(old.optim, **NEW), checkpoint=CheckpointConfig(load=str(save)), log=log)
    with pytest.raises(ConfigError, match=r"another schedule: lr 0\.4 -> 0\.1, min_lr .*Give --override-schedule"):
        check_loadable(new)
    new = replace(new, checkpoint=replace(new.checkpoint, override_schedule=True))
    assert {"lr 0.4 -> 0.1", "min_lr 0.0 -> 0.05", "decay_steps 0 -> 4"} <= set(check_loadable(new))

    assert Trainer(new, Mesh.single(), toy.datasets(new.model)).run()
    logged = [json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["lr"]) for row in logged] == [
        (step + 1, learning_rate(step, peak=0.1, minimum=0.05, schedule="wsd", warmup_steps=0, train_steps=10,
                                 decay_steps=4))
        for step in range(3, 10)
    ]  # fmt: skip
    assert logged[0]["lr"] == 0.1 and logged[-1]["lr"] == pytest.approx(0.06)

    (was, expected), (rate, found) = moved(old, save), moved(new, save)
    assert rate == 0.1 and was > 0.3
    assert toy.largest_gap(found, {name: change * (rate / was) for name, change in expected.items()})[0] < 1e-9


# Imported models ------------------------------------------------------------------------------------------------------

LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]  # tp, pp


def first_loss(mesh: Mesh, config: Config) -> float:
    trainer = Trainer(config, mesh, toy.datasets(config.model))
    trainer.load(config.checkpoint.load, weights_only=True)
    return trainer.step().loss


def imported(folder: Path, target: Path, tp: int = 1, pp: int = 1) -> Config:
    """The config of a run that begins with a folder of Hugging Face's, as the guide says, dropout not mentioned."""
    if not target.exists():
        convert_checkpoint.main(["--load", str(folder), "--save", str(target), "--seq-length", "24"])
    words = ["--config", str(target / "model.toml"), "--load", str(target), "--load-weights-only", "--mock-data"]
    words += ["--tp", str(tp), "--pp", str(pp), "--global-batch-size", "12", "--micro-batch-size", "2"]
    config = parse(words, Launch(world_size=tp * pp, from_torchrun=True))
    assert check_loadable(config) == []
    return config


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen2", "gpt2"])
def test_an_imported_model_begins_with_their_loss(case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """NUM-14: the first loss on (tp, pp) = (1, 1), (2, 1), (4, 1), (1, 2), (2, 2), no dropout option given, is
    transformers' own; dropout is that of config.json, and told where there is some."""
    from tests import hf  # transformers, which the driver below does without

    model = hf.saved(case, tmp_path / "hf")
    settings = tmp_path / "hf" / "config.json"
    without = {name: 0.0 for name in json.loads(settings.read_text()) if name.endswith("_pdrop")}
    if without:
        assert imported(tmp_path / "hf", tmp_path / "dropping").model.dropout == 0.1
        assert "dropout is 0.1" in capfd.readouterr().err
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **without}))
    losses = []
    for tp, pp in LAYOUTS:
        config = imported(tmp_path / "hf", tmp_path / "native", tp, pp)
        losses += on_mesh(config.parallel, first_loss, config)[:1]
    assert config.model.dropout == 0.0 and "dropout is" not in capfd.readouterr().err
    assert "dropout = 0.0" in (tmp_path / "native" / "model.toml").read_text()
    tokens, labels = toy.global_batch(config.model, 0, 12)
    logits = hf.their_logits(model, tokens)
    theirs = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE).item()
    assert losses == pytest.approx([theirs] * len(LAYOUTS), rel=1e-5)


# Memory ---------------------------------------------------------------------------------------------------------------

DEEP = ModelConfig(num_layers=24, hidden_size=448, ffn_hidden_size=1024, num_attention_heads=8, vocab_size=2000)
SIZE = 4 * num_parameters(param_table(resolve(Config(model=DEEP), world_size=1).model))  # bytes
CONVERSIONS = {
    "native -> native": ("native", "--tp", "2", "--pp", "2"),
    "native -> Hugging Face": ("native", "--to", "hf"),
    "native -> Megatron-LM": ("native", "--to", "megatron", "--tp", "2", "--pp", "2"),
    "Hugging Face -> native": ("native -> Hugging Face",),
    "Megatron-LM -> native": ("native -> Megatron-LM",),
}
"""What is converted, perhaps what an earlier one has made, and the flags."""


class Random:
    """A Source (interop.py) of random weights that are nowhere kept."""

    kinds = ("weight",)
    meta: Mapping[str, Any] = {}

    def __init__(self, config: Config) -> None:
        self.config = config
        self._specs: Mapping[str, ParamSpec] = {spec.name: spec for spec in param_table(config.model)}

    def dtype(self, kind: str, name: str) -> torch.dtype:
        return torch.float32

    def read(self, kind: str, name: str) -> Tensor:
        return torch.rand(self._specs[name].shape)


def drive(folder: Path) -> None:
    """To standard output, the bytes by which the peak of each conversion lies above that of the same with next to no
    model."""
    peaks = {}
    for model in (replace(DEEP, num_layers=2, hidden_size=32, ffn_hidden_size=32, vocab_size=8), DEEP):
        here = folder / str(model.num_layers)
        peak(functools.partial(write_native, Random(resolve(Config(model=model), world_size=1)), here / "native"))
        for name, (source, *flags) in CONVERSIONS.items():
            words = ["--load", str(here / source), "--save", str(here / name), "--jobs", "4", *flags]
            peaks[name] = peak(functools.partial(convert_checkpoint.main, words)) - peaks.get(name, 0)
    print(json.dumps(peaks))


def peak(action: Callable[[], object]) -> int:
    """The largest resident size of a copy of this process that does it, which must end well."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                action()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:  # or it would go on as a second driver
            os._exit(code)
    _, status, usage = os.wait4(process, 0)
    assert status == 0
    return usage.ru_maxrss * 1024


@pytest.mark.slow
def test_a_conversion_needs_far_less_memory_than_the_model_has(tmp_path: Path) -> None:
    """CONV-12: of a model of 24 layers, 200 MB; with four jobs, where memory is largest: below half of it, from and
    to each of the three kinds of files."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_moves", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    peaks = json.loads(done.stdout)
    shutil.rmtree(tmp_path)
    assert 195e6 < SIZE < 230e6 and list(peaks) == list(CONVERSIONS)
    assert all(0 < size < SIZE / 2 for size in peaks.values()), peaks


if __name__ == "__main__":
    drive(Path(sys.argv[1]))
