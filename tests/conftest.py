"""One thread per process: ranks share the cores, and sums must not depend on the number of threads."""

import torch

torch.set_num_threads(1)
