"""Facts about this process's installation and machine: plain values, for :mod:`.installation` to judge.

Nothing is measured, nothing is changed and no device is used. A fact that cannot be had is in ``failed`` with its
error, so that gathering them from a broken installation ends like any other.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from ..messages import named
from ..supervise.build_locks import extension_folders, locks

OPTIONAL = ("torchft", "peft", "trl")
"""Packages that are at work where they are installed, whether or not they are asked for."""

IMPORTED = ("torch", "deepspeed")
"""Packages that nothing goes without: their import is tried."""

VARIABLES = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "queues of kernels of a GPU; with 1, they run in the order of their calls",
    "CUDA_LAUNCH_BLOCKING": "with 1, every kernel is waited for: for debugging, slow",
    "CUDA_VISIBLE_DEVICES": "the GPUs that this process sees",
    "DS_ACCELERATOR": "the accelerator that DeepSpeed uses, instead of the one that it would find",
    "GLOO_SOCKET_IFNAME": "the network interface of gloo: small messages everywhere, and all of them on CPUs",
    "HF_DATASETS_OFFLINE": "with 1, datasets come from the cache only",
    "HF_HOME": "where models and datasets from the hub are kept",
    "HF_HUB_OFFLINE": "with 1, nothing is fetched from the hub, and what is not in the cache is an error",
    "LD_LIBRARY_PATH": "where shared libraries are looked for first: may hide those that torch brings along",
    "LD_PRELOAD": "libraries that are loaded into every process",
    "LOCAL_RANK": "this process's number on its host; a launcher sets it",
    "MASTER_ADDR": "where rank 0 is; a launcher sets it",
    "MASTER_PORT": "the port at which rank 0 listens; a launcher sets it",
    "OMP_NUM_THREADS": "threads that a process computes with on the CPU",
    "PYTHONHASHSEED": "the order of sets of strings",
    "PYTHONPATH": "where packages are looked for first: may hide those that are installed",
    "PYTORCH_ALLOC_CONF": "how torch keeps a device's memory",
    "PYTORCH_CUDA_ALLOC_CONF": "how torch keeps a GPU's memory",
    "RANK": "this process's number in its job; a launcher sets it",
    "TOKENIZERS_PARALLELISM": "whether tokenizers start threads of their own",
    "TORCH_EXTENSIONS_DIR": "where torch builds C++ extensions",
    "TRANSFORMERS_OFFLINE": "with 1, nothing is fetched from the hub",
    "WORLD_SIZE": "processes of the job; a launcher sets it",
}
"""Variables of the environment that change what a job does, and what they do."""

PREFIXES = {
    "DEEPSPEED_": "a setting of DeepSpeed",
    "GLOO_": "a setting of gloo",
    "NCCL_": "a setting of NCCL",
    "PACELINE_": "a setting of paceline",
    "TORCH_NCCL_": "a setting of torch's use of NCCL",
    "UCX_": "a setting of UCX",
}

_SECRETS = ("TOKEN", "SECRET", "PASSWORD", "KEY")
_TOOL_S = 10.0
_UNLIMITED = 1 << 60
"""Version 1 of cgroups writes a number above this for no limit."""


def gather(output_dir: str = "", deepspeed: str = "", *, patches: bool = True) -> dict[str, Any]:
    """All facts of this process, as JSON has them.

    Args:
        output_dir: that a run is to write to; empty: none.
        deepspeed: path of a DeepSpeed JSON; empty: none.
        patches: whether to compare the declared patches with the sources that are installed, which imports much.
    """
    gatherers: dict[str, Callable[[], Any]] = {
        "python": python,
        "packages": packages,
        "imports": lambda: {name: import_error(name) for name in IMPORTED},
        **({"patches": declared_patches} if patches else {}),
        "devices": devices,
        "machine": machine,
        "locks": lambda: locks(extension_folders()),
        "disk": lambda: disk(output_dir),
        "shared_memory": shared_memory,
        "limits": limits,
        "network": network,
        "environment": lambda: environment(os.environ),
        "time": lambda: {"ahead_s": time.time() - time.perf_counter()},
        **({"config": lambda: config(deepspeed)} if deepspeed else {}),
    }
    facts: dict[str, Any] = {"failed": {}}
    for name, find in gatherers.items():
        try:
            facts[name] = find()
        except Exception as error:
            facts["failed"][name] = named(error)
    return facts


def python() -> dict[str, Any]:
    """The interpreter, and the versions of Python that paceline asks for."""
    asked = ""
    with contextlib.suppress(metadata.PackageNotFoundError):
        asked = metadata.metadata("paceline")["Requires-Python"] or ""
    return {"version": platform.python_version(), "asked": asked, "executable": sys.executable}


def packages() -> dict[str, Any]:
    """Versions of what paceline asks for, as its own metadata says, and of :data:`OPTIONAL`; None: not installed."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(text) for text in metadata.requires("paceline") or ()]
        own = metadata.version("paceline")
    except metadata.PackageNotFoundError:
        requirements, own = [], None
    wanted = [one for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
    names = dict.fromkeys([*(one.name for one in wanted), *OPTIONAL])
    return {
        "paceline": own,
        "asked": {one.name: str(one.specifier) for one in wanted},
        "found": {name: _version(name) for name in names},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def import_error(name: str) -> str:
    """The reason why a package cannot be imported; empty if it can."""
    import importlib

    try:
        importlib.import_module(name)
    except Exception as error:  # what a broken installation raises is not only ImportError
        return named(error)
    return ""


def declared_patches() -> list[dict[str, Any]]:
    """Target of each patch, and the reason why it does not fit what is installed (empty: it fits)."""
    from deepspeed.accelerator import get_accelerator

    from ..patches.registry import all_patches

    here = get_accelerator().device_name()
    return [
        {"target": patch.target, "problem": patch.problem(), "optional": patch.optional}
        for patch in all_patches()
        if patch.accelerator in ("", here)
    ]


def devices() -> dict[str, Any]:
    """The accelerator that DeepSpeed has found, and its devices. Memory in bytes."""
    import torch
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    name = str(accelerator.device_name())
    found: list[dict[str, Any]] = []
    nccl = driver = ""
    if name == "cuda" and torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            found.append(
                {
                    "name": properties.name,
                    "total_bytes": properties.total_memory,
                    "capability": f"{properties.major}.{properties.minor}",
                    "uuid": str(getattr(properties, "uuid", "")),
                }
            )
        with contextlib.suppress(Exception):  # absent in builds without it
            nccl = ".".join(map(str, torch.cuda.nccl.version()))
        for device in found:
            device.update(_nvidia_smi().get(device["uuid"], {}))
            driver = device.get("driver", "")
    return {
        "accelerator": name,
        "backend": str(accelerator.communication_backend_name() or ""),
        "devices": found,
        "built_for_cuda": torch.version.cuda or "",
        "nccl": nccl,
        "driver": driver,
        "has_nvidia": os.path.exists("/dev/nvidiactl"),
    }


def _nvidia_smi() -> dict[str, dict[str, Any]]:
    """Facts by UUID that torch does not have, or only for a process that uses the device."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    command = [tool, "--query-gpu=uuid,memory.free,compute_mode,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found: dict[str, dict[str, Any]] = {}
    for line in done.stdout.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 4 and parts[1].isdecimal():
            known = {"free_bytes": int(parts[1]) << 20, "compute_mode": parts[2], "driver": parts[3]}
            found[parts[0].removeprefix("GPU-")] = known
    return found


def machine() -> dict[str, Any]:
    """Cores and memory, of the machine and of what this process may have of them."""
    import psutil

    memory = psutil.virtual_memory()
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": psutil.cpu_count(logical=False) or 0,
        "logical_cores": os.cpu_count() or 0,
        "usable_cores": len(affinity(0)) if affinity else os.cpu_count() or 0,
        "memory_bytes": memory.total,
        "available_bytes": memory.available,
        "cgroup": cgroup_limits(),
    }


def cgroup_limits(root: str | os.PathLike[str] = "/") -> dict[str, float | None]:
    """Cores and bytes that the container of this process may have; None: no limit.

    Args:
        root: under which ``proc`` and ``sys`` are.
    """
    root = Path(root)
    cores: list[float] = []
    sizes: list[float] = []
    groups = _read(root / "proc/self/cgroup").splitlines()
    for line in groups:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for folder in _upwards(root / "sys/fs/cgroup", controllers, path):
            quota, _, period = _read(folder / "cpu.max").partition(" ")
            if not quota:
                quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
            if quota.isdecimal() and period.isdecimal() and int(period):
                cores.append(int(quota) / int(period))
            for name in ("memory.max", "memory.limit_in_bytes"):
                size = _read(folder / name)
                if size.isdecimal() and int(size) < _UNLIMITED:
                    sizes.append(int(size))
    return {"cores": min(cores, default=None), "memory_bytes": min(sizes, default=None)}


def _upwards(base: Path, controllers: str, path: str) -> Iterator[Path]:
    """The folders of a control group and those around it; a container may see its own as the outermost one."""
    for name in controllers.split(",") if controllers else ("",):
        folder = base / name
        inner = Path(path.lstrip("/"))
        for part in (inner, *inner.parents):
            yield folder / part


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def disk(output_dir: str = "") -> list[dict[str, Any]]:
    """Room in bytes where a job writes, and whether it may."""
    places = {"temporary files": Path(tempfile.gettempdir()), "cache of the hub": _hub_cache()}
    if output_dir:
        places = {"--output_dir": Path(output_dir), **places}
    found = []
    for purpose, path in places.items():
        there = _existing(path)
        usage = shutil.disk_usage(there)
        found.append(
            {
                "purpose": purpose,
                "path": str(path),
                "free_bytes": usage.free,
                "total_bytes": usage.total,
                "is_folder": there.is_dir(),
                "writable": os.access(there, os.W_OK | os.X_OK),
            }
        )
    return found


def _hub_cache() -> Path:
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    return Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))


def _existing(path: Path) -> Path:
    """``path``, or the nearest folder above it that is there."""
    path = path.absolute()
    return next(one for one in (path, *path.parents) if one.exists())


def shared_memory() -> dict[str, Any] | None:
    """Size and room of ``/dev/shm`` in bytes; None where there is none."""
    if not os.path.isdir("/dev/shm"):
        return None
    usage = shutil.disk_usage("/dev/shm")
    return {"total_bytes": usage.total, "free_bytes": usage.free}


def limits() -> dict[str, Any]:
    """Limits of this process, as ``ulimit`` shows them; None: no limit."""
    import resource

    def of(number: int) -> list[int | None]:
        return [None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(number)]

    return {"open_files": of(resource.RLIMIT_NOFILE), "locked_bytes": of(resource.RLIMIT_MEMLOCK)}


def network() -> dict[str, Any]:
    """This host's name and MASTER_ADDR with their addresses, and the interfaces with theirs."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    stats = psutil.net_if_stats()
    interfaces = {
        name: {
            "addresses": [one.address.partition("%")[0] for one in addresses if one.family in families],
            "is_up": name in stats and stats[name].isup,
        }
        for name, addresses in psutil.net_if_addrs().items()
    }
    host = socket.gethostname()
    master = os.environ.get("MASTER_ADDR", "")
    return {
        "host": host,
        "addresses": addresses_of(host),
        "master": master,
        "master_addresses": addresses_of(master) if master else [],
        "interfaces": interfaces,
        "infiniband": sorted(os.listdir("/sys/class/infiniband")) if os.path.isdir("/sys/class/infiniband") else [],
    }


def addresses_of(name: str) -> list[str]:
    """Addresses of a host's name; empty: it has none."""
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except (OSError, UnicodeError):
        return []


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Select the ``variables`` that change what a job does; none that may be a secret."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if (name in VARIABLES or name.startswith(tuple(PREFIXES))) and not any(word in name for word in _SECRETS)
    }


def meaning(name: str) -> str:
    """Meaning of a variable of :func:`environment`."""
    return VARIABLES.get(name) or next(text for prefix, text in PREFIXES.items() if name.startswith(prefix))


def config(path: str) -> dict[str, Any]:
    """A DeepSpeed JSON as ``paceline check-config`` reads it: its warnings, what is filled in later, or the error."""
    from ..config import PacelineConfig, check_written, near_misses, open_autos, read_ds_config, without_effect

    try:
        found = read_ds_config(path)
        section = PacelineConfig.of(found)
        is_pipeline = "pipeline" in found.get("paceline", {})
        check_written(found, section, is_pipeline=is_pipeline)
    except ValueError as error:
        return {"path": path, "error": " ".join(str(error).split())}
    return {
        "path": path,
        "error": "",
        "near_misses": near_misses(found) + (without_effect(found) if is_pipeline else []),
        "autos": open_autos(found),
        "section": json.dumps(section.model_dump(mode="json", exclude_none=True)),
    }
