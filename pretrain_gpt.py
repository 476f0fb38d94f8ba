"""Pre-trains a GPT-style decoder: `torchrun --nproc-per-node 8 pretrain_gpt.py --config demo --tp 4 --pp 2 ...`.

A table of contents: arguments -> Config -> Mesh -> Trainer. Mistakes in the arguments end the program before torch is
imported and before any process group exists.
"""

from __future__ import annotations

import sys

from megatron3d.cli import parse
from megatron3d.launch import launch_from_environment, use_repeatable_cublas, user_errors
from megatron3d.resume import check_folders, check_loadable


def main(argv: list[str]) -> None:
    """Parses and checks, then builds the mesh and trains."""
    launch = launch_from_environment()
    config = parse(argv, launch)
    changed = check_loadable(config) if config.checkpoint.load else []
    check_folders(config)
    if config.run.deterministic:
        use_repeatable_cublas()

    import torch

    from megatron3d.data import open_datasets
    from megatron3d.mesh import Mesh, pick_device
    from megatron3d.trainer import Trainer

    torch.use_deterministic_algorithms(config.run.deterministic)
    device = pick_device(config.run.device, launch)
    datasets = open_datasets(config.data, config.model, config.run.seed)

    mesh = Mesh.create(config.parallel, launch, device, deterministic=config.run.deterministic)
    if mesh.is_main and changed:
        print("The resumed run changes: " + "; ".join(changed), file=sys.stderr)
    Trainer(config, mesh, datasets).run()
    mesh.close()


if __name__ == "__main__":
    with user_errors():
        main(sys.argv[1:])
