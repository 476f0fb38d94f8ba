"""The command line: words -> `Config`.

The one idea: every field of the dataclasses is a flag (tyro makes them, with their docstrings as help), laid over the
TOML file that `--config` names. Whatever cannot be parsed becomes a ConfigError of one paragraph. Megatron-LM's names
are in megatron_names.py, values are judged in validate.py, errors are told in launch.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from megatron3d.config import Config, ConfigError, RopeScaling
from megatron3d.config_io import load_toml, to_toml
from megatron3d.launch import Launch, shared_mistakes
from megatron3d.megatron_names import ALIASES, IMPLIED, translate
from megatron3d.params import num_parameters, param_table
from megatron3d.validate import check_can_train, resolve
from megatron3d.words import commas, did_you_mean, flag

T = TypeVar("T")
C = TypeVar("C", bound=Config)

MARKERS = (tyro.conf.OmitArgPrefixes, tyro.conf.AvoidSubcommands, tyro.conf.PositionalMetavarFromFieldName)
THEIR_NAMES = {**ALIASES, **IMPLIED}
MODEL_CONFIGS = Path(__file__).resolve().parent / "model_configs"
SWITCHES = {"--sp": ["--sp", "True"], "--no-sp": ["--sp", "False"]}  # three states: its flag needs a value inside


@dataclass(frozen=True, kw_only=True)
class _CommandLine(Config):
    """Pre-train a GPT-style decoder. Start one process per device with torchrun; every flag is also a TOML key."""

    config: str = ""
    """A name from model_configs/, or the path of a TOML file; flags override it."""
    print_config: bool = False
    """Print the resolved settings as TOML, with the number of parameters, and stop. What follows from others is a
    comment, so the text is a file for --config on any layout."""


def parse(argv: Sequence[str], launch: Launch) -> Config:
    """The resolved config that the words `argv` (without the program's name) describe.

    Paths of data and tokenizer are absolute in it: a checkpoint keeps them, and is used from other folders. `--help`
    and `--print-config` print from the first rank and leave with SystemExit(0); the latter needs neither data nor
    torchrun: without it, it supposes as many processes as the layout asks for. Raises ConfigError.
    """
    aloud = launch.rank == 0
    words = [part for word in translate(argv) for part in SWITCHES.get(word, [word])]
    base = _load_base(words)
    # Scaling of the rotary frequencies is a table, not a flag: it passes the flags by.
    shown = replace(base, model=replace(base.model, rope_scaling=None))
    line = _run_tyro(
        _CommandLine, words, default=_copy(_CommandLine, shown), known=THEIR_NAMES, epilogue=_alias_help(), aloud=aloud
    )
    config = _copy(Config, line)
    config = replace(config, model=replace(config.model, rope_scaling=base.model.rope_scaling))
    if line.print_config:
        _print_config(_with_absolute_paths(config), launch)
    config = resolve(config, world_size=launch.world_size)
    check_can_train(config)
    return _with_absolute_paths(config)


def parse_tool(cls: type[T], argv: Sequence[str], description: str) -> T:
    """An instance of the dataclass `cls`, whose fields are the flags of a one-process tool.

    Positional words are fields annotated with `tyro.conf.Positional`. Raises ConfigError; `--help` leaves with
    SystemExit(0).
    """
    with shared_mistakes():
        return _run_tyro(cls, argv, description=description)


def _copy(cls: type[C], config: Config) -> C:
    """The sections of `config` in another class that has them."""
    return cls(**{section.name: getattr(config, section.name) for section in dataclasses.fields(Config)})


def _load_base(words: Sequence[str]) -> Config:
    """The file that the last `--config` names, or all defaults."""
    named = [value for option, value in itertools.pairwise(words) if option == "--config"]
    if not named:
        return Config()
    if "/" in named[-1] or named[-1].endswith(".toml"):
        return load_toml(Path(named[-1]))
    available = sorted(path.stem for path in MODEL_CONFIGS.glob("*.toml"))
    if named[-1] not in available:
        raise ConfigError(
            f"--config {named[-1]}: there is no such model.{did_you_mean(named[-1], available)} Choose one of "
            f"{', '.join(available)}, or give the path of a TOML file."
        )
    return load_toml(MODEL_CONFIGS / f"{named[-1]}.toml")


def _with_absolute_paths(config: Config) -> Config:
    """Data and tokenizer found from any folder."""
    data = config.data
    path = os.path.abspath(data.data_path) if data.data_path else ""
    tokenizer = data.tokenizer if data.tokenizer in ("", "byte") else os.path.abspath(data.tokenizer)
    return replace(config, data=replace(data, data_path=path, tokenizer=tokenizer))


@contextlib.contextmanager
def _reader_may_leave() -> Iterator[None]:
    """Around what prints and ends the program: `| head -1` closes the pipe before all is written, and that is fine."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is flushed there at the exit
        sys.exit(0)


@_reader_may_leave()
def _print_config(config: Config, launch: Launch) -> NoReturn:
    """Print the resolved config from the first rank, what the user left open as comments, and leave."""
    layout = config.parallel
    world_size = launch.world_size if launch.from_torchrun else max(1, layout.tp * layout.pp * max(layout.dp, 1))
    resolved = resolve(config, world_size=world_size)
    if launch.rank == 0:
        given = set(to_toml(config).split("\n"))  # keys are unique over all sections, so lines are too
        lines = [line if line in given else f"# {line}  (follows)" for line in to_toml(resolved).split("\n")]
        print(f"# {num_parameters(param_table(resolved.model)):,} parameters", *lines, sep="\n", end="")
    sys.exit(0)


@_reader_may_leave()
def _run_tyro(
    cls: type[T],
    words: Sequence[str],
    *,
    default: T | None = None,
    description: str | None = None,
    known: Iterable[str] = (),
    epilogue: str = "",
    aloud: bool = True,
) -> T:
    """`cls` from `words`; help only if `aloud`; tyro's refusals become a ConfigError."""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            parsed: tuple[T, list[str]] = tyro.cli(
                cls,
                args=words,
                default=tyro.MISSING_NONPROP if default is None else default,
                description=description,
                return_unknown_args=True,
                console_outputs=aloud,
                config=MARKERS,
                registry=_value_rules(),
            )
    except SystemExit as leaving:
        if leaving.code:
            raise ConfigError(_unboxed(box.getvalue())) from None
        if aloud and epilogue:
            print(epilogue)
        raise
    result, strays = parsed
    if strays:
        raise ConfigError(_stray(strays[0], [*_flags(cls), *known]))
    return result


def _value_rules() -> ConstructorRegistry:
    """How tyro reads a value where its own way is not ours: `3,1` for lists, and errors in plain words."""
    rules = ConstructorRegistry()

    @rules.primitive_rule
    def rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        if info.type is int:
            return _value_rule("INT", int, "an integer")
        if info.type is float:
            return _value_rule("FLOAT", float, "a number")
        if get_origin(info.type) is tuple and {*get_args(info.type)} <= {int, ...}:  # tyro narrows it by the default
            return _value_rule("N,N,...", lambda text: tuple(map(int, text.split(","))), "a list like 3,1")
        if info.type == bool | None:
            return _value_rule("| --no-sp", {"True": True, "False": False}.__getitem__, "True or False")
        return None

    return rules


def _value_rule(metavar: str, read: Callable[[str], object], expected: str) -> PrimitiveConstructorSpec[Any]:
    """A rule for one word, which `read` turns into a value."""

    def instance_from_str(words: list[str]) -> object:
        try:
            return read(words[0])
        except (ValueError, KeyError):
            raise ValueError(f"{words[0]!r} is not {expected}") from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=instance_from_str,
        is_instance=lambda _: True,
        str_from_instance=lambda value: [commas(value) if isinstance(value, tuple) else str(value)],
    )


def _unboxed(text: str) -> str:
    """The first passage inside the frame that tyro draws around an error, as one line."""
    lines = [line.strip("│ ") for line in text.splitlines()[1:]]  # the first one is the title

    def is_rule(line: str) -> bool:
        return not line.strip("─-╰╯")

    passage = itertools.takewhile(lambda line: not is_rule(line), itertools.dropwhile(is_rule, lines))
    return f"{' '.join(passage).rstrip('.')}. See --help."


def _stray(word: str, known: Sequence[str]) -> str:
    """What to say about a word that no flag takes."""
    if word.startswith("-"):
        return f"There is no option {word}.{did_you_mean(word, known)} See --help."
    return f"The word {word!r} belongs to no option (a switch takes none: it is --name or --no-name). See --help."


def _flags(cls: type) -> Iterator[str]:
    """The flags of a dataclass and of those inside it."""
    for name, hint in get_type_hints(cls).items():
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from _flags(hint)
        elif hint != RopeScaling | None:
            yield flag(name)
            if hint in (bool, bool | None):
                yield flag(f"no_{name}")


def _alias_help() -> str:
    """Megatron-LM's names, for the end of the help text."""
    rows = [f"  {theirs:<40} {ours}" for theirs, ours in THEIR_NAMES.items()]
    return "\n".join(["Megatron-LM's names are understood too:", *rows])
