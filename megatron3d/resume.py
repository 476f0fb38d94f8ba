"""Checkpoint folders as a run finds them before it starts: which one is newest, whether it fits, where one may write.

The one idea: whether a run can resume, save and log is decided on JSON and paths alone, before torch is imported and
before any process group exists. The format, and the reading and writing of tensors, are in checkpoint.py.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron3d import crashes
from megatron3d.config import Config, ConfigError
from megatron3d.config_io import from_dict, to_dict

FORMAT = 1
Index = dict[str, Any]

# Fields of the model that do not touch the parameters' meaning: a resumed run may change them.
FREE_MODEL_FIELDS = frozenset({"seq_length", "sliding_window", "dropout", "init_std"})
# What decides which tokens a sample number means.
ORDER_FIELDS = frozenset({"model.seq_length", "data.data_path", "data.split", "data.mock_data", "run.seed"})
# What a user changes at will, without being reminded of it.
UNREMARKABLE = frozenset({"run.device", "run.eval_interval", "run.eval_steps", "run.deterministic"})


def newest(folder: str | Path) -> Path:
    """The checkpoint that `--load folder` means: `folder` itself, the one `latest` names, or the highest step in it.

    Raises ConfigError where there is none: a wrong path never starts a run from random weights.
    """
    root = Path(folder)
    if (root / "index.json").is_file():
        return root
    if (root / "latest").is_file():
        named = root / (root / "latest").read_text().strip()
        if (named / "index.json").is_file():
            return named
    whole = checkpoints(root)
    if not whole:
        raise ConfigError(
            f"--load {folder}: there is no checkpoint. A checkpoint folder has a file `latest` and a folder step-... "
            f"with an index.json in it, as --save writes them."
        )
    return whole[-1]


def checkpoints(root: Path) -> list[Path]:
    """The whole checkpoints in a folder, by step."""
    return sorted(path.parent for path in root.glob("step-*/index.json"))


def read_index(folder: str | Path) -> Index:
    """Index of the checkpoint that `--load folder` means; ConfigError if it is unreadable."""
    path = newest(folder) / "index.json"
    try:
        index: Index = json.loads(path.read_text())
        version = index["format"]
        complete = {"step", "consumed_samples", "config"} <= index["meta"].keys() and bool(index["tensors"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a checkpoint's index: {type(error).__name__}: {error}.") from error
    if version != FORMAT:
        raise ConfigError(f"{path} has format {version}, and this version reads format {FORMAT}.")
    if not complete:
        raise ConfigError(f"{path} is not a whole index: it lacks the step, the samples, the config or the tensors.")
    return index


def saved_config(index: Index) -> Config:
    """The resolved config of the run that saved the checkpoint."""
    return from_dict(index["meta"]["config"], source="the checkpoint's config")


def check_loadable(config: Config) -> list[str]:
    """Refuses (ConfigError) a resume that cannot go on; returns what differs from the saved run, as lines to show."""
    load, index = config.checkpoint.load, read_index(config.checkpoint.load)
    step, saved, now = index["meta"]["step"], to_dict(saved_config(index)), to_dict(config)
    changes = {
        f"{section}.{name}": f"{name} {saved[section].get(name)} -> {value}"
        for section in ("model", "batch", "optim", "data", "run")
        for name, value in now[section].items()
        if saved[section].get(name) != value
    }
    differing = [text for name, text in changes.items() if name.startswith("model.") and not _is_free(name, config)]
    if differing:
        raise ConfigError(
            f"--load {load}: the checkpoint is of another model: {', '.join(differing)}. Use the config it was saved "
            f"with."
        )
    if config.optim.optimizer == "adamw" and "exp_avg" not in index["tensors"]:
        raise ConfigError(
            f"--load {load}: the checkpoint was saved by --optimizer {saved['optim']['optimizer']} and has no moments "
            f"for --optimizer adamw to go on from."
        )
    if step > config.run.train_steps:
        raise ConfigError(
            f"--load {load}: the checkpoint is at step {step}, beyond --train-steps {config.run.train_steps}. Give a "
            f"larger --train-steps to go on."
        )
    lines = [text for name, text in changes.items() if name not in UNREMARKABLE]
    if ORDER_FIELDS & changes.keys():
        lines.append("sample numbers now mean other tokens: the order of the data is not continued")
    return lines


def _is_free(name: str, config: Config) -> bool:
    field = name.removeprefix("model.")
    return field in FREE_MODEL_FIELDS or (field == "max_position" and config.model.position_embedding != "learned")


def check_folders(config: Config) -> None:
    """Refuses (ConfigError) folders that cannot be written to, and those in which a new run would meet an older one's
    checkpoints or metrics: what is there is never mixed with or lost to another run."""
    save, log_dir = config.checkpoint.save, config.log.log_dir
    for option, folder in (("--save", save), ("--log-dir", log_dir)):
        if folder:
            _check_writable(option, Path(folder))
    if save and checkpoints(Path(save)) and not continues(config):
        raise ConfigError(
            f"--save {save} has checkpoints of an earlier run. Go on from them with --load {save}, or save elsewhere."
        )
    metrics = Path(log_dir) / "metrics.jsonl"
    begins = not config.checkpoint.load and not config.checkpoint.auto_resume
    if log_dir and begins and metrics.is_file() and metrics.stat().st_size:
        raise ConfigError(
            f"--log-dir {log_dir} has the metrics of an earlier run. Go on from it with --load, or log elsewhere."
        )


def with_newest(config: Config) -> Config:
    """Under --auto-resume, the config that loads the newest checkpoint in --save, if there is one.

    Raises ConfigError for a run that has failed at one step again and again.
    """
    save = config.checkpoint.save
    if not config.checkpoint.auto_resume:
        return config
    crashes.check(Path(save))
    if not checkpoints(Path(save)):
        return config
    return replace(config, checkpoint=replace(config.checkpoint, load=save))


def continues(config: Config) -> bool:
    """Whether the run saves into the folder it is loaded from."""
    save, load = Path(config.checkpoint.save).resolve(), Path(config.checkpoint.load).resolve()
    return bool(config.checkpoint.save and config.checkpoint.load) and save in (load, load.parent)


def _check_writable(option: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{option} {folder} cannot be written to: {error.strerror}.") from error
