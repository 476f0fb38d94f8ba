"""A heap that keeps what it has: repeated allocations cost no new pages."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from megatron3d.heap import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit("cannot")
def churn():
    for _ in range(10):
        torch.ones(16 << 20), torch.ones(1 << 20)  # 64 and 4 MiB, freed at once
churn()
before = resource.getrusage(resource.RUSAGE_SELF)
churn()
after = resource.getrusage(resource.RUSAGE_SELF)
print(after.ru_minflt - before.ru_minflt)
"""


def page_faults(mode: str) -> int:
    """Pages the system had to hand out while the same memory was allocated again."""
    return int(subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the heap of glibc")
def test_freed_memory_is_used_again() -> None:
    assert page_faults("keep") < page_faults("usual") / 10
