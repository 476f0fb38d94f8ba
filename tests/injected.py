"""pretrain_gpt.py with one mishap: `injected.py KIND PLACE RANK STEP ONCE_FILE flags...`, started by test_failures.py.

KIND: raise, exit (os._exit(0)), or the name of a signal that the rank sends itself. PLACE: where in the step. The
mishap happens once per job if ONCE_FILE is a path, so that a restarted job gets past it; "-" repeats it.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pretrain_gpt
from megatron3d import checkpoint, comm, data, model, pipeline, trainer
from megatron3d.launch import user_errors

KIND, PLACE, RANK, STEP, ONCE_FILE = sys.argv[1:6]
PLACES: dict[str, tuple[Any, str]] = {
    "forward": (model.GPTStage, "forward"),
    "backward": (pipeline._Run, "_backward"),
    "data": (trainer, "load_microbatch"),
    "collective": (comm, "_ordered_sum"),
    "save": (checkpoint, "_write_rank"),
    "step": (trainer.Trainer, "_feed"),
}


def mishap() -> None:
    if ONCE_FILE != "-":
        if Path(ONCE_FILE).exists():
            return
        Path(ONCE_FILE).write_text("")
    if KIND == "raise":
        raise ArithmeticError(f"injected in {PLACE}")
    if KIND == "exit":
        os._exit(0)
    os.kill(os.getpid(), getattr(signal, KIND))


def main() -> None:
    meshes = []
    owner, name = PLACES[PLACE]
    original = getattr(owner, name)
    create = trainer.Mesh.create

    def remembering(*args: Any, **kwargs: Any) -> Any:
        meshes.append(create(*args, **kwargs))
        return meshes[-1]

    def risky(*args: Any, **kwargs: Any) -> Any:
        if meshes and meshes[0].rank == int(RANK) and meshes[0].recorder.step == int(STEP):
            mishap()
        return original(*args, **kwargs)

    trainer.Mesh.create = remembering  # type: ignore[method-assign, assignment]
    setattr(owner, name, risky)
    assert data.load_microbatch is not risky
    with user_errors():
        pretrain_gpt.main(sys.argv[6:])


if __name__ == "__main__":
    main()
