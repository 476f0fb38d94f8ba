"""What is judged before a run starts: folders that are taken, cannot be written to, or hold no whole checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron3d.config import CheckpointConfig, Config, ConfigError, LogConfig
from megatron3d.resume import check_folders, continues, read_index


def run(save: Path | str = "", load: Path | str = "", log_dir: Path | str = "") -> Config:
    checkpoint = CheckpointConfig(save=str(save), load=str(load))
    return replace(Config(), checkpoint=checkpoint, log=LogConfig(log_dir=str(log_dir)))


def with_checkpoint(folder: Path) -> Path:
    (folder / "step-00000002").mkdir(parents=True)
    (folder / "step-00000002" / "index.json").write_text("{}")
    return folder


def test_new_folders_are_made(tmp_path: Path) -> None:
    check_folders(run(save=tmp_path / "a" / "b", log_dir=tmp_path / "c"))
    assert (tmp_path / "a" / "b").is_dir() and list((tmp_path / "c").iterdir()) == []


def test_checkpoints_of_two_runs_never_mix(tmp_path: Path) -> None:
    taken, other = with_checkpoint(tmp_path / "taken"), with_checkpoint(tmp_path / "other")
    for config in (run(save=taken), run(save=taken, load=other)):
        with pytest.raises(ConfigError, match=f"{taken} has checkpoints of an earlier run.*--load {taken}"):
            check_folders(config)
    for load in (taken, taken / "step-00000002", f"{tmp_path}/other/../taken"):
        check_folders(run(save=taken, load=load))
    assert not continues(run(save=tmp_path)) and not continues(run(load=taken))


def test_metrics_of_an_earlier_run_are_never_cut(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="metrics of an earlier run"):
        check_folders(run(log_dir=tmp_path))
    check_folders(run(log_dir=tmp_path, load="anywhere"))
    (tmp_path / "metrics.jsonl").write_text("")
    check_folders(run(log_dir=tmp_path))


@pytest.mark.parametrize("option", ["save", "log_dir"])
def test_a_folder_that_cannot_be_written_to_is_refused(option: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nope")):
        with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')} {folder} cannot be written to"):
            check_folders(run(**{option: folder}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a checkpoint's index"),
        ("[]", "not a checkpoint's index"),
        (json.dumps({"format": 99, "meta": {}, "tensors": {}}), "format 99"),
        (json.dumps({"format": 1, "meta": {"step": 1}, "tensors": {"weight": {}}}), "not a whole index"),
        (json.dumps({"format": 1, "meta": 7, "tensors": {}}), "not a checkpoint's index"),
    ],
)
def test_a_damaged_index_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_index(tmp_path)
