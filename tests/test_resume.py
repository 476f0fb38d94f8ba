"""What is judged before a run starts: folders that are taken, cannot be written to, or hold no whole checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron3d.cli import parse
from megatron3d.config import CheckpointConfig, Config, ConfigError, LogConfig, ModelConfig
from megatron3d.index import read_index
from megatron3d.launch import Launch
from megatron3d.resume import (
    check_fallback,
    check_folders,
    check_loadable,
    continues,
    make_folders,
    saved_run,
    with_newest,
)
from megatron3d.shelf import find
from megatron3d.validate import resolve
from tests.saved import FILE, blank_checkpoint, edited


def run(save: Path | str = "", load: Path | str = "", log_dir: Path | str = "") -> Config:
    checkpoint = CheckpointConfig(save=str(save), load=str(load))
    return replace(Config(), checkpoint=checkpoint, log=LogConfig(log_dir=str(log_dir)))


def with_checkpoint(folder: Path) -> Path:
    (folder / "step-00000002").mkdir(parents=True)
    (folder / "step-00000002" / "index.json").write_text("{}")
    return folder


def test_new_folders_are_made_once_all_is_well(tmp_path: Path) -> None:
    config = run(save=tmp_path / "a" / "b", log_dir=tmp_path / "c")
    check_folders(config)
    assert list(tmp_path.iterdir()) == []
    make_folders(config)
    make_folders(config)
    assert (tmp_path / "a" / "b").is_dir() and list((tmp_path / "c").iterdir()) == []
    make_folders(run())


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
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nope"), tmp_path / ("long" * 100)):
        for refuses in (check_folders, make_folders):
            with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')} {folder} cannot be written to"):
                refuses(run(**{option: folder}))


# Going on -------------------------------------------------------------------------------------------------------------

SAVED = resolve(Config(model=ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2)), world_size=1)


def loading(folder: Path, kinds: tuple[str, ...] = ("weight", "exp_avg", "exp_avg_sq"), **options: Any) -> Config:
    """The saved config that loads a blank checkpoint, which is made in `folder`, with other options."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in blank_checkpoint(SAVED, kinds).items():
        (folder / name).write_bytes(content)
    return replace(SAVED, checkpoint=CheckpointConfig(load=str(folder), **options))


def with_fields(config: Config, **sections: dict[str, Any]) -> Config:
    return replace(config, **{name: replace(getattr(config, name), **fields) for name, fields in sections.items()})


def test_every_tensor_that_does_not_fit_is_listed(tmp_path: Path) -> None:
    """One error with both shapes: missing, unexpected, misshapen."""
    config = loading(tmp_path)

    def change(content: dict[str, Any]) -> None:
        weights = content["tensors"]["weight"]
        weights["head.scale.weight"] = weights.pop("head.norm.weight")
        weights["layers.0.mlp.up.weight"]["shape"] = [8, 64]
        weights["layers.0.mlp.up.weight"]["boxes"][0]["box"] = [[0, 8], [0, 64]]

    index = tmp_path / "index.json"
    index.write_text(edited(index.read_text(), change))
    header = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(
        header.replace(
            b'weight/layers.0.mlp.up.weight":{"dtype":"F32","shape":[64,8]',
            b'weight/layers.0.mlp.up.weight":{"dtype":"F32","shape":[8,64]',
        )
    )
    with pytest.raises(ConfigError) as refused:
        check_loadable(config)
    for words in (
        "weight of head.norm.weight is missing, shape [8]",
        "weight of head.scale.weight is unexpected, shape [8]",
        "weight of layers.0.mlp.up.weight has shape [8, 64], the model needs [64, 8]",
    ):
        assert words in str(refused.value)


SCHEDULE: list[dict[str, dict[str, Any]]] = [
    {"optim": {"lr": 1e-3}},
    {"optim": {"min_lr": 1e-5}},
    {"optim": {"lr_schedule": "linear"}},
    {"optim": {"warmup_steps": 7}},
    {"batch": {"global_batch_size": 8}},
    {"run": {"train_steps": 200}},
]


@pytest.mark.parametrize("fields", SCHEDULE, ids=str)
def test_another_schedule_has_to_be_asked_for(fields: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """RES-04, its second half: refused without the flag; never mixed, never ignored."""
    ((section, values),) = fields.items()
    ((name, value),) = values.items()
    words = f"{name} {getattr(getattr(SAVED, section), name)} -> {value}"
    with pytest.raises(ConfigError, match=f"another schedule: {words}. Give --override-schedule"):
        check_loadable(with_fields(loading(tmp_path), **fields))
    assert check_loadable(with_fields(loading(tmp_path, override_schedule=True), **fields)) == [words]
    assert check_loadable(with_fields(loading(tmp_path, load_weights_only=True), **fields)) == []


def test_a_constant_rate_may_be_held_longer(tmp_path: Path) -> None:
    saved = with_fields(SAVED, optim={"lr_schedule": "constant"})
    tmp_path.mkdir(exist_ok=True)
    for name, content in blank_checkpoint(saved).items():
        (tmp_path / name).write_bytes(content)
    longer = with_fields(saved, run={"train_steps": 300}, checkpoint={"load": str(tmp_path)})
    assert check_loadable(longer) == ["train_steps 100 -> 300"]


def test_weights_alone_begin_a_run_but_do_not_continue_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no moments for --optimizer adamw.*--load-weights-only"):
        check_loadable(loading(tmp_path, kinds=("weight",)))
    assert check_loadable(loading(tmp_path, kinds=("weight",), load_weights_only=True)) == []
    sgd = with_fields(SAVED, optim={"optimizer": "sgd"}, checkpoint={"load": str(tmp_path)})
    assert check_loadable(sgd) == ["optimizer adamw -> sgd"]


def test_what_was_passed_over_is_said(tmp_path: Path) -> None:
    loading(tmp_path / "step-00000010")
    loading(tmp_path / "step-00000020")
    (tmp_path / "step-00000020" / FILE).unlink()
    config = replace(SAVED, checkpoint=CheckpointConfig(load=str(tmp_path)))
    (line,) = check_loadable(config)
    assert line.startswith(f"{tmp_path}/step-00000010 is the newest whole checkpoint") and "step-00000020" in line


def test_a_restart_goes_on_instead_of_beginning_again(tmp_path: Path) -> None:
    """--auto-resume with --load-weights-only: those weights are only where the run begins."""
    begin = loading(tmp_path / "pretrained", load_weights_only=True, auto_resume=True, save=str(tmp_path / "save"))
    assert with_newest(begin) == begin
    loading(tmp_path / "save" / "step-00000010")
    resumed = with_newest(begin).checkpoint
    assert resumed.load == str(tmp_path / "save") and not resumed.load_weights_only


def test_no_group_has_a_rate_of_its_own() -> None:
    """RES-05: there is no option for it, so that no override can flatten it; Megatron-LM's is refused by name."""
    with pytest.raises(ConfigError, match="--decoupled-lr"):
        parse(["--mock-data", "--decoupled-lr", "1e-3"], Launch())


def test_lost_indexes_never_begin_a_run_anew(tmp_path: Path) -> None:
    """Under --auto-resume all checkpoints may be damaged: that is no reason to start from random weights over them."""
    config = replace(SAVED, checkpoint=CheckpointConfig(save=str(tmp_path), auto_resume=True))
    loading(tmp_path / "step-00000010")
    (tmp_path / "step-00000010" / "index.json").unlink()
    resumed = with_newest(config)
    assert resumed.checkpoint.load == str(tmp_path)
    with pytest.raises(ConfigError, match=r"no checkpoint in it is whole.*step-00000010/index\.json"):
        check_loadable(resumed)
    with pytest.raises(ConfigError, match="has checkpoints of an earlier run"):
        check_folders(run(save=tmp_path))


def test_a_checkpoint_is_no_folder_for_checkpoints(tmp_path: Path) -> None:
    config = loading(tmp_path / "step-00000010", save=str(tmp_path / "step-00000010"))
    with pytest.raises(ConfigError, match=f"is a checkpoint itself. Give the folder that it stands in, {tmp_path}"):
        check_folders(config)


def test_a_run_that_begins_with_weights_has_a_log_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    config = run(load="pretrained", log_dir=tmp_path)
    check_folders(config)
    with pytest.raises(ConfigError, match="metrics of an earlier run"):
        check_folders(with_fields(config, checkpoint={"load_weights_only": True}))


def test_checkpoints_of_a_later_step_are_pointed_out(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        loading(tmp_path / f"step-{step:08d}")
    config = with_fields(SAVED, checkpoint={"load": str(tmp_path / "step-00000010"), "save": str(tmp_path)})
    (line,) = check_loadable(config)
    assert line.startswith("step-00000020, step-00000030 beside it are of later steps")


def test_a_model_larger_than_its_checkpoint_is_refused_at_once(tmp_path: Path) -> None:
    loading(tmp_path)
    index = tmp_path / "index.json"

    def enlarge(content: dict[str, Any]) -> None:
        content["meta"]["config"]["model"]["num_layers"] = 10**9
        content["meta"]["config"]["parallel"]["stage_layers"] = [10**9]

    index.write_text(edited(index.read_text(), enlarge))
    with pytest.raises(ConfigError, match="too few for a model of 1000000000 layers"):
        saved_run(tmp_path, read_index(tmp_path))


FALLBACKS: dict[str, tuple[Config, tuple[str, ...], str]] = {
    "another model": (
        resolve(replace(SAVED, model=replace(SAVED.model, ffn_hidden_size=128)), world_size=1),
        ("weight", "exp_avg", "exp_avg_sq"),
        "another model: ffn_hidden_size 128 -> 64",
    ),
    "another schedule": (
        with_fields(SAVED, optim={"lr": 0.5}),
        ("weight", "exp_avg", "exp_avg_sq"),
        "another schedule: lr 0.5 -> ",
    ),
    "no moments": (SAVED, ("weight",), "has no moments"),
}


@pytest.mark.parametrize(("older", "kinds", "words"), FALLBACKS.values(), ids=FALLBACKS)
def test_an_older_checkpoint_is_judged_as_the_newest_was(
    older: Config, kinds: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    """Before it takes its place; weights alone need neither schedule nor moments, and a schedule may be overridden."""
    loading(tmp_path / "step-00000020")
    (tmp_path / "step-00000010").mkdir()
    for name, content in blank_checkpoint(older, kinds).items():
        (tmp_path / "step-00000010" / name).write_bytes(content)
    meant, found = find(tmp_path / "step-00000020"), find(tmp_path / "step-00000010")
    check_fallback(SAVED, meant, weights_only=False)
    with pytest.raises(ConfigError, match=rf"--load {found.path}: .*{words}"):
        check_fallback(SAVED, found, weights_only=False)
    if "model" not in words:
        check_fallback(SAVED, found, weights_only=True)
    if "schedule" in words:
        check_fallback(with_fields(SAVED, checkpoint={"override_schedule": True}), found, weights_only=False)
