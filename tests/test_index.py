"""The index of a checkpoint: read back as it was written, and refused where it or a file is not what it says."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron3d.config import Config, ConfigError, ModelConfig
from megatron3d.index import CHUNK, FORMAT, check_files, chunk_rows, dump, num_chunks, read_index, tiling_fault
from megatron3d.validate import resolve
from tests.saved import FILE, blank_checkpoint, edited
from tests.test_hostile_folders import at_most

CONFIG = resolve(Config(model=ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2)), world_size=1)
FILES = blank_checkpoint(CONFIG)
NORM = "head.norm.weight"


def put(folder: Path, **changed: bytes | str) -> Path:
    """The blank checkpoint, with other contents of some files."""
    folder.mkdir(exist_ok=True)
    for name, content in FILES.items():
        content = changed.get(name.partition(".")[0].partition("-")[0], content)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    index = read_index(put(tmp_path))
    check_files(tmp_path, index)
    assert dump(index).encode() == FILES["index.json"]
    assert index.meta["step"] == 10 and set(index.tensors) == {"weight", "exp_avg", "exp_avg_sq"}
    spread = json.dumps(json.loads(FILES["index.json"]), indent=7, sort_keys=True)
    assert read_index(put(tmp_path, index=spread)) == index, "white space and order are no content"


def test_chunks_are_whole_rows() -> None:
    wide, long = ((0, 5), (0, 3 * CHUNK)), ((10, 10 + CHUNK), (0, 3))
    assert chunk_rows(wide, "F32") == 1 and num_chunks(wide, "F32") == 5
    assert chunk_rows(long, "F32") == CHUNK // 12 and num_chunks(long, "F32") == -(-CHUNK // (CHUNK // 12))
    assert chunk_rows(((3, 9),), "F16") == CHUNK // 2


def weight(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = content["tensors"]["weight"][NORM]
    return found


def box(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = weight(content)["boxes"][0]
    return found


Change = Callable[[dict[str, Any]], object]
FAULTS: dict[str, tuple[Change, str]] = {
    "no step": (lambda c: c["meta"].pop("step"), "lacks step"),
    "a step in words": (lambda c: c["meta"].update(step="ten"), "no count"),
    "a step of 2^70": (lambda c: c["meta"].update(step=2**70), "no count"),
    "a negative step": (lambda c: c["meta"].update(step=-1), "no count"),
    "no W&B run": (lambda c: c["meta"].pop("wandb_id"), "lacks wandb_id"),
    "an Adam count in words": (lambda c: c["meta"].update(adam_count="7"), "no count"),
    "a negative Adam count": (lambda c: c["meta"].update(adam_count=-5), "no count"),
    "more of a loss scale": (lambda c: c["meta"]["loss_scale"].update(more=1), "loss scale"),
    "many dims": (lambda c: weight(c).update(shape=[1] * 9), "9 dims"),
    "no config": (lambda c: c["meta"].pop("config"), "lacks config"),
    "no weights": (lambda c: c["tensors"].pop("weight"), "no weights"),
    "an unknown kind": (
        lambda c: c["tensors"].update(ema=c["tensors"].pop("exp_avg")),
        "tensors of the unknown kind 'ema'; there are weight, master, exp_avg, exp_avg_sq",
    ),
    "a box less": (lambda c: weight(c)["boxes"].clear(), f"weight of {NORM}: 0 of 8 values"),
    "a box twice": (lambda c: weight(c)["boxes"].append(box(c)), "overlap"),
    "half a box": (lambda c: box(c).update(box=[[0, 4]]), "4 of 8 values"),
    "beyond the shape": (lambda c: box(c).update(box=[[0, 9]]), "no part of the shape"),
    "another rank": (lambda c: box(c).update(box=[[0, 8], [0, 1]]), "no part of the shape"),
    "backwards": (lambda c: box(c).update(box=[[8, 0]]), "no part of the shape"),
    "a size of 2^63": (lambda c: weight(c).update(shape=[2**63]), "no count"),
    "a fraction": (lambda c: weight(c).update(shape=[8.0]), "no count"),
    "an unknown type": (lambda c: weight(c).update(dtype="F7"), "unknown type"),
    "a type that is a list": (lambda c: weight(c).update(dtype=["F32"]), "TypeError"),
    "checksums missing": (lambda c: box(c).update(crc32=[]), "another number of checksums"),
    "a path": (lambda c: box(c).update(file="../x.safetensors"), "not the name of a file"),
    "an absolute path": (lambda c: box(c).update(file="/etc/passwd"), "not the name of a file"),
    "a hidden file": (lambda c: box(c).update(file=".x"), "not the name of a file"),
    "a name with a line end": (lambda c: box(c).update(file="x\n"), "not the name of a file"),
    "a companion's path": (lambda c: c.update(companions={"../../x": 1}), "not the name of a file"),
    "no tensors": (lambda c: c.update(tensors=3), "AttributeError"),
    "no meta": (lambda c: c.update(meta=7), "TypeError"),
}


@pytest.mark.parametrize(("change", "words"), FAULTS.values(), ids=FAULTS)
def test_an_index_at_odds_with_itself_is_refused(change: Change, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{tmp_path}/index.json is not a whole checkpoint's index: .*{words}"):
        read_index(put(tmp_path, index=edited(FILES["index.json"], change)))


EDITS: dict[str, Change] = {
    "the step": lambda c: c["meta"].update(step=11),
    "a learning rate": lambda c: c["meta"]["config"]["optim"].update(lr=1.0),
    "a checksum": lambda c: box(c).update(crc32=[0]),
}


@pytest.mark.parametrize("change", EDITS.values(), ids=EDITS)
def test_an_edited_index_is_noticed(change: Change, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"index\.json .* not what its checksum was made of"):
        read_index(put(tmp_path, index=edited(FILES["index.json"], change, honest=False)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "JSONDecodeError"),
        ("[]", "TypeError"),
        ("{}", "KeyError"),
        ("null", "TypeError"),
        ("\ud800", "UnicodeDecodeError"),
        ("[" * 100_000, "Recursion"),
        (json.dumps({"format": 1}), f"format 1, and this version reads format {FORMAT}"),
        (json.dumps({"format": FORMAT}), "KeyError: 'content'"),
        (json.dumps({"format": FORMAT, "crc32": 0, "content": {}}), "checksum"),
    ],
)
def test_what_is_no_index_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(ConfigError, match=words):
        read_index(tmp_path)


def renamed(content: bytes) -> bytes:
    return content.replace(b"weight/head.norm.weight", b"weight/head.norm.weighs")


BROKEN: dict[str, tuple[bytes | None, str]] = {
    "gone": (None, "No such file"),
    "emptied": (b"", "header"),
    "cut": (FILES[FILE][:-1], "end at byte"),
    "longer": (FILES[FILE] + b"\x00", "end at byte"),
    "another tensor": (renamed(FILES[FILE]), f"does not hold weight of {NORM}"),
    "another type": (FILES[FILE].replace(b'"F32"', b'"I32"', 1), "does not hold weight of"),
}


@pytest.mark.parametrize(("content", "words"), BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_not_what_the_index_says_is_named(content: bytes | None, words: str, tmp_path: Path) -> None:
    put(tmp_path)
    (tmp_path / FILE).unlink()
    if content is not None:
        (tmp_path / FILE).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{tmp_path / FILE}, of the checkpoint, is damaged: .*{words}"):
        check_files(tmp_path, read_index(tmp_path))


@pytest.mark.parametrize("name", ["index.json", FILE, "companions/words"])
def test_only_plain_files_are_opened(name: str, tmp_path: Path) -> None:
    """A pipe that nobody writes to would keep a reader waiting for ever."""
    crc = zlib.crc32(b"words")
    put(tmp_path, index=edited(FILES["index.json"], lambda c: c.update(companions={"words": crc})))
    (tmp_path / "companions").mkdir()
    (tmp_path / "companions" / "words").write_bytes(b"words")
    check_files(tmp_path, read_index(tmp_path))
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with at_most(100), pytest.raises(ConfigError, match=rf"{tmp_path / name}.* it is not a plain file"):
        check_files(tmp_path, read_index(tmp_path))


def test_a_tensor_that_the_index_does_not_know_is_named(tmp_path: Path) -> None:
    """Or half of a model could be forgotten by an index that is right in itself."""

    def forget(content: dict[str, Any]) -> None:
        for named in content["tensors"].values():
            del named[NORM]

    put(tmp_path, index=edited(FILES["index.json"], forget))
    with pytest.raises(ConfigError, match=f"does not know exp_avg/{NORM}"):
        check_files(tmp_path, read_index(tmp_path))


def test_a_damaged_companion_is_named(tmp_path: Path) -> None:
    crc = zlib.crc32(b"words")
    put(tmp_path, index=edited(FILES["index.json"], lambda c: c.update(companions={"tokenizer.model": crc})))
    (tmp_path / "companions").mkdir()
    (tmp_path / "companions" / "tokenizer.model").write_bytes(b"words")
    check_files(tmp_path, read_index(tmp_path))
    (tmp_path / "companions" / "tokenizer.model").write_bytes(b"Words")
    with pytest.raises(ConfigError, match=r"companions/tokenizer\.model, of the checkpoint, is damaged"):
        check_files(tmp_path, read_index(tmp_path))


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ([((0, 2), (0, 3)), ((2, 4), (0, 3))], ""),
        ([((2, 4), (0, 3)), ((0, 2), (0, 1)), ((0, 2), (1, 3))], ""),
        ([((0, 2), (0, 3)), ((1, 4), (0, 3))], "overlap"),
        ([((0, 4), (0, 2)), ((3, 4), (1, 3))], "overlap"),
        ([((0, 4), (0, 2)), ((0, 4), (2, 2))], "no part"),
        ([((0, 4), (0, 2))], "8 of 12"),
        ([((0, 2), (0, 3)), ((0, 2), (0, 3))], "overlap"),
        ([], "0 of 12"),
        ([((0, 2), (0, 3)), ((2, 4), (0, 2)), ((0, 1), (0, 2))], "overlap"),
    ],
)
def test_tiling(boxes: list[Any], words: str) -> None:
    fault = tiling_fault((4, 3), boxes)
    assert words in fault and bool(fault) == bool(words)


@pytest.mark.parametrize("dims", [0, 1, 2, 3])
def test_a_box_twice_is_no_tiling_in_any_dims(dims: int) -> None:
    box = ((0, 2),) * dims
    assert tiling_fault((2,) * dims, [box]) == "" and "overlap" in tiling_fault((2,) * dims, [box, box])


@pytest.mark.parametrize("lacking", [0, 1])
@pytest.mark.parametrize("shape", [(1, 100_000), (100_000,), (2, 100_000)], ids=str)
def test_many_boxes_take_no_longer_each(shape: tuple[int, ...], lacking: int) -> None:
    """Side by side in one row, too, where a comparison of each with each would take hours."""
    boxes = [(*((0, extent) for extent in shape[:-1]), (i, i + 1)) for i in range(shape[-1] - lacking)]
    with at_most(100):
        fault = tiling_fault(shape, boxes)
    assert bool(fault) == bool(lacking)


def test_more_boxes_than_a_job_would_write_are_refused() -> None:
    boxes = [(*((0, 1) for _ in range(7)), (i, i + 1)) for i in range(10_000)]
    assert "cut into 10000 boxes, more than any job would write" in tiling_fault((*[1] * 7, 10_000), boxes)
