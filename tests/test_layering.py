"""The architecture as assertions: imports go down the rows, and a few names appear only where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROWS = [
    {"__init__", "config", "words", "keys", "sizes", "config_io", "params", "grid", "schedule", "layout", "lr", "cost"}
    | {"launch", "rendezvous", "tether", "heap", "resume", "megatron_names", "validate", "cli"}
    | {"loss_scale", "timers", "signals", "spikes", "flight", "crashes"}
    | {"crc", "ahead", "tensor_header", "index", "shelf", "huggingface_families", "huggingface", "megatron_args"}
    | {"huggingface_tokenizer"},
    {"board", "rng", "indexed", "corpus", "dtypes", "tensor_file", "interop", "unpickle"},
    {"mesh", "archive", "huggingface_stored", "megatron_lm", "torch_file", "torch_writer"},
    {"comm", "convert", "huggingface_files", "megatron_stored", "megatron_cut"},
    {"layers", "tokenizer", "report", "megatron_fit", "megatron_legacy", "megatron_dist"},
    {"megatron_files", "megatron_write"},
    {"sources"},
    {"model", "grads", "weights", "vocabulary", "encode", "trackers", "contents"},
    {"pipeline", "optimizer", "data", "metrics", "inference", "replicas"},
    {"checkpoint", "nonfinite", "failures"},
    {"policy", "saver"},
    {"trainer"},
    {"selftest"},
]
ROW_OF = {name: row for row, names in enumerate(ROWS) for name in names}
PURE = ROWS[0]
MODULES = sorted((ROOT / "megatron3d").glob("*.py"))
KERNELS = sorted((ROOT / "kernels").glob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Dotted names of everything a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = "megatron3d.kernels." * bool(node.level)  # only kernels/ imports relatively
            yield from (f"{package}{node.module}.{alias.name}" for alias in node.names)


def own_modules(path: Path) -> Iterator[str]:
    """Modules of megatron3d that a file imports; kernels are below every row."""
    for name in imports(path):
        head, _, rest = name.partition(".")
        module = rest.partition(".")[0]
        if head == "megatron3d" and module not in ("kernels", "__version__"):
            yield module


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_imports_go_down_the_rows(path: Path) -> None:
    row = ROW_OF[path.stem]  # a new file takes its place in ROWS first
    for module in own_modules(path):
        assert ROW_OF[module] < row or row == 0 == ROW_OF[module], f"{path.name} imports {module}"


def test_every_row_entry_is_a_file() -> None:
    assert {path.stem for path in MODULES} == set(ROW_OF)


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_kernels_stand_alone(path: Path) -> None:
    allowed = {"__future__", "torch", "triton", "math", "typing", "collections", "megatron3d"}
    assert {name.partition(".")[0] for name in imports(path)} <= allowed
    assert all(name.startswith("megatron3d.kernels") for name in imports(path) if name.startswith("megatron3d"))


def test_pure_modules_need_neither_torch_nor_numpy() -> None:
    code = "import sys\n" + "\n".join(f"import megatron3d.{name}" for name in sorted(PURE - {"__init__"}))
    code += "\nassert not {'torch', 'numpy', 'rich.progress'} & sys.modules.keys(), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("path", [*MODULES, *KERNELS], ids=lambda path: path.stem)
def test_names_in_their_place(path: Path) -> None:
    tree = ast.parse(path.read_text())
    if path.stem not in ("mesh", "comm"):
        assert not any(name.startswith("torch.distributed") for name in imports(path))
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    if path.stem != "launch":
        assert not {"environ", "getenv", "putenv"} & names, "only launch.py reads the environment"
    assert "cuda" not in names or path.stem in ("mesh", "metrics"), "the device comes from the mesh"
    assert not any(isinstance(node, ast.Global) for node in ast.walk(tree))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_no_mutable_module_state(path: Path) -> None:
    """Module-level names bound to empty or growing containers are state; tables of constants are not empty."""
    for node in ast.parse(path.read_text()).body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        empty = isinstance(value, ast.List | ast.Dict | ast.Set) and not list(ast.iter_child_nodes(value))[:1]
        assert not empty, f"{path.name}: {ast.unparse(node)}"


def test_layers_get_plain_values() -> None:
    """Layers receive an Axis, never the mesh or the config."""
    names = {name for name in imports(ROOT / "megatron3d" / "layers.py") if name.startswith("megatron3d")}
    assert "megatron3d.mesh.Mesh" not in names and not any("config" in name for name in names)


def test_every_collective_names_its_group() -> None:
    """No collective falls back to a default group."""
    tree = ast.parse((ROOT / "megatron3d" / "comm.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_collective(node.func)]
    assert len(calls) >= 5
    for call in calls:
        assert any(keyword.arg == "group" for keyword in call.keywords), ast.unparse(call)


def _is_collective(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id in ("_all_gather_single", "_reduce_scatter_single")
    return isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "dist"
