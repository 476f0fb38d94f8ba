"""The command line as its users meet it: flags over files, Megatron-LM's names, help, and mistakes under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import pytest
import tyro

from megatron3d.cli import parse, parse_tool
from megatron3d.config import Config, ConfigError
from megatron3d.config_io import from_toml
from megatron3d.launch import Launch
from megatron3d.megatron_names import ALIASES, IMPLIED, VALUES, translate
from megatron3d.validate import resolve

ROOT = Path(__file__).resolve().parent.parent
ALONE = Launch()


def line(flags: str, launch: Launch = ALONE) -> Config:
    return parse([*flags.split(), "--mock-data"], launch)


def test_importing_the_command_line_loads_no_torch() -> None:
    code = "import megatron3d.cli, sys; sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_no_flags_are_the_defaults() -> None:
    assert line("") == resolve(replace(Config(), data=replace(Config().data, mock_data=True)), world_size=1)


def test_flags_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[optim]\nlr = 0.5\nmin_lr = 0.25\n[data]\nmock_data = true\n[run]\nseed = 7\n")
    config = parse(["--config", str(file), "--lr", "0.75"], ALONE)
    assert (config.optim.lr, config.optim.min_lr, config.run.seed) == (0.75, 0.25, 7)
    config = parse(["--config=llama2-7b", "--num-layers", "2", f"--config={file}"], ALONE)  # the last one counts
    assert (config.model.hidden_size, config.model.num_layers, config.optim.lr) == (64, 2, 0.5)
    with pytest.raises(ConfigError, match="No training data"):
        parse(["--config", str(file), "--no-mock-data"], ALONE)


def test_scaling_passes_the_flags_by() -> None:
    scaling = line("--config llama3-405b --num-layers 1").model.rope_scaling
    assert scaling is not None and scaling.factor == 8.0
    with pytest.raises(ConfigError, match="no option --rope-scaling"):
        line("--rope-scaling None")


def test_sequence_parallelism_has_three_states() -> None:
    two = Launch(world_size=2, from_torchrun=True)
    states = [
        line(flags, two).parallel.sp for flags in ("--tp 2", "--tp 2 --sp", "--no-sp --tp 2", "--sp --tp 2 --no-sp")
    ]
    assert states == [True, True, False, False]


def test_spellings() -> None:
    two = Launch(world_size=2, from_torchrun=True)
    for flags in ("--stage-layers 3,1", "--stage-layers=3,1", "--stage_layers 3,1", "--stage_layers=3,1"):
        assert line(f"--pp 2 {flags}", two).parallel.stage_layers == (3, 1)
    assert line("--lr 1 --lr 2").optim.lr == 2.0


def test_lists_and_switches_in_the_file_can_be_overridden(tmp_path: Path) -> None:
    file = tmp_path / "layout.toml"
    two = Launch(world_size=2, from_torchrun=True)
    file.write_text("[parallel]\ntp = 2\nsp = true\n")
    assert line(f"--config {file} --no-sp", two).parallel.sp is False
    file.write_text("[parallel]\npp = 2\nstage_layers = [3, 1]\n")
    assert line(f"--config {file}", two).parallel.stage_layers == (3, 1)
    assert line(f"--config {file} --stage-layers 1,3", two).parallel.stage_layers == (1, 3)
    three = replace(two, world_size=3)
    assert line(f"--config {file} --pp 3 --stage-layers 1,1,2", three).parallel.stage_layers == (1, 1, 2)


EQUAL = [
    ("--finetune --load somewhere", "--load-weights-only --load somewhere"),
    ("--override-opt_param-scheduler --load somewhere", "--override-schedule --load somewhere"),
    ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size=2 --sequence-parallel", "--tp 2 --pp 2 --sp"),
    ("--tensor_model_parallel_size 2 --use_distributed_optimizer", "--tp 2 --zero 1"),
    ("--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 40000000", "--overlap --bucket-size 40000000"),
    ("--recompute-granularity selective", "--recompute selective"),
    (
        "--kv-channels 8 --max-position-embeddings 64 --rotary-base 5e5",
        "--head-dim 8 --max-position 64 --rope-theta 5e5",
    ),
    ("--position-embedding-type learned_absolute", "--position-embedding learned"),
    ("--position-embedding-type=learned_absolute", "--position-embedding learned"),
    ("--use-rotary-position-embeddings --swiglu --normalization RMSNorm", ""),
    ("--normalization LayerNorm --qk-layernorm", "--normalization layernorm --qk-norm"),
    ("--add-qkv-bias --disable-bias-linear", "--bias qkv"),
    ("--disable-bias-linear --add-qkv-bias", "--bias qkv"),
    ("--bias all --disable-bias-linear --untie-embeddings-and-output-weights", "--no-tied-embeddings"),
    ("--init-method-std 0.01 --hidden-dropout 0.1 --bf16", "--init-std 0.01 --dropout 0.1 --dtype bf16"),
    (
        "--train-iters 50 --lr-decay-style WSD --lr-wsd-decay-iters 9",
        "--train-steps 50 --lr-schedule wsd --decay-steps 9",
    ),
    ("--lr-warmup-iters 5 --optimizer adam --adam-beta1 0.8", "--warmup-steps 5 --beta1 0.8"),
    ("--adam-beta2 0.99 --adam-eps 1e-7", "--beta2 0.99 --eps 1e-7"),
    ("--attention-dropout 0 --seed 3", "--seed 3"),
    ("--seed 3 --attention_dropout=0.0", "--seed 3"),
    ("--group-query-attention --num-query-groups 2", "--num-query-groups 2"),
    ("--eval-interval 5 --eval-iters 3 --deterministic-mode", "--eval-interval 5 --eval-steps 3 --deterministic"),
]


@pytest.mark.parametrize(("theirs", "ours"), EQUAL)
def test_megatron_names(theirs: str, ours: str) -> None:
    eight = Launch(world_size=8, from_torchrun=True)
    assert line(theirs, eight) == line(ours, eight)


def test_every_alias_leads_to_an_option_and_is_tested() -> None:
    used = {word.partition("=")[0].replace("_", "-") for theirs, _ in EQUAL for word in theirs.split()}
    assert set(ALIASES) - used == {"--tokenizer-model"}  # needs a file
    assert translate(["--tokenizer-model", "byte"]) == ["--tokenizer", "byte"]
    for ours in [*(alias.split()[0] for alias in ALIASES.values()), *VALUES]:
        with pytest.raises(ConfigError) as refusal:
            line(f"{ours} stray stray")
        assert "There is no option" not in str(refusal.value)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("--attention-dropout 0.1", "--attention-dropout 0.1: only 0 is possible.*layout.*--dropout"),
        ("--attention-dropout none", "--attention-dropout none: only 0 is possible"),
        ("--attention-dropout", "--attention-dropout --mock-data: only 0 is possible"),
        ("--group-query-attention", "Give --num-query-groups N"),
    ],
)
def test_megatron_names_that_ask_for_something_else(flags: str, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        line(flags)


def test_translate_leaves_the_rest_alone() -> None:
    words = ["--data-path=a_b=c", "x_y", "-1", "--unknown_thing", "--optimizer", "sgd", "adam"]
    assert translate(words) == ["--data-path", "a_b=c", "x_y", "-1", "--unknown-thing", "--optimizer", "sgd", "adam"]


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("--num-layer 2", "no option --num-layer. Did you mean --num-layers?"),
        ("--tensor-model-parallel 2", "Did you mean --tensor-model-parallel-size?"),
        ("--no-overlapp", "Did you mean --no-overlap?"),
        ("--micro_batch 2", "Did you mean --micro-batch-size?"),
        ("--overlap False", "The word 'False' belongs to no option"),
        ("train", "The word 'train' belongs to no option"),
        ("--lr 3e-4x", "--lr: '3e-4x' is not a number"),
        ("--stage-layers 3,x", "--stage-layers: '3,x' is not a list like 3,1"),
        ("--config none.toml", "Cannot read the config file none.toml: No such file or directory"),
        ("--config demmo", "--config demmo: there is no such model. Did you mean demo?"),
    ],
)
@pytest.mark.parametrize("columns", ["200", "30"])
def test_words_that_fit_nothing(flags: str, wanted: str, columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)  # a narrow terminal wraps what tyro says
    with pytest.raises(ConfigError) as refusal:
        line(flags)
    assert wanted in str(refusal.value)
    assert "\n" not in str(refusal.value)


def exits_quietly(flags: str, launch: Launch, capsys: pytest.CaptureFixture[str]) -> str:
    """Standard output of a command line that ends with success before any training."""
    with pytest.raises(SystemExit) as leaving:
        parse(flags.split(), launch)
    assert not leaving.value.code
    told = capsys.readouterr()
    assert told.err == ""
    return told.out


OPTIONS = """
--config --tp --pp --dp --sp --no-sp --stage-layers --schedule --num-layers --hidden-size --ffn-hidden-size
--num-attention-heads --num-query-groups --vocab-size --seq-length --activation --normalization --micro-batch-size
--global-batch-size --train-steps --lr --min-lr --lr-schedule --warmup-steps --weight-decay --clip-grad --optimizer
--zero --overlap --no-overlap --recompute --dtype --device --deterministic --data-path --split --tokenizer --mock-data
--save --load --save-interval --eval-interval --eval-steps --log-dir --seed --print-config
"""


def test_help_names_every_option_and_alias(capsys: pytest.CaptureFixture[str]) -> None:
    text = exits_quietly("--help", ALONE, capsys)
    wanted = re.findall(r"--\S+", OPTIONS)
    assert set(wanted) | set(ALIASES) | set(IMPLIED) <= set(re.findall(r"--[a-z0-9-]+", text))
    assert exits_quietly("--help", Launch(rank=1, world_size=2, from_torchrun=True), capsys) == ""


def test_print_config_is_a_resolved_config(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--print-config --config llama3-405b --tp 8 --pp 2"
    text = exits_quietly(flags, ALONE, capsys)
    assert text.startswith("# 405,853,388,800 parameters\n[model]\n")
    assert "\n# stage_layers = [63, 63]  (follows)\n" in text and "\n# sp = true  (follows)\n" in text
    assert "\ntp = 8\n" in text and "\n# dp = 1  (follows)\n" in text
    assert from_toml(text).model.rope_scaling is not None
    launched = Launch(world_size=32, from_torchrun=True)
    assert "\n# dp = 2  (follows)\n" in exits_quietly(flags, launched, capsys)
    uncommented = from_toml(re.sub(r"^# (\w+ = .*)  \(follows\)$", r"\1", text, flags=re.MULTILINE))
    assert uncommented == resolve(from_toml(text), world_size=16)
    assert exits_quietly(flags, replace(launched, rank=3), capsys) == ""
    with pytest.raises(ConfigError, match="--tp is 0"):
        parse(["--print-config", "--tp", "0"], ALONE)


def test_printed_config_starts_the_same_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text(exits_quietly("--print-config --config tiny --lr 0.1 --mock-data", ALONE, capsys))
    assert line("--config tiny --lr 0.1") == parse(["--config", str(file)], ALONE)


def test_printed_config_goes_to_another_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What followed from the layout follows from the new one; what the user gave stays."""
    flags = "--config tiny --tp 2 --micro-batch-size 3 --lr-schedule wsd"
    four, eight = Launch(world_size=4, from_torchrun=True), Launch(world_size=8, from_torchrun=True)
    file = tmp_path / "run.toml"
    file.write_text(exits_quietly(f"--print-config {flags}", four, capsys))
    assert line(f"--config {file}", four) == line(flags, four)
    assert line(f"--config {file} --tp 2 --pp 2", eight) == line(f"{flags} --pp 2", eight)
    config = line(f"--config {file} --tp 1 --pp 2 --train-steps 50", eight)
    assert config == line(f"{flags} --tp 1 --pp 2 --train-steps 50", eight)
    assert (config.parallel.dp, config.parallel.sp, config.batch.global_batch_size) == (4, False, 12)


def test_paths_become_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint keeps them, and is used from other folders."""
    for name in ("corpus.bin", "corpus.idx", "some.model"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    words = ["--data-path", "./corpus", "--tokenizer", "some.model"]
    data = parse(words, ALONE).data
    assert (data.data_path, data.tokenizer) == (str(tmp_path / "corpus"), str(tmp_path / "some.model"))
    assert from_toml(exits_quietly(" ".join(["--print-config", *words]), ALONE, capsys)).data == data
    assert parse(["--data-path", "corpus", "--tokenizer", "byte"], ALONE).data.tokenizer == "byte"
    assert line("").data.data_path == line("").data.tokenizer == ""


@pytest.mark.parametrize(
    ("program", "flag"),
    [("pretrain_gpt.py", "--help"), ("pretrain_gpt.py", "--print-config"), ("tools/compare_runs.py", "--help")],
)
def test_a_reader_that_leaves_is_no_mistake(program: str, flag: str) -> None:
    """As in `--help | head -1`, made certain: the reading end is closed before the program starts."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        run = subprocess.run([sys.executable, program, flag], cwd=ROOT, stdout=pipe, stderr=subprocess.PIPE, text=True)
    assert (run.returncode, run.stderr) == (0, "")


@dataclass(frozen=True)
class Tool:
    """A tool's own options."""

    source: Annotated[str, tyro.conf.Positional]
    """What to read."""
    sizes: tuple[int, ...] = (1, 2)
    """Some sizes."""
    mode: Literal["fast", "slow"] = "fast"
    """How."""
    json: bool = False
    """For machines."""


def test_tools_share_the_same_manners(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_tool(Tool, ["corpus", "--sizes", "3,4", "--json"], "Reads.") == Tool("corpus", (3, 4), "fast", True)
    for words, wanted in [
        ([], "SOURCE"),
        (["corpus", "--jsn"], "no option --jsn. Did you mean --json?"),
        (["corpus", "--mode", "medium"], "'medium'"),
        (["corpus", "another"], "'another' belongs to no option"),
    ]:
        with pytest.raises(ConfigError, match=wanted):
            parse_tool(Tool, words, "Reads.")
    with pytest.raises(SystemExit) as leaving:
        parse_tool(Tool, ["--help"], "Reads a source.")
    told = capsys.readouterr()
    assert not leaving.value.code and "Reads a source." in told.out and "For machines." in told.out and not told.err


TOGETHER = """
import os, runpy, sys, time
from pathlib import Path
import megatron3d.cli  # most of what there is to import
folder, sys.argv = Path(sys.argv[1]), sys.argv[2:]
(folder / os.environ["RANK"]).touch()
while len(list(folder.iterdir())) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A program whose ranks begin together: on a busy machine the last one may else be killed before it has begun."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "flags", "wanted"),
    [
        (2, "--mock-data --tp 2 --pp 2", ["world size, 2", "tp x pp = 2 x 2 = 4"]),
        (3, "--mock-data --tp 2", ["world size, 3", "tp x pp = 2 x 1 = 2"]),
        (6, "--mock-data --tp 4", ["world size, 6", "tp x pp = 4 x 1 = 4"]),
        (2, "--mock-data --global-batch-size 10 --micro-batch-size 4", ["10", "4 x 2 = 8", "8 or 16"]),
        (2, "--mock-data --tensor-parallel-size 2", ["--tensor-parallel-size", "Did you mean"]),
    ],
    ids=["DIV-11 two of four", "DIV-11 three", "DIV-12 six", "DIV-08 batch", "unknown option"],
)
def test_a_mistake_under_torchrun(processes: int, flags: str, wanted: list[str], tmp_path: Path) -> None:
    """DIV-08, DIV-11, DIV-12: one paragraph from the first rank, exit code 2 on all, within seconds."""
    program, begun, logs = tmp_path / "together.py", tmp_path / "begun", tmp_path / "logs"
    program.write_text(TOGETHER)
    begun.mkdir()
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--redirects", "3"]
    command = [sys.executable, *torchrun, "--log-dir", str(logs), str(program), str(begun), "pretrain_gpt.py"]
    run = subprocess.run([*command, *flags.split()], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode != 0
    assert re.findall(r"exitcode +: (-?\d+)", run.stderr) == ["2"] * processes
    told = {path.parent.name: path.read_text() for path in logs.rglob("stderr.log")}
    assert sorted(told) == [str(rank) for rank in range(processes)]
    assert [text for rank, text in told.items() if rank != "0" and text] == []
    assert told["0"].startswith("error: ") and told["0"].count("\n") == 1
    assert [word for word in wanted if word not in told["0"]] == []
    assert all(path.read_text() == "" for path in logs.rglob("stdout.log"))
