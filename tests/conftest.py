"""One thread per process: ranks share the cores, and sums must not depend on the number of threads."""

import torch
from hypothesis import settings

from tests.disturbed import in_peace, quick_roll_call  # noqa: F401 - fixtures

torch.set_num_threads(1)
settings.load_profile("ci")  # the same examples each time, and none fails for having taken 0.2 s of a busy machine
