"""Lists of legal choices: complete where short, bounded in time and length where not; paragraphs of what is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron3d.config import ModelConfig
from megatron3d.params import param_table
from megatron3d.words import LONGEST, LONGEST_VALUE, MOST_CHOICES, divisors, paragraph


@pytest.mark.parametrize("number", [*range(1, 61), 2**11, 71**2])
def test_short_lists_of_divisors_are_complete(number: int) -> None:
    *head, last = [str(size) for size in range(1, number + 1) if number % size == 0]
    assert len(head) < MOST_CHOICES
    assert divisors(number) == (f"{', '.join(head)} or {last}" if head else last)


def test_large_numbers_neither_hang_nor_flood() -> None:
    assert divisors(1_000_000_007) == "1 or 1000000007"
    assert divisors(10**12) == "1, 2, 4, 5, 8, 10, 16, 20, 25, 32, 40, ... or 1000000000000"
    assert divisors(720720).count(",") == MOST_CHOICES - 1


def test_a_paragraph_is_one_printable_line() -> None:
    assert paragraph("--save größer/日本: no.\n") == "--save größer/日本: no."
    assert paragraph("a\nb\tc\x1b[0m\u200b\udcff") == r"a\nb\tc\x1b[0m\u200b\udcff"


VALUES = {
    "in one piece": "begin" + "x" * 5000 + "end",
    "in quotes": f"'begin {'x ' * 3000} end'",
    "in brackets": str([1.5] * 3000),
    "escaped": "begin" + "\n" * 3000 + "end",
    "digits": "1" * 5000,
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_long_value_is_cut(value: str) -> None:
    """Both ends of it stay, and all that is said around it."""
    told = paragraph(f"--tp {value} is no number: give 1, 2 or 4. The model's heads' sum, 4, stays [4, 8].")
    assert told.startswith(f"--tp {value[:5]}") and told.endswith(
        " is no number: give 1, 2 or 4. The model's heads' sum, 4, stays [4, 8]."
    )
    assert f"{value[-3:]} is no number" in told and " [...] " in told and len(told) < LONGEST_VALUE + 100
    assert paragraph("x" * LONGEST_VALUE) == "x" * LONGEST_VALUE


NAMES = [spec.name for spec in param_table(replace(ModelConfig(), num_layers=126))]


@pytest.mark.parametrize(
    ("between", "fault"),
    [(", ", "model.{}"), ("; ", "exp_avg_sq of {} has shape [16384, 16384], the model needs [16384, 8192]")],
    ids=["names", "shapes"],
)
def test_a_list_is_told_to_its_end(between: str, fault: str) -> None:
    """Every tensor of a model of 126 layers that is missing or misshapen, four times over."""
    faults = between.join(map(fault.format, NAMES * 4))
    text = f"'/a/folder' does not hold the model's tensors: {faults}. Compare with others'."
    assert paragraph(text) == text


def test_a_paragraph_ends() -> None:
    told = paragraph("begin " + "x " * LONGEST + "end")
    assert told.startswith("begin x") and told.endswith("x end") and len(told) < LONGEST + 10
