"""Damaged and hostile folders: refused naming the file, by the trainer's loader and the converter; nothing runs."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron3d.config import CheckpointConfig, ConfigError, JobError
from megatron3d.convert import write_native
from megatron3d.huggingface_files import write_huggingface
from megatron3d.mesh import Mesh
from megatron3d.resume import check_loadable
from megatron3d.sources import open_source
from megatron3d.trainer import Trainer
from tests import hf, toy
from tests.lone import lone_trainer
from tests.megatron import FIXTURES
from tests.saved import edited
from tools import convert_checkpoint, inspect_checkpoint

SAMPLE, ALL = 30, 200
MODEL = replace(toy.LLAMA, num_layers=2)
CONFIG = toy.config(MODEL, optimizer="adamw", lr=0.01, train_steps=9, dtype="bf16", global_batch_size=1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint cut into four files, with a file beside its tensors."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = lone_trainer(CONFIG)
    trainer.step()
    trainer.saver.companions = {"tokenizer.model": b"pieces" * 100}
    trainer.save(str(folder / "one"))
    opened = open_source(folder / "one")
    return write_native(opened.source, folder / "four", tp=2, pp=2, companions=opened.companions())


Damage = Callable[[random.Random, Path], Path]
"""Damages a copy of the checkpoint and returns the file that must be named."""


def some_file(rng: random.Random, folder: Path) -> Path:
    return rng.choice(sorted(folder.glob("*.safetensors")))


def flip_a_bit(rng: random.Random, folder: Path) -> Path:
    path = rng.choice([some_file(rng, folder), folder / "companions" / "tokenizer.model"])
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return path


def flip_a_bit_of_the_index(rng: random.Random, folder: Path) -> Path:
    path = folder / "index.json"
    data = bytearray(path.read_bytes())
    at = rng.choice([i for i, byte in enumerate(data) if not chr(byte).isspace()])
    data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return path


def cut(rng: random.Random, folder: Path) -> Path:
    path = rng.choice([some_file(rng, folder), folder / "index.json"])
    data = path.read_bytes()
    path.write_bytes(data[: rng.choice([0, 1, 7, 8, 100, rng.randrange(len(data) - 2)])])
    return path


def lengthen(rng: random.Random, folder: Path) -> Path:
    path = some_file(rng, folder)
    path.write_bytes(path.read_bytes() + bytes(rng.randrange(1, 9)))
    return path


def swap(rng: random.Random, folder: Path) -> Path:
    one, other = rng.sample(sorted(folder.glob("*.safetensors")), 2)
    aside = folder.parent / "aside"
    one.rename(aside), other.rename(one), aside.rename(other)
    return folder / "rank-"


def lose(rng: random.Random, folder: Path) -> Path:
    path = rng.choice([some_file(rng, folder), folder / "companions" / "tokenizer.model"])
    path.unlink()
    return path


def replace_by_a_folder(rng: random.Random, folder: Path) -> Path:
    path = rng.choice([some_file(rng, folder), folder / "index.json"])
    path.unlink()
    path.mkdir()
    return path if path.name != "index.json" else folder


def edit(rng: random.Random, folder: Path) -> Path:
    """The index says something else, with the right checksum."""
    path = folder / "index.json"
    text = path.read_text()
    kind, name = rng.choice(["weight", "master", "exp_avg"]), rng.choice(["embedding.word.weight", "head.norm.weight"])

    def tensor(content: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = content["tensors"][kind][name]
        return found

    changes: list[Callable[[dict[str, Any]], object]] = [
        lambda c: tensor(c)["boxes"][0].update(file="../../../etc/passwd"),
        lambda c: tensor(c)["boxes"][0].update(file="/etc/passwd"),
        lambda c: tensor(c)["boxes"][0].update(key="weight/nothing"),
        lambda c: tensor(c)["boxes"].pop(),
        lambda c: tensor(c)["boxes"].append(tensor(c)["boxes"][0]),
        lambda c: tensor(c).update(shape=[2**63, *tensor(c)["shape"][1:]]),
        lambda c: tensor(c).update(dtype=rng.choice(["F64", "I8", "object", None])),
        lambda c: tensor(c)["boxes"][0]["box"].__setitem__(0, [2**63, 2**63 + 1]),
        lambda c: tensor(c)["boxes"][0].update(crc32=[7] * len(tensor(c)["boxes"][0]["crc32"])),
        lambda c: c["tensors"][kind].pop(name),
        lambda c: c["tensors"].pop("weight"),
        lambda c: c["meta"].update(step=rng.choice([-1, 2**70, "7", None, 1e300])),
        lambda c: c["meta"].update(config=rng.choice([None, {"model": {"num_layers": -1}}, {"run": {"dtype": "int"}}])),
        lambda c: c.update(companions={"../index.json": 1}),
    ]
    path.write_text(edited(text, rng.choice(changes)))
    return folder


def giant_sizes(rng: random.Random, folder: Path) -> Path:
    path = some_file(rng, folder)
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    if rng.random() < 0.5:
        path.write_bytes(struct.pack("<Q", rng.choice([2**63, 2**64 - 1, 10**9])) + data[8:])
        return path
    header = json.loads(data[8 : 8 + length])
    entry = header[rng.choice([name for name in header if name != "__metadata__"])]
    entry.update(rng.choice([{"shape": [2**63]}, {"shape": [2**32, 2**32, 4]}, {"data_offsets": [0, 2**63]}]))
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    return path


DAMAGES = [flip_a_bit, flip_a_bit_of_the_index, cut, lengthen, swap, lose, replace_by_a_folder, edit, giant_sizes]


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Fails instead of hanging."""

    def give_up(*_: Any) -> None:
        raise AssertionError(f"still busy after {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def loads(folder: Path) -> None:
    """As pretrain_gpt.py does."""
    config = replace(CONFIG, checkpoint=CheckpointConfig(load=str(folder)))
    check_loadable(config)
    Trainer(config, Mesh.single(), toy.datasets(MODEL)).load(str(folder))


def converts(folder: Path) -> None:
    write_native(open_source(folder).source, folder.parent / "converted")


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < SAMPLE else pytest.mark.soak) for seed in range(ALL)]
)
def test_a_damaged_checkpoint_never_loads(seed: int, whole: Path, tmp_path: Path) -> None:
    rng = random.Random(seed)
    folder = tmp_path / whole.name
    shutil.copytree(whole, folder)
    loads(folder)
    named = DAMAGES[seed % len(DAMAGES)](rng, folder)
    for use in (loads, converts):
        with at_most(100), pytest.raises((ConfigError, JobError)) as refused:
            use(folder)
        assert str(named) in str(refused.value), f"{use.__name__}: {refused.value}"
    assert not (tmp_path / "converted").exists() or not list((tmp_path / "converted").glob("step-*"))


def many_layers(content: dict[str, Any]) -> None:
    content["meta"]["config"]["model"]["num_layers"] = 10**9
    content["meta"]["config"]["parallel"].update(pp=2, stage_layers=[10**9 // 2] * 2)


def many_stages(content: dict[str, Any]) -> None:
    content["meta"]["config"]["model"]["num_layers"] = 2**31 - 1
    content["meta"]["config"]["parallel"].update(pp=2**31 - 1, stage_layers=[])


def an_unknown_kind(content: dict[str, Any]) -> None:
    content["tensors"]["ema"] = content["tensors"].pop("exp_avg")


def a_column_each(content: dict[str, Any]) -> None:
    """Of a row that the model has not."""
    tensor, columns = content["tensors"]["weight"]["head.norm.weight"], 20_000
    stored = tensor["boxes"][0]
    tensor["boxes"] = [{**stored, "box": [[0, 1], [i, i + 1]], "crc32": [0]} for i in range(columns)]
    tensor["shape"] = [1, columns]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (many_layers, "too few for a model of 1000000000 layers"),
        (many_stages, "too few for a model of 2147483647 layers"),
        (an_unknown_kind, "unknown kind 'ema'"),
        (a_column_each, "does not hold weight of head.norm.weight"),
    ],
)
def test_an_index_that_asks_for_too_much_is_refused_soon(
    change: Callable[[dict[str, Any]], object], words: str, whole: Path, tmp_path: Path
) -> None:
    """And in words, for whoever converts it or looks at it."""
    shutil.copytree(whole, tmp_path / "c")
    path = tmp_path / "c" / "index.json"
    path.write_text(edited(path.read_text(), change))
    for use in (converts, lambda folder: inspect_checkpoint.main(["--load", str(folder)])):
        with at_most(100), pytest.raises(ConfigError, match=words):
            use(tmp_path / "c")


@pytest.mark.parametrize("name", ["index.json", "rank-00001.safetensors", "companions/tokenizer.model"])
def test_a_pipe_in_the_place_of_a_file_keeps_nobody_waiting(name: str, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run" / whole.name
    shutil.copytree(whole, folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    for use in (loads, converts):
        with at_most(100), pytest.raises((ConfigError, JobError), match=rf"{folder / name}.* is not a plain file"):
            use(folder.parent)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each form that another library's checkpoint may have."""
    folder = tmp_path_factory.mktemp("foreign")
    source = hf.native()
    most = sum(values.nbytes for values in source.tensors["weight"].values()) * 2 // 3
    write_huggingface(source, folder / "hf")
    write_huggingface(source, folder / "sharded", shard_bytes=most)
    for name in ("tokenizer.json", "merges.txt"):
        (folder / "hf" / name).write_text("{}")
    for name in ("legacy", "torch_dist"):
        shutil.copytree(FIXTURES / "llama" / f"{name}_tp2_pp2", folder / name)
    return folder


TRACKER, STEP = "latest_checkpointed_iteration.txt", "iter_0000007"
FOREIGN = [
    *(f"hf/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json", "merges.txt")),
    *(f"sharded/{name}" for name in ("model.safetensors.index.json", "model-00002-of-00002.safetensors")),
    *(f"legacy/{name}" for name in (TRACKER, f"{STEP}/mp_rank_01_000/model_optim_rng.pt")),
    f"torch_dist/{TRACKER}",
    *(f"torch_dist/{STEP}/{name}" for name in ("common.pt", ".metadata", "metadata.json", "__1_0.distcp")),
]
INSTEAD: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("made", INSTEAD)
@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_no_file_in_the_place_of_a_foreign_one(name: str, made: str, foreign: Path, tmp_path: Path) -> None:
    """Keeps nobody waiting, and is not read without end: whatever the folder is converted to, and when looked at."""
    kind = name.partition("/")[0]
    folder, path, target = tmp_path / kind, tmp_path / name, tmp_path / "converted"
    shutil.copytree(foreign / kind, folder)
    path.unlink()
    INSTEAD[made](path)
    for to in ("native", "hf"):
        with at_most(100), pytest.raises(ConfigError, match=rf"{path}.* is not a plain file"):
            convert_checkpoint.main(["--load", str(folder), "--save", str(target), "--to", to])
        assert not target.exists() or not list(target.iterdir())
    if name not in ("hf/tokenizer.json", "hf/merges.txt"):
        with at_most(100), pytest.raises(ConfigError, match=rf"{path}.* is not a plain file"):
            inspect_checkpoint.main(["--load", str(folder), "--verify"])


def test_a_folder_of_licenses_is_no_obstacle(foreign: Path, tmp_path: Path) -> None:
    shutil.copytree(foreign / "hf", tmp_path / "hf")
    (tmp_path / "hf" / "LICENSES").mkdir()
    convert_checkpoint.main(["--load", str(tmp_path / "hf"), "--save", str(tmp_path / "converted"), "--to", "hf"])
    names = {path.name for path in (tmp_path / "converted").iterdir()}
    assert {"tokenizer.json", "merges.txt"} < names and "LICENSES" not in names


class Bomb:
    """Would make a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def torch_file(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)


def megatron_folder(root: Path, value: Any) -> Path:
    (root / "latest_checkpointed_iteration.txt").write_text("7")
    torch_file(root / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt", value)
    return root


def test_a_pickle_that_would_run_code_does_not(tmp_path: Path) -> None:
    """Given to the converter as Megatron-LM's, as torch_dist's metadata, and as Hugging Face's."""
    fired = tmp_path / "fired"
    folders = []
    for i, value in enumerate(({"args": Bomb(fired)}, {"model": {"x": Bomb(fired)}}, Bomb(fired))):
        (tmp_path / f"legacy{i}").mkdir()
        folders.append(megatron_folder(tmp_path / f"legacy{i}", value))
    dist = tmp_path / "dist"
    (dist / "iter_0000007").mkdir(parents=True)
    (dist / "latest_checkpointed_iteration.txt").write_text("7")
    (dist / "iter_0000007" / ".metadata").write_bytes(pickle.dumps(Bomb(fired)))
    (dist / "iter_0000007" / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    torch_file(dist / "iter_0000007" / "common.pt", {"args": Bomb(fired)})
    pickled = tmp_path / "hf"
    pickled.mkdir()
    (pickled / "config.json").write_text('{"model_type": "llama"}')
    torch_file(pickled / "pytorch_model.bin", Bomb(fired))
    for folder in (*folders, dist, pickled):
        with at_most(100), pytest.raises(ConfigError) as refused:
            write_native(open_source(folder).source, tmp_path / "converted")
        assert str(folder) in str(refused.value), refused.value
    assert not fired.exists()
    pickle.loads(pickle.dumps(Bomb(fired)))
    assert fired.exists(), "else the test would prove nothing"
