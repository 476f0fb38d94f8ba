"""Whether a run can go on from a checkpoint, and may write where it wants to, found out before it starts.

The one idea: whether a run can resume, save and log is decided on JSON, headers and paths alone, before torch is
imported and before any process group exists. Which checkpoint a folder means is in shelf.py, what one looks like in
index.py, the reading and writing of its tensors in checkpoint.py.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from megatron3d import crashes
from megatron3d.config import Config, ConfigError, ModelConfig
from megatron3d.config_io import from_dict, to_dict
from megatron3d.crc import crc32
from megatron3d.huggingface_tokenizer import TOKENIZER_JSON, files_of, is_tokenizer_json
from megatron3d.index import Index, Tensors
from megatron3d.params import param_table
from megatron3d.shelf import Found, check_outside, checkpoints, find
from megatron3d.validate import resolve

# Fields of the model that do not touch the parameters' meaning: a resumed run may change them.
FREE_MODEL_FIELDS = frozenset({"seq_length", "sliding_window", "dropout", "init_std"})
# What decides which tokens a sample number means.
ORDER_FIELDS = frozenset({"model.seq_length", "data.data_path", "data.split", "data.mock_data", "run.seed"})
# What decides the learning rate of a step and how much a step takes: changed on request only.
SCHEDULE_FIELDS = frozenset(
    {"batch.global_batch_size", "run.train_steps"}
    | {f"optim.{name}" for name in ("lr", "min_lr", "lr_schedule", "warmup_steps", "decay_steps")}
)
# What a user changes at will, without being reminded of it.
UNREMARKABLE = frozenset({"run.device", "run.eval_interval", "run.eval_steps", "run.deterministic"})
TOKENIZER_MODEL = "tokenizer.model"  # as transformers calls SentencePiece's


def saved_config(index: Index, source: str = "the checkpoint's config") -> Config:
    """The resolved config of the run that saved the checkpoint; `source` names it in errors."""
    return from_dict(index.meta["config"], source=source)


def saved_run(path: Path, index: Index) -> Config:
    """The config of a checkpoint that is to be read without a run of one's own: ConfigError where it describes no run
    that could be, or another model than the tensors are of."""
    config = saved_config(index, str(path))
    parallel = config.parallel
    _check_enough(path, index, config.model)  # first: of absurdly many layers even the split over stages is long
    try:
        config = resolve(config, world_size=parallel.tp * parallel.pp * parallel.dp)
    except ConfigError as error:
        raise ConfigError(f"{path} has a config that is impossible: {error}") from error
    check_tensors(path, index, config.model)
    return config


def check_loadable(config: Config) -> list[str]:
    """Refuses (ConfigError) a start from --load that is impossible, or that would change the schedule unasked.

    Returns what a user should know of it, as lines: newer checkpoints that are not whole, and what differs from the
    saved run.
    """
    load = config.checkpoint.load
    found = find(load)
    lines = [f"{found.path} is the newest whole checkpoint in {load}. {said}" for said in found.passed_over]
    return lines + _check_found(config, found)


def check_fallback(config: Config, found: Found, *, weights_only: bool) -> None:
    """Refuses (ConfigError) to begin with `found` in place of a newer checkpoint, which `check_loadable` has let pass
    and whose values proved damaged, unless it would have been let pass, too."""
    checkpoint = replace(config.checkpoint, load=str(found.path), load_weights_only=weights_only)
    _check_found(replace(config, checkpoint=checkpoint), found)


def _check_found(config: Config, found: Found) -> list[str]:
    """Whether a run can begin with a checkpoint, and what a user should know of that."""
    load, path, index = config.checkpoint.load, found.path, found.index
    changes = _changes(saved_config(index, f"--load {load}: the checkpoint's config"), config)
    differing = [text for name, text in changes.items() if name.startswith("model.") and not _is_free(name, config)]
    if differing:
        raise ConfigError(
            f"--load {load}: the checkpoint is of another model: {', '.join(differing)}. Use the config it was saved "
            f"with."
        )
    check_tensors(path, index, config.model)
    if config.checkpoint.load_weights_only:
        return []
    _check_goes_on(config, index)
    rescheduled = [text for name, text in changes.items() if _is_schedule(name, config)]
    if rescheduled and not config.checkpoint.override_schedule:
        raise ConfigError(
            f"--load {load}: the run that saved the checkpoint had another schedule: {', '.join(rescheduled)}. Give "
            f"--override-schedule to go on with the new one, or the values it had."
        )
    lines = []
    if continues(config) and (later := _later(path, index.meta["step"])):
        lines.append(
            f"{', '.join(later)} beside it are of later steps; they stay, until steps of this run replace them"
        )
    lines += [text for name, text in changes.items() if name not in UNREMARKABLE]
    lines += [f"{name} is not the file that the checkpoint has" for name in _other_companions(config, index)]
    if ORDER_FIELDS & changes.keys():
        lines.append("sample numbers now mean other tokens: the order of the data is not continued")
    return lines


def _changes(saved: Config, now: Config) -> dict[str, str]:
    """What differs: the field with its section -> the field and both values."""
    before, after = to_dict(saved), to_dict(now)
    return {
        f"{section}.{name}": f"{name} {before[section].get(name)} -> {value}"
        for section in ("model", "batch", "optim", "data", "run")
        for name, value in after[section].items()
        if before[section].get(name) != value
    }


def _check_goes_on(config: Config, index: Index) -> None:
    """A run that goes on needs the moments, and has steps left."""
    load, step = config.checkpoint.load, index.meta["step"]
    if config.optim.optimizer == "adamw" and "exp_avg" not in index.tensors:
        saved = index.meta["config"]["optim"]["optimizer"]
        why = "has no moments" if saved == "adamw" else f"was saved by --optimizer {saved} and has no moments"
        raise ConfigError(
            f"--load {load}: the checkpoint {why} for --optimizer adamw to go on from. --load-weights-only begins a "
            f"new run with its weights."
        )
    if step > config.run.train_steps:
        raise ConfigError(
            f"--load {load}: the checkpoint is at step {step}, beyond --train-steps {config.run.train_steps}. Give a "
            f"larger --train-steps to go on."
        )


def check_tensors(path: Path, index: Index, model: ModelConfig) -> None:
    """Every tensor of the model is there in its shape, and no other; ConfigError listing all that are not so."""
    _check_enough(path, index, model)
    shapes = {spec.name: spec.shape for spec in param_table(model)}
    faults = [fault for kind, named in index.tensors.items() for fault in _faults(kind, named, shapes)]
    if faults:
        raise ConfigError(f"{path} is not a checkpoint of this model: {'; '.join(faults)}.")


def _check_enough(path: Path, index: Index, model: ModelConfig) -> None:
    there = len(index.tensors["weight"])
    if model.num_layers > there:
        raise ConfigError(f"{path} has {there} tensors, too few for a model of {model.num_layers} layers.")


def _faults(kind: str, found: Mapping[str, Tensors], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    for name, shape in shapes.items():
        if name not in found:
            yield f"{kind} of {name} is missing, shape {list(shape)}"
        elif found[name].shape != shape:
            yield f"{kind} of {name} has shape {list(found[name].shape)}, the model needs {list(shape)}"
    for name in found.keys() - shapes.keys():
        yield f"{kind} of {name} is unexpected, shape {list(found[name].shape)}"


def _is_schedule(name: str, config: Config) -> bool:
    """A run of a constant learning rate may be prolonged: nothing else depends on its length."""
    return name in SCHEDULE_FIELDS and (name != "run.train_steps" or config.optim.lr_schedule != "constant")


def _is_free(name: str, config: Config) -> bool:
    field = name.removeprefix("model.")
    return field in FREE_MODEL_FIELDS or (field == "max_position" and config.model.position_embedding != "learned")


def check_folders(config: Config) -> None:
    """Refuses (ConfigError) folders that cannot be written to, and those in which a new run would meet an older one's
    checkpoints or metrics: what is there is never mixed with or lost to another run. Nothing is made yet."""
    save, log_dir = config.checkpoint.save, config.log.log_dir
    for option, folder in _folders(config):
        with _told_as(option, folder):
            existing = next(path for path in (folder, *folder.parents) if path.exists())
            with tempfile.TemporaryFile(dir=existing):
                pass
    if save:
        check_outside("--save", Path(save))
    if save and checkpoints(Path(save)) and not continues(config):
        raise ConfigError(
            f"--save {save} has checkpoints of an earlier run. Go on from them with --load {save}, or save elsewhere."
        )
    metrics = Path(log_dir) / "metrics.jsonl"
    begins = not config.checkpoint.auto_resume and (not config.checkpoint.load or config.checkpoint.load_weights_only)
    if log_dir and begins and metrics.is_file() and metrics.stat().st_size:
        raise ConfigError(
            f"--log-dir {log_dir} has the metrics of an earlier run. Go on from it with --load, or log elsewhere."
        )


def with_newest(config: Config) -> Config:
    """Under --auto-resume, the config that loads the newest checkpoint in --save, if there is one; before there is one,
    that which --load-weights-only asks for.

    Raises ConfigError for a run that has failed at one step again and again.
    """
    save = config.checkpoint.save
    if not config.checkpoint.auto_resume:
        return config
    crashes.check(Path(save))
    if not checkpoints(Path(save)):
        return config
    return replace(config, checkpoint=replace(config.checkpoint, load=save, load_weights_only=False))


def own_companions(config: Config) -> dict[str, bytes]:
    """Files that belong to the run's model, to be kept in its checkpoints: its tokenizer, by the name of its kind, with
    what names the special tokens of a tokenizer.json."""
    tokenizer = Path(config.data.tokenizer)
    if config.data.tokenizer in ("", "byte") or not tokenizer.is_file():
        return {}
    return files_of(tokenizer) if is_tokenizer_json(tokenizer.name) else {TOKENIZER_MODEL: tokenizer.read_bytes()}


def kept_tokenizer(config: Config, companions: Path) -> str:
    """The tokenizer of the run that saved a checkpoint, as --tokenizer takes it: of the files kept beside its tensors
    that of the run's own kind, or the one that came with the model; else what the run named."""
    named = config.data.tokenizer
    kinds = (TOKENIZER_JSON, TOKENIZER_MODEL) if is_tokenizer_json(named) else (TOKENIZER_MODEL, TOKENIZER_JSON)
    kept = [companions / name for name in kinds if named != "byte" and (companions / name).is_file()]
    return str(kept[0]) if kept else named


def _later(path: Path, step: int) -> list[str]:
    return [other.name for other in checkpoints(path.parent) if other != path and int(other.name.split("-")[1]) > step]


def _other_companions(config: Config, index: Index) -> list[str]:
    own = own_companions(config)
    return [name for name, crc in index.companions.items() if name in own and crc32(own[name]) != crc]


def continues(config: Config) -> bool:
    """Whether the run goes on from the folder that it saves into."""
    if config.checkpoint.load_weights_only:
        return False
    save, load = Path(config.checkpoint.save).resolve(), Path(config.checkpoint.load).resolve()
    return bool(config.checkpoint.save and config.checkpoint.load) and save in (load, load.parent)


def make_folders(config: Config) -> None:
    """Makes the folders that a run writes to; the last thing before it starts. ConfigError where that is impossible."""
    for option, folder in _folders(config):
        with _told_as(option, folder):
            folder.mkdir(parents=True, exist_ok=True)


def _folders(config: Config) -> list[tuple[str, Path]]:
    """(option, folder) of those that are given."""
    given = {"--save": config.checkpoint.save, "--log-dir": config.log.log_dir}
    return [(option, Path(folder)) for option, folder in given.items() if folder]


@contextlib.contextmanager
def _told_as(option: str, folder: Path) -> Iterator[None]:
    """What the system refuses, as a mistake in `option`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option} {folder} cannot be written to: {error.strerror}.") from error
