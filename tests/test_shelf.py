"""The folder of checkpoints: what is the newest whole one, how one gets and loses its name, what is never touched."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from megatron3d import shelf
from megatron3d.config import Config, ConfigError, ModelConfig
from megatron3d.validate import resolve
from tests.saved import FILE, blank_checkpoint

FILES = blank_checkpoint(
    resolve(Config(model=ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2)), world_size=1)
)


def put(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


def shelf_of(root: Path, *steps: int) -> Path:
    for step in steps:
        put(root / shelf.name_of(step))
    (root / "latest").write_text(shelf.name_of(steps[-1]) + "\n")
    return root


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


# Looking --------------------------------------------------------------------------------------------------------------


def test_the_newest_is_the_one_that_latest_names(tmp_path: Path) -> None:
    root = shelf_of(tmp_path, 1, 3, 2)
    assert shelf.find(root).path == root / "step-00000002"
    assert shelf.find(root / "step-00000001").path == root / "step-00000001", "a step by its own folder"


WITHOUT_A_NAME = (None, b"", b"\xff\xfe")


@pytest.mark.parametrize("latest", [*WITHOUT_A_NAME, b"elsewhere\n", b"../..\n", b"a\x00b", b"n" * 5000])
def test_without_a_name_the_highest_step_counts(latest: bytes | None, tmp_path: Path) -> None:
    root = shelf_of(tmp_path, 2, 100_000_000, 3)
    (root / "latest").unlink()
    if latest is not None:
        (root / "latest").write_bytes(latest)
    found = shelf.find(root)
    assert found.path == root / "step-100000000"
    assert [f"{root}/latest names" in said for said in found.passed_over] == [True] * (latest not in WITHOUT_A_NAME)


def test_what_is_not_whole_is_passed_over_and_said(tmp_path: Path) -> None:
    root = shelf_of(tmp_path, 1, 2, 3)
    (root / "step-00000003" / FILE).write_bytes(FILES[FILE][:-1])
    (root / "step-00000002" / "index.json").write_text("{")
    found = shelf.find(root)
    assert found.path == root / "step-00000001" and len(found.passed_over) == 2
    assert FILE in found.passed_over[0] and "step-00000002/index.json" in found.passed_over[1]
    with pytest.raises(ConfigError, match=r"step-00000003.*end at byte"):
        shelf.find(root / "step-00000003")  # which was asked for by name
    (root / "step-00000001" / FILE).unlink()
    with pytest.raises(ConfigError, match=r"no checkpoint in it is whole. .*step-00000003.*00000002.*00000001"):
        shelf.find(root)


@pytest.mark.parametrize("wrong", ["nowhere", "empty", "half", "file", "shelf/step-00000007"])
def test_where_there_is_none_nothing_is_made_up(wrong: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("text")
    put(tmp_path / "half" / ".step-00000001.partial")
    shelf_of(tmp_path / "shelf", 1)
    with pytest.raises(ConfigError, match=f"--load {tmp_path}/{wrong}: there is no checkpoint"):
        shelf.find(tmp_path / wrong)


def test_a_lost_index_is_not_overlooked(tmp_path: Path) -> None:
    """What has the name of a checkpoint is one, or its loss is said."""
    root = shelf_of(tmp_path, 1, 2)
    (root / "step-00000002" / "index.json").unlink()
    found = shelf.find(root)
    assert found.path == root / "step-00000001" and "step-00000002/index.json" in found.passed_over[0]
    (root / "step-00000001" / "index.json").unlink()
    with pytest.raises(ConfigError, match="no checkpoint in it is whole"):
        shelf.find(root)


def test_a_folder_is_one_run_s(tmp_path: Path) -> None:
    with shelf.occupied(tmp_path / "save") as first, shelf.occupied(tmp_path / "save") as second:
        assert first and not second
    with shelf.occupied(tmp_path / "save") as third:
        assert third and names(tmp_path / "save") == []


# Adding ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("can_swap", [True, False])
def test_a_checkpoint_of_the_same_step_is_replaced(
    can_swap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once where the system can swap two names."""
    if not can_swap:
        monkeypatch.setattr(shelf, "_exchange", lambda a, b: False)
    root = shelf_of(tmp_path, 1)
    (root / "step-00000001" / "old").write_text("")
    for remains in (".step-00000001.replaced", ".step-00000007.partial", ".step-00000009.removed"):
        put(root / remains)
    aside = shelf.aside(root, 1)
    shelf.make_room(aside)
    assert names(root) == [".step-00000001.partial", "latest", "step-00000001"], "remains of interrupted saves go"
    (aside / "new").write_text("")
    shelf.publish(aside, root / "step-00000001")
    assert names(root) == ["latest", "step-00000001"] and names(root / "step-00000001") == ["new"]


def test_the_swap_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash right after it leaves a whole checkpoint under the name."""
    root, seen = shelf_of(tmp_path, 1), []
    monkeypatch.setattr(Path, "rename", lambda self, target: seen.append((names(root), self.name)) or crash())
    aside = shelf.aside(root, 1)
    aside.mkdir()
    (aside / "new").write_text("")
    with pytest.raises(KeyboardInterrupt):
        shelf.publish(aside, root / "step-00000001")
    assert seen[0][1] == ".step-00000001.partial" and (root / "step-00000001" / "new").exists()


def crash() -> None:
    raise KeyboardInterrupt


def test_a_failed_rename_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, rename = shelf_of(tmp_path, 1), Path.rename
    monkeypatch.setattr(shelf, "_exchange", lambda a, b: False)

    def refuse(self: Path, target: Path) -> Any:
        if self.name.endswith(".partial"):
            raise OSError(30, "Read-only file system")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    aside = shelf.aside(root, 1)
    aside.mkdir()
    with pytest.raises(OSError, match="Read-only"):
        shelf.publish(aside, root / "step-00000001")
    assert shelf.find(root).path.name == "step-00000001"


# Taking away ----------------------------------------------------------------------------------------------------------


def test_only_old_checkpoints_are_removed(tmp_path: Path) -> None:
    """CKPT-04: those of earlier runs too, and nothing that is not one."""
    root = shelf_of(tmp_path, 1, 2, 3, 10)
    foreign = ["step-1", "step-00000004", "old-step-00000001", "notes.txt", "step-00000005.bak", "crash.json"]
    for name in foreign:
        (root / name).mkdir() if "." not in name else (root / name).write_text("")
    put(root / "step-0000000x")
    shelf.keep_last(root / "step-00000010", 2)
    assert names(root) == sorted([*foreign, "step-0000000x", "latest", "step-00000003", "step-00000010"])
    shelf.keep_last(root / "step-00000003", 1)
    assert shelf.checkpoints(root) == [root / "step-00000003", root / "step-00000004"], (
        "the new one, and the foreign one"
    )


def test_one_that_is_being_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It loses its name first: a crash in the middle leaves nothing that looks like a checkpoint."""
    root = shelf_of(tmp_path, 1, 2)
    monkeypatch.setattr(shelf.shutil, "rmtree", lambda path, **_: os.remove(Path(path) / FILE))
    shelf.keep_last(root / "step-00000002", 1)
    assert names(root) == [".step-00000001.removed", "latest", "step-00000002"]
