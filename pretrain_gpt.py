"""Pre-trains a GPT-style decoder: `torchrun --nproc-per-node 8 pretrain_gpt.py --config demo --tp 4 --pp 2 ...`.

A table of contents: arguments -> Config -> Mesh -> Trainer. Mistakes in the arguments end the program before torch is
imported and before any process group exists.
"""

from __future__ import annotations

import sys

from megatron3d.cli import parse
from megatron3d.heap import keep_freed_memory
from megatron3d.launch import launch_from_environment, leave, shared_mistakes, use_repeatable_cublas, user_errors
from megatron3d.rendezvous import check_rendezvous
from megatron3d.resume import check_folders, check_loadable, make_folders, with_newest
from megatron3d.signals import STOPPED
from megatron3d.tether import end_with_launcher


def main(argv: list[str]) -> None:
    """Parses and checks, then builds the mesh and trains."""
    launch = launch_from_environment()
    if launch.from_torchrun:
        end_with_launcher()
    with shared_mistakes():
        config = with_newest(parse(argv, launch))
        changed = check_loadable(config) if config.checkpoint.load else []
        check_folders(config)

        from megatron3d.data import open_datasets  # needs numpy, which --help does without

        datasets = open_datasets(config.data, config.model, config.run.seed)
    if launch.world_size > 1:
        serves = launch.rank == 0 and not launch.agent_store
        check_rendezvous(launch.master_addr, launch.master_port, hosts=serves)
    with shared_mistakes():
        make_folders(config)
    if config.run.deterministic:
        use_repeatable_cublas()

    import torch

    from megatron3d.failures import meeting, told
    from megatron3d.mesh import Mesh, pick_device
    from megatron3d.trainer import Trainer

    torch.use_deterministic_algorithms(config.run.deterministic)
    device = pick_device(config.run.device, launch)
    if device.type == "cpu":
        keep_freed_memory()
    with meeting(launch):
        mesh = Mesh.create(config.parallel, launch, device, deterministic=config.run.deterministic)
    for line in changed if mesh.is_main else []:
        print(f"--load: {line}", file=sys.stderr)
    with told(config, mesh, launch):
        trainer = Trainer(config, mesh, datasets)
        with trainer.stop.listening():
            finished = trainer.run()
            mesh.meet()
            leave(0 if finished else STOPPED)  # groups stay: a back-end that aborts must not fail what has ended well


if __name__ == "__main__":
    with user_errors():
        main(sys.argv[1:])
