"""Drawing a token from logits: at the ends of the range of temperatures too."""

from __future__ import annotations

import pytest
import torch

from megatron3d.inference import _draw

LOGITS = torch.tensor([1.0, 3.0, 3.5, -2.0])


def draws(temperature: float, top_k: int = 0, count: int = 400) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return [_draw(LOGITS, temperature, top_k, generator) for _ in range(count)]


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 5e-324, 1e-3])
@pytest.mark.parametrize("top_k", [0, 2])
def test_the_coldest_draws_take_the_likeliest(temperature: float, top_k: int) -> None:
    assert set(draws(temperature, top_k, count=20)) == {2}


def test_draws_are_as_frequent_as_likely() -> None:
    for temperature in (0.7, 1.0, 1e300):
        expected = (LOGITS / temperature).softmax(0) if temperature < 10 else torch.full((4,), 0.25)
        counts = torch.bincount(torch.tensor(draws(temperature)), minlength=4)
        assert torch.allclose(counts / 400, expected, atol=0.08)
    assert set(draws(1.0, top_k=2)) == {1, 2}
