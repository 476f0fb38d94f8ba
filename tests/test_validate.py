"""What follows from the settings, and the refusal of settings that cannot work.

The table WRONG goes through the command line, as a user does; DIV-.. are cases of faults that other frameworks had.
"""

from __future__ import annotations

from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path
from typing import get_type_hints

import pytest

from megatron3d.cli import parse
from megatron3d.config import BatchConfig, Config, ConfigError, ModelConfig, OptimConfig, ParallelConfig, RunConfig
from megatron3d.config_io import from_toml
from megatron3d.launch import Launch
from megatron3d.validate import RANGES, check_can_train, resolve, split_shares


def line(flags: str, world_size: int = 1) -> Config:
    """What the command line `flags` gives on `world_size` processes, with mock data unless it says otherwise."""
    words = flags.split()
    if not {"--data-path", "--mock-data", "--no-mock-data"} & set(words):
        words.append("--mock-data")
    return parse(words, Launch(world_size=world_size, from_torchrun=world_size > 1))


def test_every_number_has_a_range_and_a_name_of_its_own() -> None:
    sections = [get_type_hints(type(getattr(Config(), section.name))) for section in fields(Config)]
    names = [name for hints in sections for name in hints]
    assert len(names) == len(set(names))
    numbers = {name for hints in sections for name, hint in hints.items() if hint in (int, float)}
    assert set(RANGES) == numbers


def test_defaults_resolve() -> None:
    config = resolve(Config(), world_size=1)
    assert (config.model.head_dim, config.model.num_query_groups, config.model.max_position) == (16, 4, 32)
    assert config.model.ffn_hidden_size == 192  # 8/3 x 64 = 170.7
    assert config.parallel == ParallelConfig(dp=1, sp=False, stage_layers=(4,))
    assert (config.batch.global_batch_size, config.num_microbatches) == (1, 1)


@pytest.mark.parametrize(
    ("activation", "hidden", "ffn"),
    [("gelu", 768, 3072), ("gelu_tanh", 64, 256), ("swiglu", 4096, 10944), ("swiglu", 192, 512), ("swiglu", 24, 64)],
)
def test_default_width_of_the_mlp(activation: str, hidden: int, ffn: int) -> None:
    config = from_toml(f"[model]\nactivation = '{activation}'\nhidden_size = {hidden}\n")
    assert resolve(config, world_size=1).model.ffn_hidden_size == ffn


def test_layout_follows_from_the_world() -> None:
    config = line("--tp 2 --pp 3 --num-layers 7 --micro-batch-size 2 --global-batch-size 24", world_size=18)
    assert config.parallel == ParallelConfig(tp=2, pp=3, dp=3, sp=True, stage_layers=(3, 2, 2))
    assert config.num_microbatches == 4
    assert line("--tp 2 --no-sp", world_size=2).parallel.sp is False
    assert line("--dp 4", world_size=4).batch.global_batch_size == 4


@pytest.mark.parametrize(("steps", "decay"), [(100, 10), (5, 1), (1, 1)])
def test_final_fall_of_wsd(steps: int, decay: int) -> None:
    config = Config(optim=OptimConfig(lr_schedule="wsd"), run=RunConfig(train_steps=steps))
    assert resolve(config, world_size=1).optim.decay_steps == decay
    assert resolve(Config(run=RunConfig(train_steps=steps)), world_size=1).optim.decay_steps == 0


@pytest.mark.parametrize(
    ("config", "world_size"),
    [
        (Config(), 1),
        (Config(parallel=ParallelConfig(tp=2, pp=2)), 12),
        (Config(optim=OptimConfig(lr_schedule="wsd"), model=ModelConfig(activation="gelu")), 3),
        (Config(batch=BatchConfig(micro_batch_size=3), parallel=ParallelConfig(stage_layers=(3, 1), pp=2)), 2),
    ],
)
def test_resolve_is_idempotent(config: Config, world_size: int) -> None:
    once = resolve(config, world_size=world_size)
    assert once != config
    assert resolve(once, world_size=world_size) == once


LEGAL = {
    "DIV-01 five layers on two stages are 3 + 2": ("--num-layers 5 --pp 2", 2),
    "DIV-03 fewer microbatches than stages": ("--pp 4 --global-batch-size 2", 4),
    "DIV-06 fewer key/value heads than tp": ("--num-attention-heads 8 --num-query-groups 2 --tp 4", 4),
    "kv heads that tp does not divide": (
        "--hidden-size 144 --num-attention-heads 12 --num-query-groups 2 --tp 3 --no-sp",
        3,
    ),
    "DIV-10 an odd dp": ("--tp 2 --zero 1", 6),
    "vocabulary below tp": ("--vocab-size 2 --tp 4", 4),
    "a head narrower than hidden / heads": ("--hidden-size 60 --num-attention-heads 8 --head-dim 6", 1),
    "an odd head without rotary": ("--hidden-size 60 --position-embedding learned", 1),
    "statements of fact at size 1": ("--schedule gpipe --no-sp --no-overlap --zero 0 --deterministic --device cpu", 1),
    "more facts at size 1": ("--stage-layers 4 --bucket-size 7 --timeout-seconds 5 --schedule gpipe", 1),
    "intervals beyond the end": ("--save x --save-interval 1000 --eval-interval 1000", 1),
    "explicit even split": ("--stage-layers 2,2 --pp 2 --dp 1", 2),
    "sequence as long as window and context": ("--seq-length 64 --sliding-window 64 --max-position 64", 1),
    "a run of warm-up only": ("--warmup-steps 100", 1),
    "lr that stays": ("--min-lr 3e-4", 1),
    "evaluation on generated data": ("--eval-interval 5 --eval-steps 2", 1),
    "saving at the end": ("--save somewhere", 1),
}


@pytest.mark.parametrize(("flags", "world_size"), LEGAL.values(), ids=LEGAL.keys())
def test_legal(flags: str, world_size: int) -> None:
    """DIV-01, DIV-03, DIV-06, DIV-10: unusual, but they work."""
    config = line(flags, world_size)
    assert sum(config.parallel.stage_layers) == config.model.num_layers


WRONG = [
    # Processes and axes
    ("DIV-11 two of four processes", 2, "--tp 2 --pp 2", "world size, 2|tp x pp = 2 x 2 = 4|product is 1 or 2"),
    ("DIV-11 three processes, tp 2", 3, "--tp 2", "world size, 3|tp x pp = 2 x 1 = 2|product is 1 or 3"),
    ("DIV-12 world 6, tp 4", 6, "--tp 4", "world size, 6|tp x pp = 4 x 1 = 4|1, 2, 3 or 6"),
    ("DIV-12 world 4, tp 2, pp 4", 4, "--tp 2 --pp 4", "world size, 4|tp x pp = 2 x 4 = 8|1, 2 or 4"),
    ("no torchrun", 1, "--tp 2", "world size, 1|torchrun --nproc-per-node 2"),
    ("dp too small", 8, "--tp 2 --dp 2", "world size, 8|tp x pp x dp = 2 x 1 x 2 = 4|would be 4"),
    ("dp too large", 2, "--dp 3", "world size, 2|1 x 1 x 3 = 3|would be 2"),
    ("sp alone", 2, "--sp", "--sp|--tp 1|no effect"),
    ("tp 0", 1, "--tp 0", "--tp is 0|at least 1"),
    ("pp negative", 1, "--pp -2", "--pp is -2|at least 1"),
    ("dp negative", 1, "--dp -1", "--dp is -1|at least 0"),
    ("no time-out", 1, "--timeout-seconds 0", "--timeout-seconds is 0|at least 1"),
    ("no bucket", 1, "--bucket-size 0", "--bucket-size is 0|at least 1"),
    ("time-out of ages", 1, f"--timeout-seconds {2**31}", f"--timeout-seconds is {2**31}|below {2**31}"),
    # Sizes over axes
    ("heads over tp", 3, "--tp 3", "--tp 3|--num-attention-heads 4|1, 2 or 4"),
    ("heads over tp, with ffn", 8, "--tp 8 --ffn-hidden-size 100", "--tp 8|-heads 4|--ffn-hidden-size 100"),
    ("ffn over tp", 4, "--tp 4 --ffn-hidden-size 90", "--tp 4|--ffn-hidden-size 90|1 or 2"),
    ("sequence over tp", 4, "--tp 4 --seq-length 30", "--tp 4|--seq-length 30|1 or 2|--no-sp"),
    ("more stages than layers", 8, "--pp 8", "--num-layers 4|--pp 8|at most 5"),
    ("stage list too short", 3, "--pp 3 --stage-layers 3,1", "3,1|2 stages|--pp 3|2,1,1"),
    ("DIV-01 stage list loses a layer", 2, "--num-layers 5 --pp 2 --stage-layers 2,2", "4 layers|--num-layers 5|3,2"),
    ("empty first stage", 2, "--pp 2 --stage-layers 0,4", "0,4|at least one layer|2,2"),
    ("fewer than none", 2, "--pp 2 --stage-layers 5,-1", "5,-1|at least one layer|2,2"),
    ("stage list of one stage", 1, "--stage-layers 3,1", "3,1|--pp 1 stages|A balanced split is 4"),
    # The model by itself
    ("no layers", 1, "--num-layers 0", "--num-layers is 0|at least 1"),
    ("hidden a large prime", 1, "--hidden-size 1000000007 --num-attention-heads 2", "Choose 1 or 1000000007 heads"),
    ("hidden not of heads", 1, "--hidden-size 66", "size 66|-heads 4|1, 2, 3, 6, 11, 22, 33 or 66"),
    ("groups not of heads", 1, "--num-query-groups 3", "--num-query-groups 3|--num-attention-heads 4|1, 2 or 4"),
    ("more groups than heads", 1, "--num-query-groups 8", "--num-query-groups 8|--num-attention-heads 4|1, 2 or 4"),
    ("odd rotary head", 1, "--hidden-size 60", "15 wide|--hidden-size 60|--num-attention-heads 4|14 or 16"),
    ("odd rotary head given", 1, "--head-dim 1", "1 wide|2 or 2"),
    ("vocabulary empty", 1, "--vocab-size 0", "--vocab-size is 0|at least 1"),
    ("context exceeded", 1, "--max-position 16", "--seq-length 32|--max-position 16|at most 16"),
    ("window exceeded", 1, "--config mistral-7b-v0.1 --seq-length 8192", "8192|window of 4096|at most 4096"),
    ("dropout 1", 1, "--dropout 1.0", "--dropout is 1.0|at least 0|below 1"),
    ("dropout negative", 1, "--dropout -0.1", "--dropout is -0.1|at least 0"),
    ("no epsilon", 1, "--norm-epsilon 0", "--norm-epsilon is 0.0|greater than 0"),
    ("no initial spread", 1, "--init-std 0", "--init-std is 0.0|greater than 0"),
    ("rotary base without rotary", 1, "--position-embedding learned --rope-theta 5e5", "rope_theta|no effect|learned"),
    ("scaling without rotary", 1, "--config llama3-405b --position-embedding learned --rope-theta 1e4", "rope_scaling"),
    # Batch
    ("DIV-08 batch 10 of 4 x 2", 2, "--global-batch-size 10 --micro-batch-size 4", "10|4 x 2 = 8|8 or 16"),
    ("batch below one portion", 3, "--global-batch-size 2", "2|1 x 3 = 3|choice is 3"),
    ("no samples", 1, "--micro-batch-size 0", "--micro-batch-size is 0|at least 1"),
    ("batch negative", 1, "--global-batch-size -4", "--global-batch-size is -4|at least 0"),
    # Optimizer and schedule
    ("lr 0", 1, "--lr 0", "--lr is 0.0|greater than 0"),
    ("lr nan", 1, "--lr nan", "--lr is nan|greater than 0"),
    ("lr infinite", 1, "--lr inf", "--lr is inf|greater than 0"),
    ("min_lr above lr", 1, "--min-lr 1e-2", "--min-lr 0.01|--lr 0.0003"),
    ("min_lr that is never reached", 1, "--min-lr 1e-5 --lr-schedule constant", "--min-lr 1e-05|constant|no effect"),
    ("warm-up too long", 1, "--warmup-steps 200", "--warmup-steps 200|--train-steps 100|at most 100"),
    ("decay without wsd", 1, "--decay-steps 5", "--decay-steps 5|cosine|no effect"),
    ("wsd too long", 1, "--lr-schedule wsd --warmup-steps 60 --decay-steps 50", "60|50|--train-steps 100"),
    ("wsd without room", 1, "--lr-schedule wsd --warmup-steps 100", "100|--decay-steps 10|--train-steps 100"),
    ("beta2 1", 1, "--beta2 1", "--beta2 is 1.0|below 1"),
    ("beta1 negative", 1, "--beta1 -0.5", "--beta1 is -0.5|at least 0"),
    ("eps 0", 1, "--eps 0", "--eps is 0.0|greater than 0"),
    ("beta of sgd", 1, "--optimizer sgd --beta1 0.8", "--beta1 0.8|sgd|no effect"),
    ("eps of sgd", 1, "--optimizer sgd --eps 1e-6", "--eps 1e-06|sgd|no effect"),
    ("clip negative", 1, "--clip-grad -1", "--clip-grad is -1.0|at least 0"),
    ("weight decay negative", 1, "--weight-decay -0.1", "--weight-decay is -0.1|at least 0"),
    # Run, data, files
    ("no steps", 1, "--train-steps 0", "--train-steps is 0|at least 1"),
    ("steps without end", 1, f"--train-steps {10**30}", f"--train-steps is {10**30}|below {2**31}"),
    ("seed negative", 1, "--seed -1", "--seed is -1|at least 0"),
    ("seed too large", 1, f"--seed {2**63}", f"--seed is {2**63}|below {2**63}"),
    ("no data", 1, "--no-mock-data", "--data-path|--mock-data"),
    ("two sources", 1, "--data-path corpus --mock-data", "--data-path corpus|--mock-data|no effect"),
    ("data that is not there", 1, "--data-path nowhere/corpus", "nowhere/corpus.bin|nowhere/corpus.idx"),
    ("tokenizer of mock data", 1, "--tokenizer byte --mock-data", "--tokenizer byte|--mock-data|no effect"),
    ("split of mock data", 1, "--split 1,1,1", "--split 1,1,1|--mock-data|no effect"),
    ("split of four", 1, "--data-path corpus --split 97,1,1,1", "'97,1,1,1'|one to three numbers|969,30,1"),
    ("split of words", 1, "--data-path corpus --split a,b,c", "'a,b,c'|one to three numbers"),
    ("split without training", 1, "--data-path corpus --split 0,1,0", "--split 0,1,0|training|positive"),
    ("split negative", 1, "--data-path corpus --split 5,-1,1", "--split 5,-1,1|below 0"),
    ("split without end", 1, "--data-path corpus --split 1e999999999", "'1e999999999'|one to three numbers"),
    ("only training to evaluate on", 1, "--data-path x --split 100 --eval-interval 5", "interval 5|--split 100 leaves"),
    ("nothing to evaluate on", 1, "--data-path x --split 1,0,0 --eval-interval 5", "--eval-interval 5|--split 1,0,0"),
    ("endless evaluation", 1, "--eval-interval 5 --eval-steps 0", "--eval-steps 0|no end|at least 1"),
    ("evaluation that never comes", 1, "--eval-steps 3", "--eval-steps 3|--eval-interval|no effect"),
    ("interval without folder", 1, "--save-interval 10", "--save-interval 10|--save|no effect"),
    ("interval negative", 1, "--save x --save-interval -1", "--save-interval is -1|at least 0"),
    # Words
    ("DIV-03 virtual stages", 4, "--pp 4 --virtual-pipeline-size 2", "--virtual-pipeline-size|no option"),
    ("unknown flag", 1, "--tensor-parallel 2", "--tensor-parallel|no option|Did you mean"),
    ("word for a number", 1, "--num-layers four", "--num-layers|'four'|an integer"),
    ("fraction for a number", 1, "--train-steps 1e3", "--train-steps|'1e3'|an integer"),
    ("no such choice", 1, "--activation relu", "--activation|'relu'|swiglu"),
    ("no such dtype", 1, "--dtype fp8", "--dtype|'fp8'|bf16"),
    ("value missing", 1, "--lr", "--lr|Missing value"),
    ("no such model", 1, "--config llama2-7", "llama2-7|Did you mean llama2-7b?|qwen3-8b"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("world_size", "flags", "wanted"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG]
)
def test_wrong_settings_are_refused_in_one_paragraph(world_size: int, flags: str, wanted: str) -> None:
    """DIV-01, DIV-03, DIV-08, DIV-11, DIV-12 and the rest: the message has the numbers and a legal choice."""
    with pytest.raises(ConfigError) as refusal:
        line(flags, world_size)
    message = str(refusal.value)
    assert [part for part in wanted.split("|") if part not in message] == []
    assert "\n" not in message
    assert message[-1] in ".?"
    assert len(message) < 500


def test_the_table_is_long_enough() -> None:
    assert len({flags for _, _, flags, _ in WRONG}) >= 60


@pytest.mark.parametrize(
    ("toml", "wanted"),
    [
        ("factor = 0.5\nlow_freq_factor = 1\nhigh_freq_factor = 4", ["factor 0.5", "8192", "at least 1"]),
        ("factor = nan\nlow_freq_factor = 1\nhigh_freq_factor = 4", ["factor nan", "at least 1"]),
        ("factor = 8\nlow_freq_factor = 4\nhigh_freq_factor = 4", ["low_freq_factor 4.0", "high_freq_factor 4.0"]),
        ("factor = 8\nlow_freq_factor = 0\nhigh_freq_factor = 4", ["low_freq_factor 0.0", "positive"]),
        ("factor = 8\nlow_freq_factor = 1\nhigh_freq_factor = inf", ["high_freq_factor inf"]),
    ],
)
def test_wrong_scaling_is_refused(toml: str, wanted: list[str]) -> None:
    config = from_toml(f"[model.rope_scaling]\n{toml}\noriginal_max_position = 8192\n")
    with pytest.raises(ConfigError) as refusal:
        resolve(config, world_size=1)
    assert [word for word in wanted if word not in str(refusal.value)] == []


def test_no_text_has_a_null_character() -> None:
    """No word of a command line can have one, but a file can, and the system takes no such path."""
    with pytest.raises(ConfigError, match=r"--log-dir 'a\\x00' has a null character"):
        resolve(from_toml('[log]\nlog_dir = "a\\u0000"\n'), world_size=1)


def test_a_world_has_processes() -> None:
    with pytest.raises(ConfigError, match="world size, 0"):
        resolve(Config(), world_size=0)


def test_data_files_are_looked_for(tmp_path: Path) -> None:
    prefix = tmp_path / "corpus"
    config = resolve(Config(), world_size=1)
    config = replace(config, data=replace(config.data, data_path=str(prefix)))
    prefix.with_suffix(".bin").touch()
    with pytest.raises(ConfigError, match=r"there is no \S+corpus\.idx\. Give"):
        check_can_train(config)
    prefix.with_suffix(".idx").touch()
    check_can_train(config)
    with pytest.raises(ConfigError, match=rf"in common: {prefix} and not {prefix}\.bin"):
        check_can_train(replace(config, data=replace(config.data, data_path=f"{prefix}.bin")))
    with pytest.raises(ConfigError, match=r"--tokenizer \S+/none\.model: there is no such file"):
        check_can_train(replace(config, data=replace(config.data, tokenizer=str(tmp_path / "none.model"))))
    check_can_train(replace(config, data=replace(config.data, tokenizer="byte")))


def test_split_shares() -> None:
    assert split_shares("969,30,1") == (969, 30, 1)
    assert split_shares("0.9, 0.1, 0") == (Fraction(9, 10), Fraction(1, 10), 0)
    assert split_shares("100") == (100, 0, 0)
    assert split_shares("9,1") == (9, 1, 0)
