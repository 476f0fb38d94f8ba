"""Checkpoints: a resumed run goes on bit by bit, on any layout; failures leave the old ones; damage is found."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron3d import archive, checkpoint, shelf
from megatron3d.config import CheckpointConfig, Config, ConfigError, JobError, ModelConfig
from megatron3d.data import Datasets, sample_window
from megatron3d.layout import Box, runs
from megatron3d.mesh import Mesh
from megatron3d.params import num_parameters, param_table
from megatron3d.resume import check_loadable, saved_config
from megatron3d.trainer import Trainer
from tests import toy
from tests.lone import lone_trainer, whole_weights
from tests.ranks import RankFailure, on_mesh

TIED = replace(toy.LLAMA, tied_embeddings=True, num_layers=3)
ADAM: dict[str, Any] = {"optimizer": "adamw", "lr": 0.01, "lr_schedule": "cosine", "train_steps": 12, "clip_grad": 1.0}


class Recorder:
    """Ten samples, in a new order each epoch; remembers which of the run's samples were asked for."""

    size = 10
    seq_length = 32

    def __init__(self, model: ModelConfig) -> None:
        self.samples = toy.RandomData(model.vocab_size, model.seq_length)
        self.asked: list[int] = []

    def sample(self, index: int) -> Any:
        self.asked.append(index)
        return self.samples.sample(sample_window(index, self.size, seed=3))


@dataclass
class State:
    """What one rank has and did: boxes by kind; results, learning rates and samples read, step by step."""

    boxes: dict[str, list[tuple[str, Box, Tensor]]]
    results: list[Any]
    rates: list[float]
    asked: list[list[int]]
    counts: tuple[int, ...]


def build(mesh: Mesh, config: Config) -> tuple[Trainer, Recorder]:
    recorder = Recorder(config.model)
    return Trainer(config, mesh, Datasets(recorder, None, "")), recorder


def advance(trainer: Trainer, recorder: Recorder, steps: int) -> State:
    """Takes steps and reports."""
    results, rates, asked = [], [], []
    for _ in range(steps):
        recorder.asked.clear()
        rates.append(trainer.learning_rate())
        results.append(trainer.step())
        asked.append(list(recorder.asked))
    trainer.weights.finish_gather()
    counts = (trainer.steps, trainer.consumed_samples, trainer.skipped_steps, trainer.optimizer.count)
    return State(state_boxes(trainer), results, rates, asked, counts)


def state_boxes(trainer: Trainer) -> dict[str, list[tuple[str, Box, Tensor]]]:
    """Boxes of weights, masters and moments that this rank holds, by kind."""
    found = {"weight": toy.local_boxes(trainer)}
    for bucket, span in zip(trainer.weights.layout.buckets, trainer.optimizer.spans, strict=True):
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            tensor = getattr(span, kind)
            if tensor is None:
                continue
            for run in runs(bucket, span.start, span.start + len(tensor)):
                for element, box in run.boxes():
                    values = tensor[element - span.start :][: int(np.prod([b - a for a, b in box]))]
                    view = values.view([b - a for a, b in box]).clone()
                    found.setdefault(kind, []).append((run.part.spec.name, box, view))
    return found


def gathered(config: Config, ranks: list[State]) -> dict[str, dict[str, Tensor]]:
    """Whole tensors by kind and name; replicas are asserted equal to the last bit."""
    table = param_table(config.model)
    return {kind: toy.assemble(table, [rank.boxes[kind] for rank in ranks]) for kind in ranks[0].boxes}


def assert_equal(a: dict[str, dict[str, Tensor]], b: dict[str, dict[str, Tensor]]) -> None:
    assert a.keys() == b.keys()
    for kind, tensors in a.items():
        for name, value in tensors.items():
            assert torch.equal(value, b[kind][name]), f"{kind} of {name}"


def begin_and_save(
    mesh: Mesh, config: Config, folder: str, steps: int, more: int, behind: bool = False
) -> tuple[State, State]:
    """State at the save after `steps`, and `more` steps later in the same run; saved at once, or `behind` those."""
    trainer, recorder = build(mesh, config)
    trainer.weights.load(toy.random_weights(config.model))
    trainer.optimizer.reset_masters()
    before = advance(trainer, recorder, steps)
    trainer.saver.begin(folder, trainer._counts(), behind=behind)
    if not behind:
        trainer.saver.finish()
    later = advance(trainer, recorder, more)
    trainer.saver.finish()
    return before, later


def load_and_go_on(mesh: Mesh, config: Config, folder: str, steps: int, save: str = "") -> tuple[State, State]:
    """State right after loading, and `steps` later; saved again at once if asked."""
    trainer, recorder = build(mesh, config)
    trainer.load(folder)
    loaded = advance(trainer, recorder, 0)
    if save:
        trainer.save(save)
    return loaded, advance(trainer, recorder, steps)


def moment_norms(state: dict[str, dict[str, Tensor]]) -> dict[str, float]:
    return {
        kind: sum(value.double().square().sum().item() for value in state[kind].values()) ** 0.5
        for kind in ("exp_avg", "exp_avg_sq")
    }


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "behind"), [("fp32", False), ("bf16", True), ("fp16", True)])
def test_resume_is_bit_equal(dtype: str, behind: bool, tmp_path: Path) -> None:
    """Save in the middle of the warm-up, of an epoch and of the loss scale's window, at once or behind training,
    dropout 0.1, AdamW, tp 2, dp 2: the resumed run repeats the uninterrupted one: losses, norms, weights, masters,
    moments. RES-01: learning rates equal to the last bit. RES-10: norms of the moments before and after. SAMP-06: the
    samples go on where they were."""
    model = replace(toy.LLAMA, dropout=0.1, num_layers=2)
    config = toy.config(model, tp=2, dp=2, dtype=dtype, warmup_steps=6, global_batch_size=4, micro_batch_size=2, **ADAM)
    saved = on_mesh(config.parallel, begin_and_save, config, str(tmp_path), 3, 4, behind)
    resumed = on_mesh(config.parallel, load_and_go_on, config, str(tmp_path), 4)
    at_save, at_load = (gathered(config, [rank[0] for rank in ranks]) for ranks in (saved, resumed))
    assert_equal(at_load, at_save)
    assert moment_norms(at_load) == moment_norms(at_save) and min(moment_norms(at_save).values()) > 0
    assert_equal(*(gathered(config, [rank[1] for rank in ranks]) for ranks in (resumed, saved)))
    for (_, there), (_, here) in zip(saved, resumed, strict=True):
        assert there.results == here.results and there.rates == here.rates and there.asked == here.asked
        assert there.counts == here.counts == (7, 28, 0, 7)
    assert saved[0][1].rates == pytest.approx([0.01 * step / 7 for step in (4, 5, 6, 7)])
    samples = sorted(sample for rank in resumed[::2] for step in rank[1].asked for sample in step)
    assert samples == list(range(12, 28))


def check_move(saving: Config, loading: Config, folder: str, *, exact: bool = False) -> None:
    """Save under one layout, load under another: all state is equal, and the next losses agree."""
    saved = on_mesh(saving.parallel, begin_and_save, saving, folder, 2, 2)
    moved = on_mesh(loading.parallel, load_and_go_on, loading, folder, 2)
    assert_equal(gathered(loading, [rank[0] for rank in moved]), gathered(saving, [rank[0] for rank in saved]))
    there, here = saved[0][1], moved[0][1]
    assert there.rates == here.rates and there.counts == here.counts
    for key in ("loss", "grad_norm"):
        expected, found = ([getattr(result, key) for result in state.results] for state in (there, here))
        assert found == (expected if exact else pytest.approx(expected, rel=1e-5))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [({"tp": 2, "pp": 2}, {"dp": 4}), ({}, {"tp": 2, "pp": 2, "dp": 2}), ({"tp": 4}, {"pp": 3})],
    ids=str,
)
def test_resume_on_another_layout(old: dict[str, int], new: dict[str, int], tmp_path: Path) -> None:
    """Weights, masters and moments are equal after gathering; losses go on within rounding. Vocabulary 131 (padded
    differently), key/value heads 2 (whole on the ranks of tp 4), tied embeddings."""
    knobs: dict[str, Any] = {"global_batch_size": 4, "dtype": "fp32", **ADAM}
    check_move(toy.config(TIED, **old, **knobs), toy.config(TIED, **new, **knobs), str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1])
def test_resume_with_the_other_zero_stage(zero: int, tmp_path: Path) -> None:
    """Exact: what each rank keeps of the optimizer changes, the run does not. bf16, with masters kept apart."""
    knobs: dict[str, Any] = {"global_batch_size": 4, "dtype": "bf16", "dp": 2, "pp": 2, **ADAM}
    check_move(
        toy.config(TIED, zero=zero, **knobs), toy.config(TIED, zero=1 - zero, **knobs), str(tmp_path), exact=True
    )


@pytest.mark.slow
def test_resume_at_other_data_parallel_sizes(tmp_path: Path) -> None:
    """RES-12: ZeRO-1, dp 2 -> 4 -> 1 -> 3: moments equal after gathering each time, losses those of an uninterrupted
    run. SAMP-04: mid-epoch, and the global sequence of samples is the uninterrupted one."""
    configs = {dp: toy.config(TIED, dp=dp, global_batch_size=12, **ADAM) for dp in (2, 4, 1, 3)}
    whole = on_mesh(configs[2].parallel, begin_and_save, configs[2], str(tmp_path / "2"), 1, 6)
    before = gathered(configs[2], [rank[0] for rank in whole])
    done, losses = 1, [result.loss for result in whole[0][1].results]
    for old, new in ((2, 4), (4, 1), (1, 3)):
        config = configs[new]
        ranks = on_mesh(config.parallel, go_on_and_save, config, str(tmp_path / f"{old}"), 2, str(tmp_path / f"{new}"))
        assert_equal(gathered(config, [rank[0] for rank in ranks]), before)
        before = gathered(config, [rank[1] for rank in ranks])
        found = [result.loss for result in ranks[0][1].results]
        assert found == pytest.approx(losses[done - 1 : done + 1], rel=1e-5)
        for step in range(2):
            first = 12 * (done + step)
            asked = [sample for rank in ranks for sample in rank[1].asked[step]]
            assert asked == list(range(first, first + 12)), "each rank its consecutive share, in rank order"
        done += 2


def go_on_and_save(mesh: Mesh, config: Config, folder: str, steps: int, save: str) -> tuple[State, State]:
    trainer, recorder = build(mesh, config)
    trainer.load(folder)
    loaded = advance(trainer, recorder, 0)
    later = advance(trainer, recorder, steps)
    trainer.save(save)
    return loaded, later


@pytest.mark.parametrize(
    ("old", "new"),
    [("bf16", "fp32"), ("fp32", "bf16"), ("fp32", "fp64"), ("fp64", "bf16"), ("bf16", "fp16"), ("fp16", "bf16")],
    ids=str,
)
def test_another_type(old: str, new: str, tmp_path: Path) -> None:
    """The most exact values there are go on: masters into weights of another type; fp32 weights into masters. So no
    value is rounded twice."""
    first = lone_trainer(toy.config(dtype=old, global_batch_size=1, **ADAM))
    first.step()
    first.save(str(tmp_path))
    second = Trainer(toy.config(dtype=new, global_batch_size=1, **ADAM), Mesh.single(), toy.datasets(toy.LLAMA))
    second.load(str(tmp_path))
    for one, other in zip(first.optimizer.spans, second.optimizer.spans, strict=True):
        assert torch.equal(other.master, one.master.to(other.master))
        assert torch.equal(other.weight, other.master.to(other.weight))
        assert one.exp_avg is not None and other.exp_avg is not None
        assert torch.equal(other.exp_avg, one.exp_avg.to(other.exp_avg))


# What is on the disk --------------------------------------------------------------------------------------------------


def save_once(mesh: Mesh, config: Config, folder: str) -> dict[str, list[tuple[str, Box, Tensor]]]:
    trainer, _ = build(mesh, config)
    trainer.weights.load(toy.random_weights(config.model))
    trainer.optimizer.reset_masters()
    trainer.step()
    trainer.save(folder)
    return state_boxes(trainer)


SAVED = {"kv whole": replace(toy.LLAMA, num_layers=2), "tied": replace(toy.GPT2, num_layers=2)}


@pytest.mark.slow
@pytest.mark.parametrize("model", SAVED.values(), ids=SAVED)
def test_every_value_is_written_exactly_once(model: ModelConfig, tmp_path: Path) -> None:
    """Read with safetensors alone: over all files each value of each kind occurs once, unpadded, and is the state's.
    DIV-04: 131 rows. DIV-10: dp 3 writes no padding. GRP-10: saved right after a step, the weights are the updated
    ones. No file is a pickle."""
    layout = {"tp": 4, "pp": 2} if not model.tied_embeddings else {"dp": 3, "pp": 2}
    config = toy.config(model, dtype="bf16", global_batch_size=3, **layout, **ADAM)
    ranks = on_mesh(config.parallel, save_once, config, str(tmp_path))
    found = shelf.find(tmp_path)
    folder, index = found.path, found.index
    files = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    assert sorted(path.name for path in folder.iterdir()) == ["index.json", *sorted(files)]
    assert sum(tensor.numel() for file in files.values() for tensor in file.values()) == 4 * num_parameters(
        param_table(config.model)
    )
    assert set(index.tensors) == {"weight", "master", "exp_avg", "exp_avg_sq"}
    for kind, tensors in index.tensors.items():
        state = toy.assemble(param_table(config.model), [rank[kind] for rank in ranks])
        assert set(tensors) == set(state)
        for name, stored in tensors.items():
            count = np.zeros(stored.shape, dtype=int)
            for box in stored.boxes:
                where = tuple(slice(start, stop) for start, stop in box.box)
                count[where] += 1
                assert torch.equal(files[box.file][box.key], state[name][where])
            assert stored.shape == tuple(state[name].shape) and (count == 1).all(), f"{kind} of {name}"
    for path in folder.iterdir():
        start = path.read_bytes()[:9]
        assert start[:1] == b"{" or start[8:9] == b"{", f"{path.name} is neither JSON nor safetensors"


def test_counts_and_config_are_in_the_index(tmp_path: Path) -> None:
    config = toy.config(global_batch_size=2, **ADAM)
    trainer = lone_trainer(config)
    trainer.step()
    trainer.skipped_steps = 1  # as if one of two had been skipped
    trainer.steps, trainer.consumed_samples, trainer.consumed_tokens = 2, 4, 128
    trainer.save(str(tmp_path))
    index = shelf.find(tmp_path).index
    meta = dict(index.meta)
    assert set(meta.pop("versions")) == {"megatron3d", "torch", "python"}
    assert meta.pop("stages") == [["embedding", *(f"layers.{i}" for i in range(config.model.num_layers)), "head"]]
    assert {key: meta[key] for key in meta if key != "config"} == {
        "step": 2,
        "consumed_samples": 4,
        "consumed_tokens": 128,
        "skipped_steps": 1,
        "adam_count": 1,
        "bad_steps": 0,
        "loss_scale": {"enabled": False, "value": 1.0, "good_steps": 0, "patience": 2, "at_floor": 0},
        "wandb_id": "",
    }
    assert saved_config(index) == config
    other = Trainer(config, Mesh.single(), toy.datasets(config.model))
    other.load(str(tmp_path))
    assert (other.steps, other.consumed_samples, other.skipped_steps, other.optimizer.count) == (2, 4, 1, 1)


def lone_saved(folder: Path, steps: tuple[int, ...] = (1,), **knobs: Any) -> tuple[Trainer, Config]:
    """A one-rank trainer that has saved at each of `steps`, and its config with `load` set."""
    config = toy.config(replace(toy.LLAMA, num_layers=1), global_batch_size=1, **ADAM | knobs)
    trainer = lone_trainer(config)
    while trainer.steps < max(steps):
        trainer.step()
        if trainer.steps in steps:
            trainer.save(str(folder))
    return trainer, replace(config, checkpoint=CheckpointConfig(load=str(folder)))


def test_saving_the_same_step_again(tmp_path: Path) -> None:
    """The second replaces the first."""
    trainer, config = lone_saved(tmp_path)
    trainer.weights.buckets[0].fill_(3.0)
    trainer.save(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]
    other = Trainer(config, Mesh.single(), toy.datasets(config.model))
    other.load(str(tmp_path))
    assert set(whole_weights(other)["head.output.weight"].flatten().tolist()) == {3.0}


# Failures -------------------------------------------------------------------------------------------------------------


def attempt(action: Callable[[], Any]) -> str:
    """The words of the error that `action` must raise."""
    try:
        action()
    except (RuntimeError, ConfigError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was refused")


def save_and_fail(mesh: Mesh, config: Config, folder: str, failing: str) -> tuple[str, str]:
    """A good save at step 1, then one at step 2 in which `failing` breaks; then a third that works."""
    trainer, _ = build(mesh, config)
    trainer.step()
    trainer.save(folder)
    trainer.step()

    def half_a_file(path: Path, pieces: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device", str(path))

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied", folder)

    module, name, rank, bad = {
        "a rank's write": (checkpoint, "write_pieces", 1, half_a_file),
        "the index": (archive.shelf, "write", 0, refuse),
        "the folder": (shelf, "make_room", 0, refuse),
        "the name": (shelf, "publish", 0, refuse),
    }[failing]
    good = getattr(module, name)
    if mesh.rank == rank:
        setattr(module, name, bad)
    words = attempt(lambda: trainer.save(folder))
    setattr(module, name, good)
    listing = sorted(path.name for path in Path(folder).iterdir())
    return words, f"{listing} {(Path(folder) / 'latest').read_text().strip()}"


@pytest.mark.slow
@pytest.mark.parametrize("failing", ["a rank's write", "the index", "the folder", "the name"])
def test_a_failed_save_changes_nothing(failing: str, tmp_path: Path) -> None:
    """One rank fails: all raise its words; `latest` and the older checkpoint are as they were, and nothing else is
    left."""
    config = toy.config(replace(toy.LLAMA, num_layers=2), pp=2, global_batch_size=1, **ADAM)
    outcomes = on_mesh(config.parallel, save_and_fail, config, str(tmp_path), failing)
    rank, words = (1, "No space left on device") if failing == "a rank's write" else (0, "Permission denied")
    for text, _ in outcomes:
        assert text.startswith(f"JobError: rank {rank}: saving step 2 failed: ") and words in text
    assert outcomes[0][1] == "['latest', 'step-00000001'] step-00000001", "the main rank has put things in order"
    loaded = on_mesh(config.parallel, load_and_go_on, config, str(tmp_path), 1, str(tmp_path))
    assert loaded[0][1].counts[0] == 2, "the older one loads, and saving works again"


def load_refused(mesh: Mesh, config: Config, folder: str) -> str:
    trainer, _ = build(mesh, config)
    return attempt(lambda: trainer.load(folder))


def flip(path: Path) -> None:
    """One bit of the last value."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "a flipped bit": flip,
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "gone": lambda path: path.unlink(),
    "emptied": lambda path: path.write_bytes(b""),
    "another file": lambda path: shutil.copy(path.with_name("rank-00000.safetensors"), path),
}


@pytest.mark.slow
def test_damage_is_found_and_named(tmp_path: Path) -> None:
    """On all ranks, although only the last stage reads the file: bit flip, truncation, a missing or a wrong file."""
    config = toy.config(replace(toy.LLAMA, num_layers=2), pp=2, global_batch_size=1, **ADAM)
    on_mesh(config.parallel, save_once, config, str(tmp_path / "good"))
    for name, damage in DAMAGE.items():
        folder = tmp_path / name.replace(" ", "-")
        shutil.copytree(tmp_path / "good", folder)
        damage(folder / "step-00000001" / "rank-00001.safetensors")
        texts = on_mesh(config.parallel, load_refused, config, str(folder))
        assert texts[0] == texts[1] and texts[0].startswith("JobError: rank 0: loading failed: "), name
        assert ("rank 1: loading failed" in texts[0]) == (name == "a flipped bit"), (
            "headers are read by one rank for all"
        )
        assert "rank-00001.safetensors" in texts[0], f"{name}: {texts[0]}"


def test_the_newest_that_is_damaged_is_passed_over(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Known by its content, on whatever rank, and said; one that was asked for by name is refused."""
    config = toy.config(replace(toy.LLAMA, num_layers=2), pp=2, global_batch_size=1, **ADAM | {"train_steps": 3})
    config = replace(config, checkpoint=CheckpointConfig(save=str(tmp_path), save_interval=1))
    on_mesh(config.parallel, run_it, config)
    flip(tmp_path / "step-00000003" / "rank-00001.safetensors")
    again = replace(config, checkpoint=replace(config.checkpoint, load=str(tmp_path)))
    capfd.readouterr()
    assert on_mesh(config.parallel, run_it, again) == [3, 3]
    said = capfd.readouterr().out
    assert "passed over: rank 1: loading failed: " in said and "rank-00001.safetensors is damaged" in said
    assert "from step 2 to 3" in said
    flip(tmp_path / "step-00000001" / "rank-00001.safetensors")
    texts = on_mesh(config.parallel, load_refused, config, str(tmp_path / "step-00000001"))
    assert texts[0] == texts[1] and "rank-00001.safetensors is damaged" in texts[0]


@pytest.mark.parametrize(
    ("older", "words"),
    [
        ({"ffn_hidden_size": 88}, "another model: ffn_hidden_size 88 -> 176"),
        ({"lr": 0.02}, "another schedule: lr 0.02 -> 0.01"),
    ],
    ids=["model", "schedule"],
)
def test_an_older_one_of_another_run_takes_nobodys_place(older: dict[str, Any], words: str, tmp_path: Path) -> None:
    """The newest is damaged, the one before it is of another model or schedule: the job ends on all ranks, and says
    both; nothing goes on from a model that is half another's."""
    model = replace(toy.LLAMA, num_layers=2)
    knobs: dict[str, Any] = {"pp": 2, "global_batch_size": 1, **ADAM}
    config = toy.config(model, **knobs)
    other = toy.config(replace(model, **older), **knobs) if "lr" not in older else toy.config(model, **knobs | older)
    on_mesh(other.parallel, save_once, other, str(tmp_path))
    on_mesh(config.parallel, save_later, config, str(tmp_path))
    flip(tmp_path / "step-00000002" / "rank-00001.safetensors")
    check_loadable(replace(config, checkpoint=CheckpointConfig(load=str(tmp_path))))
    texts = on_mesh(config.parallel, load_refused, config, str(tmp_path))
    assert texts[0] == texts[1] and texts[0].startswith("JobError: ")
    assert "step-00000002/rank-00001.safetensors is damaged" in texts[0] and words in texts[0]
    assert f"{tmp_path}/step-00000001 cannot take the place of step-00000002" in texts[0]


def save_later(mesh: Mesh, config: Config, folder: str) -> None:
    trainer, _ = build(mesh, config)
    for _ in range(2):
        trainer.step()
    trainer.save(folder)


def run_it(mesh: Mesh, config: Config) -> int:
    trainer, _ = build(mesh, config)
    trainer.run()
    return trainer.steps


def test_damaged_weights_alone_are_found_too(tmp_path: Path) -> None:
    """What inference reads."""
    trainer, _ = lone_saved(tmp_path)
    before = whole_weights(trainer)
    trainer.weights.buckets[0].fill_(0.0)
    checkpoint.load_weights(tmp_path, trainer.weights)
    assert all(torch.equal(value, before[name]) for name, value in whole_weights(trainer).items())
    path = tmp_path / "step-00000001" / "rank-00000.safetensors"
    tensors = load_file(path)
    key = next(key for key in tensors if key.startswith("weight/layers.0.mlp.up"))
    tensors[key].view(torch.int32)[3, 4] ^= 1
    save_file(tensors, path)
    with pytest.raises(JobError, match=f"rank-00000.safetensors is damaged: rows 0 to .* of {key} are not what"):
        checkpoint.load_weights(tmp_path, trainer.weights)


def test_a_wrong_path_is_refused(tmp_path: Path) -> None:
    """CKPT-09's first half: nothing starts from random weights because a path was mistyped."""
    _, config = lone_saved(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "half" / ".step-00000001.partial").mkdir(parents=True)
    for wrong in ("nowhere", "empty", "half", "run/step-00000007"):
        at = replace(config, checkpoint=CheckpointConfig(load=str(tmp_path / wrong)))
        with pytest.raises(ConfigError, match="there is no checkpoint"):
            check_loadable(at)


@pytest.mark.slow
def test_a_wrong_path_stops_all_ranks(tmp_path: Path) -> None:
    """Only one rank looks for the folder, and the others do not wait for it in vain."""
    config = toy.config(replace(toy.LLAMA, num_layers=2), pp=2, global_batch_size=1, **ADAM)
    try:
        texts = on_mesh(config.parallel, load_refused, config, str(tmp_path / "nowhere"))
    except RankFailure as failure:
        raise AssertionError("a rank hung") from failure
    assert texts[0] == texts[1] and "there is no checkpoint" in texts[0]


def test_another_model_is_refused(tmp_path: Path) -> None:
    """Naming the fields that differ; what leaves the parameters alone may change."""
    _, config = lone_saved(tmp_path)

    def with_model(**fields: Any) -> Config:
        return replace(config, model=replace(config.model, **fields))

    assert check_loadable(config) == []
    assert check_loadable(with_model(dropout=0.1, init_std=0.1)) == ["dropout 0.0 -> 0.1", "init_std 0.02 -> 0.1"]
    shorter = check_loadable(with_model(seq_length=16, max_position=16))
    assert shorter[0] == "seq_length 32 -> 16" and "order of the data is not continued" in shorter[-1]
    with pytest.raises(
        ConfigError, match=r"another model: .*ffn_hidden_size 176 -> 192, tied_embeddings False -> True"
    ):
        check_loadable(with_model(ffn_hidden_size=192, tied_embeddings=True))
    for fields in ({"num_layers": 2}, {"rope_theta": 5e5}, {"norm_epsilon": 1e-6}, {"activation": "gelu"}):
        with pytest.raises(ConfigError, match=next(iter(fields))):
            check_loadable(with_model(**fields))


def test_what_a_resumed_run_changes_is_said(tmp_path: Path) -> None:
    _, config = lone_saved(tmp_path)
    changed = replace(
        config,
        optim=replace(config.optim, lr=0.5),
        batch=replace(config.batch, global_batch_size=4),
        run=replace(config.run, eval_interval=3),
        checkpoint=replace(config.checkpoint, override_schedule=True),
    )
    assert check_loadable(changed) == ["global_batch_size 1 -> 4", "lr 0.01 -> 0.5"]
    with pytest.raises(ConfigError, match="step 1, beyond --train-steps 0"):
        check_loadable(replace(config, run=replace(config.run, train_steps=0)))


def test_a_learned_position_table_is_part_of_the_model(tmp_path: Path) -> None:
    config = toy.config(replace(toy.GPT2, num_layers=1), global_batch_size=1, **ADAM)
    trainer = lone_trainer(config)
    trainer.save(str(tmp_path))
    longer = replace(
        config, checkpoint=CheckpointConfig(load=str(tmp_path)), model=replace(config.model, max_position=64)
    )
    with pytest.raises(ConfigError, match="max_position 32 -> 64"):
        check_loadable(longer)
