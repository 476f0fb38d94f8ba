"""Conversion to a checkpoint of this project: any cut, any type, from any source; refused, or whole."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron3d import shelf
from megatron3d.archive import NativeSource
from megatron3d.config import CheckpointConfig, Config, ConfigError
from megatron3d.contents import differences, summary, tree, verify
from megatron3d.convert import cuts, write_native
from megatron3d.data import Datasets
from megatron3d.huggingface_files import write_huggingface
from megatron3d.megatron_write import write_megatron
from megatron3d.mesh import Mesh
from megatron3d.params import param_table
from megatron3d.sources import kind_of, open_source
from megatron3d.trainer import Trainer
from tests import toy
from tests.lone import lone_trainer
from tests.memory import Memory
from tests.ranks import on_mesh
from tools import convert_checkpoint, inspect_checkpoint

ROOT = Path(__file__).resolve().parent.parent
ADAM: dict[str, Any] = {"optimizer": "adamw", "lr": 0.01, "train_steps": 9, "warmup_steps": 2}
MODEL = toy.config(replace(toy.LLAMA, num_layers=4, tied_embeddings=True)).model  # 2 of 4 heads are of keys, 131 ids


def in_memory(kinds: Mapping[str, torch.dtype], **knobs: Any) -> Memory:
    config = toy.config(MODEL, **ADAM | knobs)
    generator = torch.Generator().manual_seed(3)
    tensors = {
        kind: {spec.name: torch.rand(spec.shape, generator=generator).to(dtype) for spec in param_table(MODEL)}
        for kind, dtype in kinds.items()
    }
    return Memory(config, tensors, {"step": 7, "consumed_samples": 28, "adam_count": 6})


MIXED = {
    "weight": torch.bfloat16,
    "master": torch.float32,
    "exp_avg": torch.float32,
    "exp_avg_sq": torch.float32,
}
SGD = {kind: MIXED[kind] for kind in ("weight", "master")}


@pytest.mark.parametrize(("tp", "pp"), list(itertools.product((1, 2, 4), (1, 2, 4))))
def test_there_and_back_is_the_same(tp: int, pp: int, tmp_path: Path) -> None:
    """Through every layout: byte-equal files for weights, masters and moments, and the counts go along."""
    source = in_memory(MIXED, dtype="bf16")
    whole = write_native(source, tmp_path / "whole")
    cut = write_native(NativeSource(whole), tmp_path / "cut", tp=tp, pp=pp, jobs=3)
    back = write_native(NativeSource(cut), tmp_path / "back")
    assert cut.name == "step-00000007" and len(list(cut.glob("*.safetensors"))) == tp * pp
    for path in whole.glob("*.safetensors"):
        assert path.read_bytes() == (back / path.name).read_bytes()
    index = NativeSource(cut).index
    assert (index.meta["consumed_samples"], index.meta["adam_count"]) == (28, 6)
    assert NativeSource(cut).config.parallel.tp == tp and len(index.meta["stages"]) == pp


@pytest.mark.parametrize("jobs", [1, 4])
def test_every_tensor_is_where_its_rank_expects_it(jobs: int, tmp_path: Path) -> None:
    source = in_memory({"weight": torch.float32})
    path = write_native(source, tmp_path, tp=2, pp=2, jobs=jobs)
    expected = cuts(NativeSource(path).config)
    for name, tensor in NativeSource(path).index.tensors["weight"].items():
        assert {(stored.file, stored.box) for stored in tensor.boxes} == {
            (f"rank-{cut.rank:05d}.safetensors", cut.box) for cut in expected[name]
        }


@pytest.mark.parametrize(
    ("kinds", "dtype", "optimizer", "result"),
    [
        (MIXED, torch.float32, True, {"weight": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}),
        (MIXED, torch.float16, False, {"weight": "master"}),
        (MIXED, None, False, {"weight": "weight"}),
        ({"weight": torch.float32}, torch.bfloat16, True, {"weight": "weight"}),
        (SGD, None, True, {"weight": "weight", "master": "master"}),
        (SGD, torch.float16, True, {"weight": "master", "master": "master"}),
        (SGD, torch.float32, True, {"weight": "master"}),
        (SGD, None, False, {"weight": "weight"}),
        (
            {kind: torch.float32 for kind in MIXED if kind != "master"},
            torch.bfloat16,
            True,
            {"weight": "weight", "master": "weight", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
        ),
    ],
)
def test_the_most_exact_values_go_on(
    kinds: dict[str, torch.dtype], dtype: torch.dtype | None, optimizer: bool, result: dict[str, str], tmp_path: Path
) -> None:
    """CONV-19: weights of another type come from the masters; half-precision weights keep masters beside them."""
    source = in_memory(kinds)
    converted = NativeSource(write_native(source, tmp_path, dtype=dtype, optimizer=optimizer))
    assert set(converted.kinds) == set(result)
    for (kind, origin), spec in itertools.product(result.items(), param_table(MODEL)):
        expected = source.tensors[origin][spec.name]
        expected = expected if kind != "weight" or dtype is None else expected.to(dtype)
        assert torch.equal(converted.read(kind, spec.name), expected) and converted.dtype(kind, spec.name) == (
            expected.dtype
        )


LIMITED = """
import resource, sys
from pathlib import Path
import megatron3d.huggingface_files, megatron3d.megatron_write, megatron3d.sources  # libraries take addresses too
from tools import convert_checkpoint

room = int(sys.argv[1])
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + room, taken + room))
for source, target, *flags in (("a", "b", "--to", "megatron", "--tp", "2"), ("b", "c", "--to", "hf"), ("c", "d")):
    convert_checkpoint.main(["--load", source, "--save", target, "--jobs", "2", *flags])
"""
"""Goes round through all forms with so many bytes of memory."""


@pytest.mark.slow
def test_less_memory_than_a_model_is_enough(tmp_path: Path) -> None:
    """CONV-12: from and to every form, tensors are read, turned and written a few at a time."""
    model = replace(toy.LLAMA, num_layers=24, hidden_size=512, ffn_hidden_size=1408, head_dim=128)
    config = toy.config(model)
    values = {spec.name: torch.ones(()).expand(spec.shape) for spec in param_table(config.model)}  # no memory each
    write_native(Memory(config, {"weight": values}), tmp_path / "a", tp=2)
    room = 4 * sum(value.numel() for value in values.values()) * 3 // 4  # half of that is what it takes
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}  # the stacks of more would take as much
    command = [sys.executable, "-c", LIMITED, str(room)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    there, back = (open_source(tmp_path / name).source for name in ("a", "d"))
    assert room > 1 << 27 and all(torch.equal(back.read("weight", name), there.read("weight", name)) for name in values)


def test_nothing_is_written_over_or_left_half(tmp_path: Path) -> None:
    source = in_memory({"weight": torch.float32})
    write_native(source, tmp_path / "taken")
    with pytest.raises(ConfigError, match="has checkpoints already"):
        write_native(source, tmp_path / "taken")
    with pytest.raises(ConfigError, match="--tp 3"):
        write_native(source, tmp_path / "odd", tp=3)
    wrong = {"weight": {**source.tensors["weight"], "head.norm.weight": torch.ones(7)}}
    with pytest.raises(ConfigError, match=r"head.norm.weight has shape \(7,\), the model needs \(64,\)"):
        write_native(Memory(source.config, wrong), tmp_path / "wrong")
    assert list((tmp_path / "wrong").iterdir()) == []
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "latest").write_text("theirs")
    (tmp_path / "file").write_text("theirs")
    for name in ("foreign", "file"):
        with pytest.raises(ConfigError, match=f"{name} exists and is not an empty folder"):
            write_native(source, tmp_path / name)
    with pytest.raises(ConfigError, match="Writing /proc/zz failed"):
        write_native(source, Path("/proc/zz"))


def test_files_are_cut_for_any_sequence_length(tmp_path: Path) -> None:
    """What is split while computing is no matter of files."""
    source = in_memory({"weight": torch.float32}, seq_length=31)
    source = replace(source, config=replace(source.config, model=replace(MODEL, seq_length=31)))
    whole = NativeSource(write_native(source, tmp_path / "whole"))
    cut = NativeSource(write_native(whole, tmp_path / "cut", tp=2, pp=2))
    assert cut.config.model == whole.config.model and len(cut.index.files) == 4
    assert all(d.largest == 0 for d in differences(whole, cut))


@pytest.mark.parametrize("after", [False, True], ids=["before its name", "after its name"])
def test_a_killed_conversion_can_be_repeated(after: bool, tmp_path: Path) -> None:
    """Killed before the checkpoint has its name: what is left is no obstacle, and nobody's checkpoint. Killed after
    it: all is there, the model's settings too."""
    source = in_memory({"weight": torch.float32})
    write_native(source, tmp_path / "good")
    if (child := os.fork()) == 0:
        publish = shelf.publish

        def killed(aside: Path, final: Path) -> None:
            if after:
                publish(aside, final)
            os.kill(os.getpid(), signal.SIGKILL)

        shelf.publish = killed
        write_native(source, tmp_path / "out")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert bool(shelf.checkpoints(tmp_path / "out")) == after
    if not after:
        write_native(source, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"latest", "step-00000007", "model.toml"}
    assert (tmp_path / "out" / "model.toml").read_bytes() == (tmp_path / "good" / "model.toml").read_bytes()
    assert all(d.largest == 0 for d in differences(source, open_source(tmp_path / "out").source))


def test_settings_that_somebody_has_put_there_stay(tmp_path: Path) -> None:
    """Whether they were, or only seem to be, an interrupted conversion's."""
    source = in_memory({"weight": torch.float32})
    (tmp_path / "model.toml").write_text("theirs")
    with pytest.raises(ConfigError, match="is not an empty folder"):
        write_native(source, tmp_path)
    assert (tmp_path / "model.toml").read_text() == "theirs"


Layout = dict[str, int]
MOVES: list[tuple[Layout, Layout, bool]] = [
    ({}, {"tp": 2, "pp": 2, "dp": 2}, False),
    ({"tp": 2, "pp": 2, "dp": 2}, {"tp": 4, "pp": 2}, False),
    ({"tp": 4}, {"pp": 4, "dp": 2}, False),
    ({"pp": 4}, {"tp": 2}, False),
    ({"tp": 2, "dp": 2}, {"pp": 2, "dp": 2}, False),
    ({"pp": 2}, {"pp": 4}, True),
    ({"tp": 4, "pp": 2}, {"tp": 4}, True),
    ({"dp": 2}, {"pp": 2, "dp": 2}, True),
]


@pytest.mark.parametrize("kind", ["native", "megatron", "hf"])
def test_values_that_a_type_cannot_hold_are_refused(kind: str, tmp_path: Path) -> None:
    """And not written as infinity."""
    source = in_memory({"weight": torch.float32})
    source.tensors["weight"]["layers.1.mlp.down.weight"][3, 4] = 1e6
    write = {
        "native": write_native,
        "megatron": lambda *given, **dtype: write_megatron(*given, tp=1, pp=1, **dtype),
        "hf": write_huggingface,
    }[kind]
    with pytest.raises(ConfigError, match=r"values beyond 65504, the largest of torch\.float16"):
        write(source, tmp_path / "out", dtype=torch.float16)
    assert not list(tmp_path.glob("out/*"))


def test_files_of_any_name_come_along(tmp_path: Path) -> None:
    source = in_memory({"weight": torch.float32})
    write_huggingface(source, tmp_path / "hf")
    (tmp_path / "hf" / "LICENSE (copy).txt").write_text("free")
    opened = open_source(tmp_path / "hf")
    write_native(opened.source, tmp_path / "native", companions=opened.companions())
    assert open_source(tmp_path / "native").companions()["LICENSE (copy).txt"] == b"free"


def begin(mesh: Mesh, config: Config, folder: str) -> list[Any]:
    trainer = Trainer(config, mesh, toy.datasets(config.model))
    for _ in range(2):
        trainer.step()
    trainer.save(folder)
    return [trainer.step() for _ in range(5)]


def go_on(mesh: Mesh, config: Config, folder: str) -> list[Any]:
    trainer = Trainer(config, mesh, toy.datasets(config.model))
    trainer.load(folder)
    return [trainer.step() for _ in range(5)]


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new", "exact"), MOVES, ids=str)
def test_a_converted_run_goes_on_as_the_unconverted_one(old: Layout, new: Layout, exact: bool, tmp_path: Path) -> None:
    """Trained on one layout, converted to files of another, five steps on that: bit-equal where no sum is
    rounded in another order, else within rounding; and bit-equal back on the first layout. ZeRO-1."""
    size = 4
    was, becomes = (toy.config(MODEL, global_batch_size=size, **ADAM, **layout) for layout in (old, new))
    there = on_mesh(was.parallel, begin, was, str(tmp_path / "a"))[0]
    parallel = becomes.parallel
    write_native(open_source(tmp_path / "a").source, tmp_path / "b", tp=parallel.tp, pp=parallel.pp)
    here = on_mesh(becomes.parallel, go_on, becomes, str(tmp_path / "b"))[0]
    back = on_mesh(was.parallel, go_on, was, str(tmp_path / "b"))[0]
    assert back == there
    assert not exact or here == there
    for key in ("loss", "grad_norm"):
        expected, found = ([getattr(result, key) for result in results] for results in (there, here))
        assert found == pytest.approx(expected, rel=1e-5)


def test_a_run_of_sgd_goes_on_from_its_masters(tmp_path: Path) -> None:
    """It has no moments, and what is left of it beside its rounded weights is all the more needed."""
    config = toy.config(replace(MODEL, num_layers=1), dtype="bf16", optimizer="sgd", lr=0.01, global_batch_size=1)
    trainer = lone_trainer(config)
    for _ in range(3):
        trainer.step()
    trainer.save(str(tmp_path / "a"))
    write_native(open_source(tmp_path / "a").source, tmp_path / "b", tp=2)
    other = Trainer(config, Mesh.single(), toy.datasets(config.model))
    other.load(str(tmp_path / "b"))
    ours, theirs = _masters(trainer), _masters(other)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in ours.values())
    assert all(torch.equal(theirs[name], value) for name, value in ours.items())
    assert [other.step() for _ in range(3)] == [trainer.step() for _ in range(3)]


def test_decay_groups_survive(tmp_path: Path) -> None:
    """GRP-14: after a resume and after a conversion the same parameters decay."""
    config = toy.config(MODEL, global_batch_size=1, **ADAM | {"weight_decay": 0.5, "lr_schedule": "constant"})
    trainer = lone_trainer(config)
    trainer.save(str(tmp_path / "a"))
    write_native(open_source(tmp_path / "a").source, tmp_path / "b", tp=2, pp=2)

    def decayed(trainer: Trainer) -> set[tuple[int, int, bool]]:
        return {(start, stop, decays) for span in trainer.optimizer.spans for start, stop, decays in span.ranges}

    other = Trainer(config, Mesh.single(), toy.datasets(MODEL))
    other.load(str(tmp_path / "b"))
    assert decayed(other) == decayed(trainer) and {decays for _, _, decays in decayed(other)} == {True, False}


# Beginning with weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_run_may_begin_with_the_weights_alone(dtype: str, tmp_path: Path) -> None:
    """Step 0, no moments, data from the beginning; masters from the most exact values."""
    first = lone_trainer(toy.config(MODEL, dtype="bf16", global_batch_size=1, **ADAM))
    first.step()
    first.save(str(tmp_path / "run"))
    write_native(open_source(tmp_path / "run").source, tmp_path / "alone", optimizer=False)
    exact = _masters(first)
    for folder, kind in (("run", "master"), ("alone", "weight")):
        config = toy.config(MODEL, dtype=dtype, global_batch_size=1, **ADAM)
        second = Trainer(config, Mesh.single(), toy.datasets(MODEL))
        second.load(str(tmp_path / folder), weights_only=True)
        for name, value in _masters(second).items():
            assert torch.equal(value, exact[name] if kind == "master" else exact[name].bfloat16().float())
        assert (second.steps, second.consumed_samples, second.optimizer.count, second.wandb_id) == (0, 0, 0, "")
        assert all(not bool(span.exp_avg.any()) for span in second.optimizer.spans if span.exp_avg is not None)


def _masters(trainer: Trainer) -> dict[str, Tensor]:
    from megatron3d.checkpoint import owned_pieces

    pieces = list(owned_pieces(trainer.optimizer))
    kind = "master" if any(piece.kind == "master" for piece in pieces) else "weight"
    return {piece.name: piece.values().clone() for piece in pieces if piece.kind == kind}


# Looking and tools ----------------------------------------------------------------------------------------------------


def test_what_a_checkpoint_has(tmp_path: Path) -> None:
    path = write_native(in_memory(MIXED, dtype="bf16"), tmp_path, tp=2, pp=2)
    opened = open_source(tmp_path)
    found = summary(opened)
    assert (found["path"], found["kind"]) == (str(path), "native") and found["saved_from"]["tp"] == 2
    assert found["tensors"]["weight"] == {"types": ["bfloat16"], "bytes": 2 * found["parameters"]}
    lines = tree(opened.source)
    assert sum(line.values for line in lines) == found["parameters"]
    assert [line.name for line in lines[:2]] == ["embedding.word.weight", "layers.0-3.attention_norm.weight"]
    assert len(tree(opened.source, every_layer=True)) == len(param_table(MODEL))
    assert verify(opened.source) == 4 * len(param_table(MODEL))


def test_differences_are_the_largest(tmp_path: Path) -> None:
    one = in_memory({"weight": torch.float32})
    weights = {name: value.clone() for name, value in one.tensors["weight"].items()}
    weights["head.norm.weight"][3] += 0.5
    changed = {"weight": weights, "exp_avg": {name: torch.zeros_like(value) for name, value in weights.items()}}
    found = [d for d in differences(one, Memory(one.config, changed)) if d.largest != 0]
    assert [(d.kind, d.name) for d in found[:1]] == [("weight", "head.norm.weight")]
    assert found[0].largest == 0.5 and all(d.largest is None and d.what for d in found[1:])


def words(*found: object) -> list[str]:
    return [str(word) for word in found]


@pytest.mark.slow
def test_the_tools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    write_native(in_memory(MIXED, dtype="bf16"), a)
    convert_checkpoint.main(words("--load", a, "--save", b, "--tp", 2, "--pp", 2, "--json"))
    said = json.loads(capsys.readouterr().out)
    assert said["from"] == said["to"] == "native" and said["save"] == str(b / "step-00000007")
    assert inspect_checkpoint.main(words("--load", b, "--verify", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["verified_tensors"] > 0
    assert inspect_checkpoint.main(words("--load", b)) == 0
    assert "layers.0-3.mlp.up.weight" in capsys.readouterr().out
    assert inspect_checkpoint.main(words("--diff", a, b)) == 0
    assert capsys.readouterr().out.startswith("0 of ")
    alone = tmp_path / "alone"
    convert_checkpoint.main(words("--load", a, "--save", alone, "--no-optimizer", "--dtype", "fp32"))
    assert inspect_checkpoint.main(words("--diff", a, alone)) == 1 and "only in the first" in capsys.readouterr().out
    command = [sys.executable, "tools/inspect_checkpoint.py", *words("--load", a)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as cut_short:
        assert cut_short.stdout is not None and cut_short.stderr is not None
        cut_short.stdout.close()  # as `| head` does
        assert cut_short.stderr.read() == b""
    path = b / "step-00000007" / "rank-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    command = [sys.executable, "tools/inspect_checkpoint.py", *words("--load", b, "--verify")]
    damaged = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=ROOT)
    assert damaged.returncode == 1 and str(path) in damaged.stderr and "Traceback" not in damaged.stderr


WRONG = [
    (("--load", "none", "--save", "c"), "no such folder"),
    (("--load", "a", "--save", "c", "--to", "hf", "--tp", 2), "--tp has no effect"),
    (("--load", "a", "--save", "c", "--family", "llama"), "--family has no effect"),
    (("--load", "a", "--save", "c", "--to", "megatron", "--no-optimizer"), "--no-optimizer has no effect"),
    (("--load", "a", "--save", "a"), "has checkpoints already"),
    (("--load", "a", "--save", "c", "--vocab-size", 7), "--vocab-size 7 has no effect"),
    (("--load", "a", "--save", "c", "--seq-length", 7), "--seq-length 7 has no effect"),
    (("--load", "a", "--save", "c", "--tp", 0), "--tp 0 must be at least 1"),
    (("--load", ".", "--save", "c"), "there is no checkpoint"),
]


@pytest.mark.parametrize(("given", "what"), WRONG, ids=[what for _, what in WRONG])
def test_what_a_conversion_cannot_do_is_told(
    given: tuple[object, ...], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_native(in_memory({"weight": torch.float32}), tmp_path / "a")
    with pytest.raises(ConfigError, match=what):
        convert_checkpoint.main(words(*given))
    assert not (tmp_path / "c").exists()


def test_kinds_are_found_by_looking(tmp_path: Path) -> None:
    write_native(in_memory({"weight": torch.float32}), tmp_path / "native")
    assert kind_of(tmp_path / "native") == kind_of(tmp_path / "native" / "step-00000007") == "native"
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    assert kind_of(tmp_path / "hf") == "hf"


def test_retention_in_a_run(tmp_path: Path) -> None:
    """CKPT-04 over a restart: at most two of ours, what is not ours stays."""
    config = toy.config(
        replace(MODEL, num_layers=1), global_batch_size=1, **ADAM | {"lr_schedule": "constant", "warmup_steps": 0}
    )
    (tmp_path / "step-final").mkdir()
    for steps, load in ((3, ""), (5, str(tmp_path))):
        keep = CheckpointConfig(save=str(tmp_path), load=load, save_interval=1, keep_last=2)
        Trainer(
            replace(config, checkpoint=keep, run=replace(config.run, train_steps=steps)),
            Mesh.single(),
            toy.datasets(config.model),
        ).run()
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["latest", f"step-{steps - 1:08d}", f"step-{steps:08d}", "step-final"]


def test_a_tokenizer_stays_with_the_model(tmp_path: Path) -> None:
    """Through a save, a resume elsewhere, and a conversion."""
    (tmp_path / "spm.model").write_bytes(b"pieces")
    config = toy.config(replace(MODEL, num_layers=1), global_batch_size=1, **ADAM)
    config = replace(config, data=replace(config.data, tokenizer=str(tmp_path / "spm.model")))
    trainer = lone_trainer(config)
    trainer.save(str(tmp_path / "a"))
    (tmp_path / "spm.model").unlink()
    other = Trainer(config, Mesh.single(), Datasets(toy.datasets(MODEL).train, None, ""))
    other.load(str(tmp_path / "a"))
    other.save(str(tmp_path / "b"))
    opened = open_source(tmp_path / "b")
    assert opened.extras is not None and (opened.extras / "tokenizer.model").read_bytes() == b"pieces"
    assert shelf.find(tmp_path / "b").index.companions.keys() == {"tokenizer.model"}
