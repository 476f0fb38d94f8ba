"""A run's checkpoints in time: when one is begun, when it is committed, and that only one is under way.

The one idea: a save that is written behind training is committed by all ranks in the same step, the first one after
which all say that they have written (their votes ride on the gradient norm's message), or before the next save, or at
the end of the run, whichever comes first. What a checkpoint is made of is in checkpoint.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron3d import crashes, shelf
from megatron3d.checkpoint import Save, State
from megatron3d.comm import agree, gather_objects
from megatron3d.config import Config, FolderTaken
from megatron3d.index import Companions
from megatron3d.mesh import Mesh
from megatron3d.nonfinite import bad_weight
from megatron3d.optimizer import Optimizer
from megatron3d.resume import own_companions
from megatron3d.timers import Timer


class Saver:
    """`companions`: the files that go into each checkpoint; on the main rank."""

    def __init__(self, config: Config, optimizer: Optimizer, mesh: Mesh, timer: Timer) -> None:
        self.companions: Companions = own_companions(config) if mesh.is_main else {}
        self._config, self._optimizer, self._mesh, self._timer = config, optimizer, mesh, timer
        self._under_way: Save | None = None

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Around a run: the folder that it saves into is its own. FolderTaken on all ranks if it is another's now."""
        folder = Path(self._config.checkpoint.save) if self._config.checkpoint.save else None
        with contextlib.ExitStack() as stack:
            free = folder is None or not self._mesh.is_main or stack.enter_context(shelf.occupied(folder))
            if not gather_objects(free, self._mesh.control)[0]:
                raise FolderTaken(f"another run is saving into {folder} now; end that one, or save elsewhere")
            yield

    @property
    def has_written(self) -> bool:
        """Whether a save is under way of which this rank has written its part."""
        return self._under_way is not None and self._under_way.is_written

    def begin(self, folder: str, counts: Mapping[str, Any], *, behind: bool = False) -> None:
        """Begins a save into `folder`; a collective call. `behind`: it is written while training goes on.

        Raises JobError for weights that are not finite.
        """
        assert self._under_way is None
        with self._timer("save"):
            name = bad_weight(self._optimizer)
            agree(f"{name} is not finite at step {counts['step']}: not saved" if name else None, self._mesh.control)
            state = State(self._config, counts, self.companions)
            self._under_way = Save(folder, state, self._optimizer, self._mesh, behind=behind)

    def finish(self) -> Path | None:
        """The checkpoint that was under way, whole now; None if none was. A collective call."""
        save, self._under_way = self._under_way, None
        if save is None:
            return None
        with self._timer("save"):
            path = save.commit(self._config.checkpoint.keep_last)
            if self._mesh.is_main:
                crashes.forgive(path.parent, save.step)
        return path
