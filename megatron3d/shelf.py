"""The folder that a run's checkpoints stand in: which is the newest whole one, how one is added, which are taken away.

The one idea: a checkpoint gets its name, step-00000200, by one rename, when all of it is on the disk, and loses it by
one rename before anything of it is removed; so what has a name is whole, unless the disk has failed since. `latest`
names the newest, and is moved last. Everything without such a name (other than interrupted saves) is somebody else's
and never touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron3d.config import ConfigError
from megatron3d.index import INDEX, Index, check_files, read_index, read_plain

STEP = re.compile(r"step-(\d{8,})")
LATEST = "latest"


# Looking --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """A whole checkpoint."""

    path: Path
    index: Index
    passed_over: tuple[str, ...] = ()
    """What is wrong with newer ones, one line each."""


def find(folder: str | Path, damaged: Collection[Path] = ()) -> Found:
    """The checkpoint that `--load folder` means: `folder` itself if it is one, else the newest whole one in it that is
    not known to be `damaged`.

    The one that `latest` names counts as the newest, then the highest step. Raises ConfigError where there is none
    that is whole: a wrong path never starts a run from random weights.
    """
    root = Path(folder)
    if os.path.isfile(root / INDEX) and root not in damaged:
        return Found(root, _whole(root))
    named, passed_over = _latest(root), list[str]()
    if named and named not in {path.name for path in checkpoints(root)}:
        passed_over.append(f"{root / LATEST} names {named[:80]!r}, and there is no such folder.")
    for path in (path for path in _by_age(root, named) if path not in damaged):
        try:
            return Found(path, _whole(path), tuple(passed_over))
        except ConfigError as error:
            passed_over.append(str(error))
    if checkpoints(root):
        raise ConfigError(f"--load {folder}: no checkpoint in it is whole. {' '.join(passed_over)}")
    raise ConfigError(
        f"--load {folder}: there is no checkpoint. A checkpoint folder has a file `latest` and a folder step-... "
        f"with an {INDEX} in it, as --save writes them."
    )


def _whole(path: Path) -> Index:
    index = read_index(path)
    check_files(path, index)
    return index


def _by_age(root: Path, named: str) -> list[Path]:
    """Newest first."""
    found = checkpoints(root)[::-1]
    return [path for path in found if path.name == named] + [path for path in found if path.name != named]


def _latest(root: Path) -> str:
    try:
        return read_plain(root / LATEST).decode().strip()
    except (OSError, ValueError):
        return ""


def checkpoints(root: Path) -> list[Path]:
    """What has a checkpoint's name in a folder, by step, whole or not; none where there is no folder."""
    folders = [path for path in root.iterdir() if os.path.isdir(path)] if os.path.isdir(root) else []
    steps = {path: STEP.fullmatch(path.name) for path in folders}
    ours = {path: int(match[1]) for path, match in steps.items() if match}
    return sorted(ours, key=lambda path: ours[path])


def check_outside(option: str, folder: Path) -> None:
    """ConfigError for a folder that is a checkpoint itself, in which others would be hidden."""
    if os.path.isfile(folder / INDEX):
        raise ConfigError(
            f"{option} {folder} is a checkpoint itself. Give the folder that it stands in, {folder.parent}."
        )


# Adding ---------------------------------------------------------------------------------------------------------------


def name_of(step: int) -> str:
    """Of the checkpoint of a step."""
    return f"step-{step:08d}"


def aside(root: Path, step: int) -> Path:
    """Where a checkpoint is written, under a name that is no checkpoint's."""
    return root / f".{name_of(step)}.partial"


def make_room(aside: Path) -> None:
    """Makes that folder, empty; what interrupted saves have left beside it goes."""
    for kind in ("partial", "replaced", "removed"):
        for left in aside.parent.glob(f".step-*.{kind}"):
            shutil.rmtree(left, ignore_errors=True)
    aside.mkdir(parents=True)


def publish(aside: Path, final: Path) -> None:
    """Gives a folder that is whole its name, and moves `latest` to it."""
    for folder in (*(path for path in aside.iterdir() if path.is_dir()), aside):
        sync(folder)
    replaced = final.with_name(f".{final.name}.replaced")
    if final.exists() and _exchange(aside, final):
        aside.rename(replaced)
    else:
        _replace(aside, final, replaced)
    _point_to(final)
    shutil.rmtree(replaced, ignore_errors=True)


def _replace(aside: Path, final: Path, replaced: Path) -> None:
    """Where there is nothing to swap with, or the system cannot swap."""
    with contextlib.suppress(FileNotFoundError):
        final.rename(replaced)
    try:
        aside.rename(final)
    except OSError:
        if replaced.exists():
            replaced.rename(final)
        raise


def _exchange(a: Path, b: Path) -> bool:
    """Swaps two names at once, where the system can (Linux, most file systems): there is no moment without either."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return renameat2 is not None and renameat2(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0


def _point_to(final: Path) -> None:
    aside = final.parent / f"{LATEST}.tmp"
    write(aside, final.name + "\n")
    aside.replace(final.parent / LATEST)
    sync(final.parent)


def write(path: Path, content: str | bytes) -> None:
    """A file that is on the disk when this returns."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    sync(path)


def sync(path: Path) -> None:
    """Forces a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Taking away ----------------------------------------------------------------------------------------------------------


def keep_last(newest: Path, count: int) -> None:
    """Removes all but the last `count` checkpoints beside `newest`, which always stays, as does what is not known to be
    ours."""
    others = [path for path in checkpoints(newest.parent) if path != newest and _is_ours(path)]
    for path in others[: max(0, len(others) - (count - 1))]:
        removed = path.with_name(f".{path.name}.removed")
        path.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)


def _is_ours(path: Path) -> bool:
    try:
        read_index(path)
    except ConfigError:
        return False
    return True


# Having it for oneself ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def occupied(root: Path) -> Iterator[bool]:
    """While inside, no other run may save into this folder; gives whether it was free. A process that dies lets go.

    On a file system without locks it always seems to be.
    """
    root.mkdir(parents=True, exist_ok=True)
    descriptor, free = os.open(root, os.O_RDONLY), True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        free = False
    except OSError:
        pass
    try:
        yield free
    finally:
        os.close(descriptor)
