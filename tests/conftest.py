"""One thread per process: ranks share the cores, and sums must not depend on the number of threads."""

import torch

from tests.disturbed import in_peace, quick_roll_call  # noqa: F401 - fixtures

torch.set_num_threads(1)
