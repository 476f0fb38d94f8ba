"""pretrain_gpt.py with one mishap: `injected.py KIND PLACE RANK STEP TIMES flags...`, started by test_failures.py.

KIND: raise, exit (os._exit(0)), or the name of a signal that the rank sends itself. PLACE: where in the run. RANK:
"all" is every one of them. STEP: 0 is before the first. TIMES: "once" spares a job that has been restarted, "always"
does not.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pretrain_gpt
from megatron3d import checkpoint, comm, mesh, model, pipeline, trainer
from megatron3d.launch import user_errors

KIND, PLACE, RANK, STEP, TIMES = sys.argv[1:6]
PLACES: dict[str, tuple[Any, str]] = {
    "groups": (mesh, "_axis"),
    "load": (checkpoint, "fill"),
    "forward": (model.GPTStage, "forward"),
    "backward": (pipeline._Run, "_backward"),
    "data": (trainer, "load_microbatch"),
    "collective": (comm, "_sum_in_order"),
    "evaluate": (trainer.Trainer, "evaluate"),
    "save": (checkpoint, "write_pieces"),
    "index": (checkpoint.Save, "_publish"),
    "rename": (Path, "rename"),
    "latest": (Path, "replace"),
    "step": (trainer.Trainer, "_feed"),
    "close": (mesh.Mesh, "meet"),
}
ENDS = {"latest": "latest.tmp"}  # of the first argument, where a place is one of many calls of a function


def mishap() -> None:
    print(f"injected {KIND} in {PLACE}", file=sys.stderr, flush=True)  # torchrun names one of those it finds dead
    if KIND == "raise":
        raise ArithmeticError(f"injected in {PLACE}")
    if KIND == "exit":
        os._exit(0)
    os.kill(os.getpid(), getattr(signal, KIND))


def main() -> None:
    meshes: list[mesh.Mesh] = []
    owner, name = PLACES[PLACE]
    original = getattr(owner, name)
    create = mesh.Mesh.create

    def remembering(*args: Any, **kwargs: Any) -> Any:
        meshes.append(create(*args, **kwargs))
        return meshes[-1]

    def risky(*args: Any, **kwargs: Any) -> Any:
        here = RANK in ("all", os.environ["RANK"]) and (PLACE not in ENDS or str(args[0]).endswith(ENDS[PLACE]))
        now = int(STEP) == (meshes[0].recorder.step if meshes else 0)
        if here and now and (TIMES == "always" or os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"):
            mishap()
        return original(*args, **kwargs)

    mesh.Mesh.create = remembering  # type: ignore[method-assign, assignment]
    setattr(owner, name, risky)
    with user_errors():
        pretrain_gpt.main(sys.argv[6:])


if __name__ == "__main__":
    main()
