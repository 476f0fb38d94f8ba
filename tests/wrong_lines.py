"""Command lines that must be refused, drawn at random: a right line, and one mistake made in it.

The one idea: `right_line` draws a line that could start, over all sections of the config; a function of MISTAKES spoils
it in one place and returns the words that a good refusal cannot do without. What is wrong is decided here, by the
mistake that was made, and never asked of the program. Everything is plain data: files are contents by name, in a folder
that the words call HERE. test_fuzz.py makes the folders and starts the processes.
"""

from __future__ import annotations

import dataclasses
import json
import random
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

from megatron3d.config import Config
from megatron3d.config_io import from_dict
from megatron3d.megatron_names import ALIASES, IMPLIED, VALUES
from megatron3d.validate import resolve
from megatron3d.words import flag
from tests.saved import blank_checkpoint, edited

HERE = "@HERE@"
"""Stands for the folder of a line's files."""

FIELDS: dict[str, Any] = {
    flag(name): (section.name, hint)
    for section in dataclasses.fields(Config)
    for name, hint in get_type_hints(section.default_factory).items()
    if name != "rope_scaling"
}
"""Every option of the config: its section and its type."""

INTEGERS = [option for option, (_, hint) in FIELDS.items() if hint is int]
NUMBERS = [option for option, (_, hint) in FIELDS.items() if hint is float]
CHOICES = {
    option: list(map(str, get_args(hint))) for option, (_, hint) in FIELDS.items() if get_origin(hint) is Literal
}
SWITCHES = [option for option, (_, hint) in FIELDS.items() if hint is bool] + ["--sp"]
KNOWN = sorted({*FIELDS, *(f"--no-{name[2:]}" for name in SWITCHES), *ALIASES, *IMPLIED, "--config", "--print-config"})

PATHS = ["--save", "--load", "--log-dir", "--data-path", "--tokenizer"]
NEVER_ZERO = [
    *("--num-layers", "--hidden-size", "--num-attention-heads", "--vocab-size", "--seq-length", "--micro-batch-size"),
    *("--norm-epsilon", "--rope-theta", "--init-std", "--tp", "--pp", "--bucket-size", "--timeout-seconds"),
    *("--lr", "--eps", "--train-steps", "--log-interval", "--max-bad-steps", "--spike-window"),
]
BELOW_ONE = ["--dropout", "--beta1", "--beta2"]
NO_NUMBERS = [
    "four",
    "",
    " ",
    "0x10",
    "1,5",
    "ten%",
    "None",
    "²",
    "1e",
    "--3",
    "1 000",
    "∞",
    "½",
    "1\n2",
    "\u0663.x",
    "true",
]
LAYOUTS = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (4, 1, 1), (1, 4, 1), (1, 1, 4)]
SURROUNDINGS = [{"FORCE_COLOR": "1"}, {"COLUMNS": "1"}, {"COLUMNS": "30"}, {"COLUMNS": "wide"}, {"TERM": "dumb"}]
"""Variables that have nothing to do with the launch, and must not change what is told."""

Options = dict[str, str | None]
Named = tuple[str, ...]


@dataclass
class Line:
    """A command line under construction."""

    options: Options
    """Option -> value; None for a switch, and where a value is missing."""
    processes: int
    files: dict[str, bytes] = field(default_factory=dict)
    """Content by path below HERE; of a path that ends in "/", an empty folder."""
    strays: list[str] = field(default_factory=list)
    """Words that belong to no option."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables that differ from those of a right launch, on every rank; empty ones count as not set."""

    def number(self, option: str) -> int:
        """The integer given for an option."""
        return int(self.options[option] or 0)

    def give(self, given: Mapping[str, object], without: str = "") -> None:
        """Adds options, those of value None as switches, and takes others away."""
        for option in without.split():
            self.options.pop(option, None)
        self.options |= {option: None if value is None else str(value) for option, value in given.items()}

    def words(self, rng: random.Random | None = None) -> list[str]:
        """The line; with `rng`, in any order and spelling."""
        spoken = [_spoken(option, value, rng) for option, value in self.options.items()]
        if rng:
            rng.shuffle(spoken)
        return [*self.strays, *(word for words in spoken for word in words)]


@dataclass(frozen=True)
class WrongLine:
    """A line that must be refused."""

    mistake: str
    words: list[str]
    processes: int
    files: dict[str, bytes]
    env: dict[str, str]
    named: Named
    """What the refusal must contain."""
    before: Line
    """The line without its mistake."""


def wrong_lines(count: int, seed: int) -> Iterator[WrongLine]:
    """`count` lines; the mistakes take turns."""
    turns = [mistake for mistake, times in MISTAKES.items() for _ in range(times)]
    for number in range(count):
        yield _spoil(turns[number % len(turns)], random.Random(f"{seed}/{number}"))


def _spoil(mistake: Mistake, rng: random.Random) -> WrongLine:
    """A right line with the mistake in it; drawn again where it has no place for the mistake."""
    named: Named = ()
    while not named:
        line = right_line(rng)
        before = Line(dict(line.options), line.processes, dict(line.files))
        named = mistake(rng, line)
    env = line.env | (rng.choice(SURROUNDINGS) if rng.random() < 0.3 else {})
    return WrongLine(mistake.__name__, line.words(rng), line.processes, line.files, env, named, before)


def _spoken(option: str, value: str | None, rng: random.Random | None) -> list[str]:
    if rng and option in FIELDS and rng.random() < 0.2:
        option = "--" + option[2:].replace("-", "_")
    if value is None:
        return [option]
    return [f"{option}={value}"] if rng and rng.random() < 0.3 else [option, value]


# Right lines ----------------------------------------------------------------------------------------------------------


def right_line(rng: random.Random) -> Line:
    """A line that could start training."""
    tp, pp, dp = rng.choice(LAYOUTS)
    heads, micro = tp * rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
    line = Line({}, tp * pp * dp)
    line.give({"--tp": tp, "--pp": pp, "--micro-batch-size": micro, "--num-layers": pp + rng.randrange(3)})
    line.give({"--num-attention-heads": heads, "--hidden-size": heads * rng.choice([4, 8, 16])})
    line.give({"--ffn-hidden-size": tp * rng.choice([16, 24, 33]), "--seq-length": tp * rng.choice([8, 12, 15])})
    _some(rng, line, dp=[dp], global_batch_size=[micro * dp, 3 * micro * dp])
    for section in (_model, _optim, _data, _rest):
        section(rng, line)
    return line


def _some(rng: random.Random, line: Line, **values: list[Any]) -> None:
    """About a third of the options, each with one of its values."""
    for name, choices in values.items():
        if rng.random() < 0.35:
            line.give({flag(name): rng.choice(choices)})


def _model(rng: random.Random, line: Line) -> None:
    heads = line.number("--num-attention-heads")
    divisors = [number for number in range(1, heads + 1) if heads % number == 0]
    _some(rng, line, activation=["gelu", "gelu_tanh", "swiglu"], normalization=["layernorm", "rmsnorm"])
    _some(rng, line, num_query_groups=divisors, vocab_size=[257, 300, 1000], bias=["none", "qkv", "all"])
    _some(rng, line, norm_epsilon=["1e-6", 0.001], dropout=[0.0, 0.1], init_std=[0.01, "2e-2"])
    _some(rng, line, qk_norm=[None])
    _some(rng, line, **{rng.choice(["tied_embeddings", "no_tied_embeddings"]): [None]})
    _some(rng, line, position_embedding=["learned", "rope"])
    if line.options.get("--position-embedding") != "learned":
        _some(rng, line, rope_theta=["5e5", 10000])


def _optim(rng: random.Random, line: Line) -> None:
    shape = rng.choice(["constant", "linear", "cosine", "wsd"])
    line.give({"--train-steps": rng.choice([20, 50, 1000]), "--lr": rng.choice(["1e-3", 0.1]), "--lr-schedule": shape})
    _some(rng, line, warmup_steps=[0, 3], weight_decay=[0, 0.01], clip_grad=[0, 1, 0.5], optimizer=["adamw", "sgd"])
    if line.options.get("--optimizer") != "sgd":
        _some(rng, line, beta1=[0.8, 0.0], beta2=[0.99], eps=["1e-6"])
    if shape != "constant":
        _some(rng, line, min_lr=[0, "1e-5"])
    if shape == "wsd":
        _some(rng, line, decay_steps=[1, 5])


def _data(rng: random.Random, line: Line) -> None:
    if rng.random() < 0.5:
        line.give({"--mock-data": None})
    else:
        line.give({"--data-path": f"{HERE}/corpus", "--vocab-size": 300})
        line.files |= corpus()
        _some(rng, line, split=["9,1", "8,1,1", "0.9, 0.1, 0"], tokenizer=["byte"])


def _rest(rng: random.Random, line: Line) -> None:
    _some(rng, line, schedule=["gpipe", "1f1b"], zero=[0, 1], overlap=[None], bucket_size=[1, 10**6])
    _some(rng, line, recompute=["none", "selective", "full"], timeout_seconds=[60, 1800])
    _some(rng, line, log_dir=[f"{HERE}/log"], no_progress=[None], peak_tflops=[0, 312])
    _some(rng, line, log_interval=[1, 10], log_level=[0, 1], save=[f"{HERE}/saved/run"], eval_interval=[5])
    _some(rng, line, dtype=["fp32", "bf16", "fp16", "fp64"], device=["auto", "cpu"], deterministic=[None])
    _some(rng, line, seed=[0, 7, 2**63 - 1], exit_step=[0, 10], exit_after_seconds=[0, 3600.5], spike_sigmas=[6])
    _some(rng, line, max_bad_steps=[1, 100], find_nan=[None], check_replicas_every=[0, 10])
    if "--save" in line.options:
        _some(rng, line, save_interval=[5, 10**6], auto_resume=[None])
    if "--eval-interval" in line.options:
        _some(rng, line, eval_steps=[1, 4])
    if "--spike-sigmas" in line.options:
        _some(rng, line, spike_window=[50], stop_on_spike=[None])


def corpus(documents: int = 20, length: int = 200) -> dict[str, bytes]:
    """A small pair of token files called corpus, of bytes."""
    tokens = [(7 * index) % 257 for index in range(documents * length)]
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, documents, documents + 1)
    index += struct.pack(f"<{documents}i", *[length] * documents)
    index += struct.pack(f"<{documents}q", *(2 * length * number for number in range(documents)))
    index += struct.pack(f"<{documents + 1}q", *range(documents + 1))
    return {"corpus.bin": struct.pack(f"<{len(tokens)}H", *tokens), "corpus.idx": index}


KEPT = "kept/step-00000010/"


def with_checkpoint(line: Line, folder: str = "kept") -> None:
    """Adds a checkpoint of the run that the line describes, at step 10, of zeros."""
    given: dict[str, dict[str, Any]] = {}
    for option, text in line.options.items():
        section, hint = FIELDS.get(option, ("", None))
        if section in ("model", "optim", "batch") or option in ("--tp", "--pp", "--dp"):
            value = True if text is None else hint(text) if hint in (int, float) else text
            given.setdefault(section, {})[option[2:].replace("-", "_")] = value
    given["run"] = {"train_steps": given["optim"].pop("train_steps", line.number("--train-steps"))}
    saved = resolve(from_dict(given), world_size=line.processes)
    files = blank_checkpoint(saved)
    line.files |= {f"{folder}/latest": b"step-00000010\n"}
    line.files |= {f"{KEPT.replace('kept', folder)}{name}": content for name, content in files.items()}
    line.give({"--load": f"{HERE}/{folder}"}, without="--auto-resume")


def change_index(line: Line, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the content of that checkpoint's index, which then still has the right checksum."""
    name = f"{KEPT}index.json"
    line.files[name] = edited(line.files[name], change).encode()


# Mistakes: words and values -------------------------------------------------------------------------------------------

Mistake = Callable[[random.Random, Line], Named]
"""Spoils a line and says what its refusal must contain; an empty tuple where it cannot be made in this line."""


def misspelt_option(rng: random.Random, line: Line) -> Named:
    option = rng.choice([*line.options, *rng.sample(KNOWN, 5)])
    at = rng.randrange(2, len(option) - 1)
    head, letter, tail = option[:at], option[at], option[at + 1 :]
    wrong = rng.choice([head + tail, head + tail[0] + letter + tail[1:], head + letter * 2 + tail, head + "q" + tail])
    wrong = rng.choice([wrong] * 5 + [option.upper()])
    if wrong in KNOWN or not wrong.strip("-"):
        return ()
    line.options[wrong] = line.options.pop(option, rng.choice(["2", None]))
    return (wrong,)


def foreign_option(rng: random.Random, line: Line) -> Named:
    foreign = "--virtual-pipeline-size --fsdp --learning-rate --batch-size --num-gpus --model-parallel-size --verbose"
    wrong = rng.choice([*foreign.split(), "-n", "-tp", "--tp\uff12", "---tp", "--", "--é", "--=", "--x" + "x" * 5000])
    line.options[wrong] = rng.choice(["2", None])
    return (wrong[:50].rstrip("="),)


def stray_word(rng: random.Random, line: Line) -> Named:
    word = rng.choice(
        ["train", "4", "tiny.toml", "é", "\u2014tp", "\u2212\u2212tp=2", "{}", "*", " ", "😀", "run\nname", "y" * 3000]
    )
    line.strays.append(word)
    return (word[:50].replace("\n", r"\n"),)


def value_for_a_switch(rng: random.Random, line: Line) -> Named:
    value = rng.choice(["False", "true", "0", "1", "yes", "no"])
    line.options[rng.choice([*SWITCHES, "--no-sp"])] = value
    return (f"'{value}'",)


def missing_value(rng: random.Random, line: Line) -> Named:
    option = rng.choice([option for option in FIELDS if option not in SWITCHES])
    line.options[option] = None
    return (option,)


def no_integer(rng: random.Random, line: Line) -> Named:
    option = rng.choice(INTEGERS)
    line.options[option] = rng.choice([*NO_NUMBERS, "1.5", "1e3", "4.0", "nan", "inf", "1" * 5000])
    return (option, "integer")


def no_number(rng: random.Random, line: Line) -> Named:
    option = rng.choice(NUMBERS)
    line.options[option] = rng.choice([*NO_NUMBERS, "3e-4x", "1e\u22124", "0.1.2", "1;2", "1" + "z" * 2000])
    return (option, "number")


def below_zero(rng: random.Random, line: Line) -> Named:
    option = rng.choice([*INTEGERS, *NUMBERS])
    fractions = ["-0.5", "-1e-9"] * (option in NUMBERS)
    line.options[option] = rng.choice(["-1", "-7", str(-(2**31)), "-" + "9" * 30, *fractions])
    return (f"{option} is -",)


def zero(rng: random.Random, line: Line) -> Named:
    option = rng.choice(NEVER_ZERO)
    line.options[option] = rng.choice(["0", "-0", *["0.0", "1e-999"] * (option in NUMBERS)])
    return (f"{option} is ", "0")


def too_large(rng: random.Random, line: Line) -> Named:
    option = rng.choice([*INTEGERS, *BELOW_ONE])
    ones = ["1", "1.0", "0.99999999999999999999"] * (option in BELOW_ONE) + ["2"] * (option == "--log-level")
    line.options[option] = rng.choice([*ones, "1" + "0" * 20, "9" * 30, "1" + "0" * 300])
    return (f"{option} is ", "below")


def not_finite(rng: random.Random, line: Line) -> Named:
    option = rng.choice(NUMBERS)
    line.options[option] = rng.choice(["nan", "inf", "-inf", "NaN", "Infinity", "1e999", "-1e999"])
    return (f"{option} is ",)


def no_such_choice(rng: random.Random, line: Line) -> Named:
    option = rng.choice(list(CHOICES))
    near = rng.choice(CHOICES[option])
    value = rng.choice([near.upper() + "x", near[:-1], near * 2, near + " ", "relu", "2", "", "ﬁ", "z" * 2000])
    if value in CHOICES[option] or value in VALUES.get(option, {}):
        return ()
    line.options[option] = value
    return (option,)


def no_list(rng: random.Random, line: Line) -> Named:
    if rng.random() < 0.5:
        line.options["--stage-layers"] = rng.choice(["", "3;1", "1,,1", "a", "1.0", "(1,1)", ",", "1 1", "9" * 5000])
        return ("--stage-layers",)
    if "--data-path" not in line.options:
        return ()
    shares = ["a", "1,2,3,4", "0,1", "-1,2", "1,-1", "0", "nan", "inf,1", "1/0", "9;1", "9,,1", "", "1e999999999", "٪"]
    line.options["--split"] = rng.choice(shares)
    return ("--split",)


def wrong_value_under_their_name(rng: random.Random, line: Line) -> Named:
    theirs, value, *named = rng.choice(
        [
            ("--train-iters", "-5", "--train-steps is -5"),
            ("--lr-decay-style", "inverse-square-root", "'inverse-square-root'"),
            ("--position-embedding-type", "relative", "'relative'"),
            ("--adam-beta2", "1.5", "--beta2 is 1.5"),
            ("--hidden-dropout", "half", "'half'"),
            ("--recompute-granularity", None, "--recompute"),
            ("--tensor-model-parallel-size", "0", "--tp is 0"),
            ("--swiglu", "True", "'True'"),
            ("--group-query-attention", None, "--num-query-groups"),
            *(("--attention-dropout", value, "--attention-dropout") for value in ("0.1", "nan", "", None, "x" * 2000)),
        ]
    )
    ours = ALIASES.get(theirs, "").partition(" ")[0]
    line.give({theirs: value}, without=f"{ours} --num-query-groups --rope-theta")
    return tuple(named)


# Mistakes: settings that do not go together ---------------------------------------------------------------------------


def sizes_that_do_not_fit(rng: random.Random, line: Line) -> Named:
    tp, pp, layers, heads = map(line.number, ("--tp", "--pp", "--num-layers", "--num-attention-heads"))
    seq, ffn, steps, micro = map(
        line.number, ("--seq-length", "--ffn-hidden-size", "--train-steps", "--micro-batch-size")
    )
    portion = micro * (line.processes // (tp * pp))
    even = [1] * (pp - 1) + [layers - pp + 1]
    stages = rng.choice([[*even, 1], [*even[:-1], even[-1] + 1], [0, *even[1:]], [-1, *even[1:], 2]])
    odd = rng.choice([1, 7, 31])
    wrong: list[tuple[dict[str, object], str, Named]] = [
        ({"--tp": line.processes + odd}, "--dp", ("world size", "tp x pp")),
        ({"--pp": line.processes + odd}, "--dp", ("world size", "tp x pp")),
        ({"--dp": line.processes + odd}, "", ("world size", "tp x pp x dp")),
        ({"--stage-layers": ",".join(map(str, stages))}, "", ("--stage-layers",)),
        ({"--num-query-groups": heads + odd}, "", ("--num-query-groups", "--num-attention-heads")),
        ({"--head-dim": odd}, "--position-embedding", ("--head-dim",)),
        ({"--max-position": seq - 1}, "", (f"--seq-length {seq}", "--max-position")),
        ({"--sliding-window": seq - 1}, "", (f"--seq-length {seq}", "sliding window")),
        ({"--warmup-steps": steps + 1}, "", ("--warmup-steps", "--train-steps")),
        ({"--decay-steps": steps + 1, "--lr-schedule": "wsd"}, "", ("--decay-steps", "--train-steps")),
        ({"--min-lr": "0.5", "--lr-schedule": "cosine"}, "--decay-steps", ("--min-lr 0.5", "--lr 0.")),
    ]
    if tp > 1:
        wrong += [
            ({"--ffn-hidden-size": ffn + 1}, "", (f"--tp {tp}", f"--ffn-hidden-size {ffn + 1}")),
            ({"--seq-length": seq + 1}, "", (f"--tp {tp}", f"--seq-length {seq + 1}")),
            ({"--num-attention-heads": heads + 1, "--head-dim": 4}, "--num-query-groups", (f"--tp {tp}", "heads")),
        ]
    if pp > 1:
        wrong += [({"--num-layers": rng.randrange(1, pp)}, "", ("--num-layers", f"--pp {pp}"))] * 2
    if portion > 1:
        wrong += [({"--global-batch-size": portion * odd + 1}, "", ("--global-batch-size", "--micro-batch-size"))] * 2
    if heads > 1:
        wrong += [({"--hidden-size": heads * 8 + 1}, "", ("--hidden-size", "--num-attention-heads"))]
    given, without, named = rng.choice(wrong)
    line.give(given, without)
    return named


def options_at_odds(rng: random.Random, line: Line) -> Named:
    given, without, *named = rng.choice(
        [
            ({"--beta1": 0.5, "--optimizer": "sgd"}, "--beta2 --eps", "--beta1", "no effect"),
            ({"--beta2": 0.5, "--optimizer": "sgd"}, "--beta1 --eps", "--beta2", "no effect"),
            ({"--eps": "1e-3", "--optimizer": "sgd"}, "--beta1 --beta2", "--eps", "no effect"),
            ({"--rope-theta": 77, "--position-embedding": "learned"}, "", "rope", "no effect"),
            ({"--min-lr": "1e-6", "--lr-schedule": "constant"}, "--decay-steps", "--min-lr", "no effect"),
            ({"--decay-steps": 2, "--lr-schedule": "cosine"}, "", "--decay-steps", "no effect"),
            ({"--save-interval": 2}, "--save --auto-resume", "--save-interval", "no effect"),
            ({"--auto-resume": None}, "--save --save-interval", "--auto-resume", "--save"),
            ({"--auto-resume": None, "--save": "x", "--load": "y"}, "", "--auto-resume", "--load"),
            ({"--spike-window": 7}, "--spike-sigmas --stop-on-spike", "--spike-window", "no effect"),
            ({"--stop-on-spike": None}, "--spike-sigmas --spike-window", "--stop-on-spike", "no effect"),
            ({"--eval-steps": 3}, "--eval-interval", "--eval-steps", "no effect"),
            (
                {"--eval-steps": 0, "--eval-interval": 5, "--mock-data": None},
                "--data-path --split --tokenizer",
                "no end",
            ),
            ({"--wandb-name": "a name"}, "", "--wandb-name", "no effect"),
            ({"--wandb-mode": "offline"}, "", "--wandb-mode", "no effect"),
            ({"--tokenizer": "byte", "--mock-data": None}, "--data-path --split", "--tokenizer", "no effect"),
            ({"--split": "5,5", "--mock-data": None}, "--data-path --tokenizer", "--split", "no effect"),
            ({"--data-path": "x", "--mock-data": None}, "--tokenizer --split", "--data-path", "--mock-data"),
            ({"--no-mock-data": None}, "--mock-data --data-path --split --tokenizer", "--data-path", "--mock-data"),
            ({"--data-path": ""}, "--mock-data --split --tokenizer", "--data-path", "--mock-data"),
            ({"--sp": None, "--tp": 1, "--pp": 1}, "--dp --global-batch-size --stage-layers", "--sp", "no effect"),
        ]
    )
    line.give(given, without)
    return tuple(named)


# Mistakes: files ------------------------------------------------------------------------------------------------------


def wrong_config_file(rng: random.Random, line: Line) -> Named:
    text, *named = rng.choice(
        [
            ("[model\n", "TOML"),
            ("num_layers: 4\n", "TOML"),
            ("[model]\nnum_layers = 4\nnum_layers = 4\n", "TOML"),
            ("a = " + "[" * 20_000, "TOML"),
            ("[run]\nseed = 1" + "0" * 5000, "TOML"),
            ("\x00", "TOML"),
            ("[modle]\n", "'modle'"),
            ("[model]\nnum_layer = 2\n", "'num_layer'"),
            ("[model]\ntp = 2\n", "'tp'", "[parallel]"),
            ("tp = 2\n", "'tp'"),
            ("model = 3\n", "[model]"),
            ("[[model]]\n", "[model]"),
            ("[model]\nnum_layers = 'four'\n", "num_layers", "'four'"),
            ("[model]\nnum_layers = 4.0\n", "num_layers", "4.0"),
            ("[model]\nqk_norm = 1\n", "qk_norm"),
            ("[optim]\nlr = true\n", "lr"),
            ("[optim]\nlr = 1979-05-27\n", "lr"),
            ("[parallel]\nstage_layers = '3,1'\n", "stage_layers"),
            ("[parallel]\nstage_layers = [" + "1.5, " * 3000 + "]\n", "stage_layers"),
            ("[parallel]\nzero = 2\n", "zero"),
            ("[parallel]\nsp = 'yes'\n", "sp"),
            ("[model]\nactivation = '" + "relu" * 1000 + "'\n", "activation"),
            ("[model.rope_scaling]\nfactor = 8\n", "rope_scaling"),
            ("[model]\n'num\\tlayers' = 1\n", "num"),
            ('["a\\nb"]\n', r"a\nb"),
            ('[model]\n"' + "k" * 3000 + '" = 1\n', "kkk"),
            *(_in_toml(option, '"a\\u0000"', f"{option} ") for option in PATHS if option not in line.options),
            *(_in_toml(option, "nan", f"{option} is nan") for option in NUMBERS if option not in line.options),
        ]
    )  # fmt: skip
    line.files["run.toml"] = text.encode()
    line.give({"--config": f"{HERE}/run.toml"})
    return tuple(named)


def _in_toml(option: str, value: str, named: str) -> tuple[str, str]:
    """The text of a file that sets an option, and what the refusal must contain."""
    return f"[{FIELDS[option][0]}]\n{option[2:].replace('-', '_')} = {value}\n", named


def unreadable_config_file(rng: random.Random, line: Line) -> Named:
    line.files |= {"binary.toml": b"\xff\xfe\x00", "folder.toml/": b"", "cut.toml": "[data]\n# é".encode()[:-1]}
    names = ["binary.toml", "folder.toml", "cut.toml", "none.toml", "none/none.toml", "cut.toml/x", "x" * 300]
    models = ["llama2-7", "demmo", "GPT2-124M", "..", "é", "m" * 3000]
    name = rng.choice([*(f"{HERE}/{name}" for name in names), *models])
    line.give({"--config": name})
    return (name.removeprefix(HERE)[:50],)


def wrong_data(rng: random.Random, line: Line) -> Named:
    if "--data-path" not in line.options:
        return ()
    index, tokens = line.files["corpus.idx"], line.files["corpus.bin"]
    lost, files, named = rng.choice(
        [
            ("corpus.idx", {}, "corpus.idx"),
            ("corpus.bin", {}, "corpus.bin"),
            ("corpus.bin", {"corpus.bin/": b""}, "corpus.bin"),
            ("", {"corpus.idx": index[: rng.randrange(len(index))]}, "corpus.idx"),
            ("", {"corpus.idx": rng.randbytes(len(index))}, "corpus.idx"),
            ("", {"corpus.idx": index[:9] + b"\xff" * (len(index) - 9)}, "corpus.idx"),
            ("", {"corpus.idx": index + b"\x00" * 8}, "corpus.idx"),
            ("", {"corpus.bin": tokens[: rng.randrange(len(tokens))]}, "corpus.bin"),
            ("", {"corpus.bin": tokens + tokens}, "corpus.bin"),
            ("", {"corpus.bin": b"\xff" * len(tokens)}, "65535"),
            ("", corpus(documents=1, length=3), "no sample"),
            ("", corpus(documents=0), "no sample"),
        ]
    )
    line.files = {name: content for name, content in (line.files | files).items() if name != lost}
    return (named,)


def wrong_data_option(rng: random.Random, line: Line) -> Named:
    if "--data-path" not in line.options:
        return ()
    line.files |= {"empty": b"", "garbage": rng.randbytes(500), "folder/": b"", "text": b"byte\n"}
    option, *values = rng.choice(
        [
            (
                "--data-path",
                "none",
                "corpus.bin",
                "corpus.idx",
                "corpus/",
                "corpus.bin/x",
                "a\nb",
                "\x1b[31m",
                "n" * 300,
            ),
            ("--tokenizer", "none", "empty", "garbage", "folder", "text", "text/x", "m" * 300, "a\nb", "Byte"),
            ("--vocab-size", "256", "100", "1"),
        ]
    )
    value = rng.choice(values)
    line.give({option: value if option == "--vocab-size" else f"{HERE}/{value}"})
    return (option[2:].partition("-")[0],)


def nothing_to_load(rng: random.Random, line: Line) -> Named:
    line.files |= {"empty/": b"", "file": b"text", "bare/latest": b"step-00000003\n", "odd/latest": b"\xff\xfe\x00"}
    line.files |= {"hollow/step-00000001/": b"", "folder/latest/": b"", "up/latest": b"../../..\n", "void/latest": b""}
    names = ["none", "empty", "file", "file/x", "bare", "odd", "hollow", "folder", "up", "void", "*", "[", "é"]
    names += ["a" * 300, "a\nb"]
    line.give({"--load": f"{HERE}/{rng.choice(names)}"}, without="--auto-resume")
    return ("--load",)


def damaged_index(rng: random.Random, line: Line) -> Named:
    with_checkpoint(line)
    text = line.files[f"{KEPT}index.json"]
    told = json.loads(text)
    content = told["content"]
    meta, (name, weight) = content["meta"], next(iter(content["tensors"]["weight"].items()))
    changes: list[dict[str, Any]] = [
        *({"meta": meta | change} for change in ({"step": "ten"}, {"step": None}, {"consumed_samples": [1]})),
        *({"meta": meta | {"config": config}} for config in (None, [], {"modle": {}}, {"run": {"seed": "x"}})),
        *({"tensors": {"weight": {name: weight | {"boxes": b}}}} for b in ("boxes", [{}], [{"file": 3}], [7], [])),
        *({"tensors": tensors} for tensors in ({}, [1], {"weight": 3}, {"weight": {"x": 3}})),
        {"meta": 7},
    ]
    if rng.random() < 0.5:
        changed = rng.choice(changes)
        change_index(line, lambda content: content.update(changed))
        return ("kept",)
    line.files[f"{KEPT}index.json"] = rng.choice(
        [
            *(json.dumps(told | {"format": version}).encode() for version in (0, 1, "2", None)),
            *(json.dumps(told | {"content": content | change}).encode() for change in changes),  # checksum too
            *(b"", b"{}", b"[]", b"null", b"\xff\xfe", b"[" * 50_000, b'"' + b"x" * 5000),
            *(text[: rng.randrange(len(text) - 1)] for _ in range(5)),
        ]
    )
    return ("kept",)


def damaged_tensors(rng: random.Random, line: Line) -> Named:
    with_checkpoint(line)
    name = f"{KEPT}rank-00000.safetensors"
    whole = line.files.pop(name)
    cut = whole[: rng.randrange(len(whole))]
    wrong = [b"", cut, whole + b"\x00", rng.randbytes(len(whole)), struct.pack("<Q", 2**63) + whole[8:]]
    headers = [b"[1,2]   ", b'{"a": 3}', b'{"a": {}}', b'{"a": {"data_offsets": "xy"}}']
    wrong += [struct.pack("<Q", len(header)) + header for header in headers]
    line.files |= rng.choice([{}, {f"{name}/": b""}, *({name: content} for content in wrong)])
    return ("rank-00000.safetensors",)


def checkpoint_of_another_run(rng: random.Random, line: Line) -> Named:
    with_checkpoint(line)
    rescheduled = {"--lr": "0.7"} if line.options.get("--lr-schedule") == "constant" else {"--train-steps": 1001}
    given, without, *named = rng.choice(
        [
            ({"--vocab-size": 1234}, "", "vocab_size"),
            ({"--num-layers": line.number("--num-layers") + 1}, "", "num_layers"),
            ({"--norm-epsilon": 0.5}, "", "norm_epsilon"),
            (rescheduled, "", "another schedule", "--override-schedule"),
            ({"--train-steps": 9, "--lr-schedule": "constant"}, "--warmup-steps --min-lr --decay-steps", "step 10"),
            ({"--optimizer": "adamw"}, "", "--optimizer adamw"),
        ]
    )
    if "--optimizer" in given:
        change_index(line, lambda content: [content["tensors"].pop(kind) for kind in ("exp_avg", "exp_avg_sq")])
    line.give(given, without)
    return ("--load", *named)


def wrong_folder(rng: random.Random, line: Line) -> Named:
    line.files["file"] = b"text"
    names = [
        f"{HERE}/file",
        f"{HERE}/file/below/it",
        "/proc/nope",
        "/dev/null/x",
        f"{HERE}/{'s' * 300}",
        f"{HERE}/file/\n",
    ]
    option = rng.choice(["--save", "--log-dir"])
    line.give({option: rng.choice(names)})
    return (f"{option} ",)


def folder_of_another_run(rng: random.Random, line: Line) -> Named:
    kind = rng.choice(["metrics", "checkpoints", "crashes"])
    if kind == "metrics":
        line.files["log/metrics.jsonl"] = b'{"step": 1}\n'
        line.give({"--log-dir": f"{HERE}/log"}, without="--auto-resume")
        return ("--log-dir", "earlier run")
    if kind == "checkpoints":
        with_checkpoint(line, "saved")
        line.give({"--save": f"{HERE}/saved"}, without="--auto-resume --load")
        return ("--save", "earlier run")
    line.files["saved/crash.json"] = b'{"step": 7, "times": 2}'
    line.give({"--save": f"{HERE}/saved", "--auto-resume": None})
    return ("crash.json", "step 7")


# Mistakes: the launch -------------------------------------------------------------------------------------------------


def wrong_launch(rng: random.Random, line: Line) -> Named:
    name, value, *named = rng.choice(
        [
            *((name, "", f"{name} not") for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")),
            *((name, "two", name, "'two'") for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")),
            ("TORCHELASTIC_RESTART_COUNT", "once", "TORCHELASTIC_RESTART_COUNT", "'once'"),
            ("RANK", "1" * 5000, "RANK"),
            ("WORLD_SIZE", "2.0", "WORLD_SIZE", "'2.0'"),
            ("WORLD_SIZE", "0", "WORLD_SIZE"),
            ("WORLD_SIZE", "-2", "WORLD_SIZE"),
            ("WORLD_SIZE", str(line.processes + 1), "world size"),
            ("LOCAL_WORLD_SIZE", "0", "LOCAL_WORLD_SIZE"),
            ("LOCAL_WORLD_SIZE", str(line.processes + 1), "LOCAL_WORLD_SIZE", "WORLD_SIZE"),
            ("MASTER_ADDR", "node..0", "node..0"),
            ("MASTER_ADDR", "n" * 70 + ".example", "nnn"),
            ("MASTER_ADDR", "node\n0", r"node\n0"),
            *(("MASTER_PORT", port, "MASTER_PORT", port) for port in ("0", "-1", "65536", "9" * 30)),
        ]
    )
    if named == ["world size"]:
        line.give({"--tp": line.options["--tp"], "--dp": line.processes // line.number("--tp") // line.number("--pp")})
    line.env[name] = value
    return tuple(named)


MISTAKES: dict[Mistake, int] = {
    misspelt_option: 4,
    foreign_option: 1,
    stray_word: 1,
    value_for_a_switch: 1,
    missing_value: 2,
    no_integer: 2,
    no_number: 2,
    below_zero: 3,
    zero: 2,
    too_large: 2,
    not_finite: 2,
    no_such_choice: 2,
    no_list: 1,
    wrong_value_under_their_name: 1,
    sizes_that_do_not_fit: 5,
    options_at_odds: 4,
    wrong_config_file: 3,
    unreadable_config_file: 1,
    wrong_data: 2,
    wrong_data_option: 2,
    nothing_to_load: 1,
    damaged_index: 1,
    damaged_tensors: 1,
    checkpoint_of_another_run: 1,
    wrong_folder: 1,
    folder_of_another_run: 1,
    wrong_launch: 2,
}
"""How often each has its turn in a round of 50 lines or so."""
