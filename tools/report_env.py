"""What a bug report needs to know about an installation, without names of hosts, users or folders. See --help."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron3d.cli import parse_tool
from megatron3d.config import ConfigError, ParallelConfig
from megatron3d.launch import Launch, launch_from_environment, user_errors

REQUIRED = ("torch", "numpy", "sentencepiece", "safetensors", "tyro", "rich")
OPTIONAL = {
    "triton": ("fused kernels on GPUs", "pip install -e '.[gpu]'"),
    "wandb": ("metrics to Weights & Biases", "pip install -e '.[wandb]'"),
    "tensorboard": ("metrics to TensorBoard", "pip install -e '.[tensorboard]'"),
    "transformers": ("models from and to Hugging Face", "pip install -e '.[hf]'"),
}


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the tool."""

    tp: int = 1
    """Tensor-parallel size of the mesh to measure, under torchrun; dp follows."""
    pp: int = 1
    """Pipeline-parallel size of the mesh to measure, under torchrun."""
    json: bool = False
    """Print one JSON object."""


def main(argv: Sequence[str]) -> None:
    """Asks, measures under torchrun, prints from one rank."""
    launch = launch_from_environment()
    text = "Versions, devices, back-ends, optional packages; started by torchrun also the speed of each mesh axis."
    flags = parse_tool(Flags, argv, description=text)
    size = flags.tp * flags.pp
    if min(flags.tp, flags.pp) < 1 or launch.world_size % size:
        raise ConfigError(
            f"--tp {flags.tp} x --pp {flags.pp} does not divide the {launch.world_size} processes of this job. Start "
            f"e.g. torchrun --nproc-per-node {max(size, 2)} tools/report_env.py --tp {flags.tp} --pp {flags.pp}"
        )
    report = {"versions": versions(), "system": system(), **torch_report(flags, launch)}
    report["optional"] = {name: optional(name, report["devices"]) for name in OPTIONAL}
    if launch.rank == 0:
        print(json.dumps(report, indent=1) if flags.json else as_text(report))


def versions() -> dict[str, str]:
    """Of Python, this project and all packages that it may use."""
    found = {"python": platform.python_version()}
    for name in ("megatron3d", *REQUIRED, *OPTIONAL):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def system() -> dict[str, Any]:
    """Operating system, processor, usable cores, memory."""
    release = platform.freedesktop_os_release() if Path("/etc/os-release").exists() else {}
    name = release.get("PRETTY_NAME", platform.system())
    return {
        "os": ", ".join([name, f"kernel {platform.release()}", " ".join(platform.libc_ver())]),
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }


def processor() -> str:
    """Name of the CPU."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    return match[1] if match else platform.machine()


def optional(name: str, devices: list[str]) -> str:
    """Whether an optional package can be used here, and what hinders it."""
    purpose, install = OPTIONAL[name]
    if importlib.util.find_spec(name) is None:
        return f"{purpose}: no, not installed ({install})"
    try:
        importlib.import_module(name)
    except Exception as error:  # whatever a broken package raises belongs into the report
        return f"{purpose}: no, its import fails: {type(error).__name__}: {without_paths(str(error))}"
    if name == "triton" and not devices:
        return f"{purpose}: no, there is no GPU (the reference kernels run instead)"
    return f"{purpose}: yes"


def torch_report(flags: Flags, launch: Launch) -> dict[str, Any]:
    """Devices, back-ends and axes; a torch that cannot be imported is a finding, too."""
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:
        broken = f"torch cannot be imported: {type(error).__name__}: {without_paths(str(error))}"
        return {"torch": broken, "devices": [], "backends": {}, "axes": []}
    from megatron3d.mesh import Mesh, pick_device
    from megatron3d.report import devices, measure_axes

    cuda, hip = torch.version.cuda, torch.version.hip
    build = f"CUDA {cuda}" if cuda else f"HIP {hip}" if hip else "CPUs only"
    found = devices()
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    dp = launch.world_size // (flags.tp * flags.pp)
    mesh = Mesh.create(ParallelConfig(tp=flags.tp, pp=flags.pp, dp=dp), launch, pick_device("auto", launch))
    axes = [
        {"axis": speed.axis, "size": speed.size, "operation": speed.operation, "message_bytes": speed.message_bytes}
        | {"latency_us": round(speed.latency_seconds * 1e6, 1)}
        | {"gigabytes_per_second": round(speed.bytes_per_second / 1e9, 3)}
        for speed in measure_axes(mesh)
    ]
    mesh.close()
    return {
        "torch": f"built for {build}",
        "devices": found,
        "backends": {name: "available" if there else "not in this build of torch" for name, there in backends.items()},
        "axes": axes,
    }


def without_paths(text: str) -> str:
    """The first line of a message, with folders cut from file names."""
    return re.sub(r"(?:[A-Za-z]:)?[/\\][^\s:'\"]*[/\\]", ".../", text.partition("\n")[0])


def as_text(report: dict[str, Any]) -> str:
    """The report for a reader."""
    system, devices = report["system"], report["devices"]
    lines = [f"{name:<14} {version}" for name, version in report["versions"].items()]
    lines += [
        f"{'system':<14} {system['os']}",
        f"{'processor':<14} {system['cpu']}, {system['cores']} cores, {system['memory_gib']} GiB",
        f"{'torch build':<14} {report['torch']}",
        f"{'devices':<14} {f'{len(devices)} x {devices[0]}' if devices else 'no accelerator'}",
    ]
    lines += [f"{name:<14} {state}" for name, state in report["backends"].items()]
    lines += [f"{name:<14} {state}" for name, state in report["optional"].items()]
    lines += [
        f"{'axis ' + axis['axis']:<14} {axis['size']} ranks, {axis['operation']}: latency {axis['latency_us']:,.0f} "
        f"us, {axis['gigabytes_per_second']:.2f} GB/s at {axis['message_bytes'] >> 20} MiB"
        for axis in report["axes"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    with user_errors():
        main(sys.argv[1:])
