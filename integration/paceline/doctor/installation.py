"""Checks of one process's installation and machine. Each looks at one thing, and changes nothing."""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import json
import os
import platform
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from ..measure.container_memory import CGROUP, memory_limits
from ..messages import named
from ..supervise.build_locks import YOUNG_S, extension_folders, locks
from .finding import NOTE, OK, PROBLEM, Finding
from .meeting import Place

OPTIONAL = ("peft", "trl")
"""Packages that are at work where they are installed."""

_CHANGES_A_JOB = re.compile(
    r"(CUDA|DEEPSPEED|GLOO|NCCL|PACELINE|PYTORCH|TORCH|UCX)_.*|DS_ACCELERATOR|(HF_DATASETS|HF_HUB|TRANSFORMERS)_OFFLINE"
    r"|HF_HOME|LD_LIBRARY_PATH|LD_PRELOAD|(LOCAL_)?RANK|MASTER_ADDR|MASTER_PORT|OMP_NUM_THREADS|PYTHONHASHSEED|PYTHONPATH"
    r"|WORLD_SIZE"
)
"""Names of environment variables that change how a job runs."""

GIB = 2**30
PLACES = {
    "--output_dir": (GIB, "choose another --output_dir"),
    "temporary files": (GIB // 4, "choose another place (TMPDIR)"),
    "cache of the hub": (GIB // 4, "choose another place (HF_HOME)"),
    "/dev/shm": (GIB // 4, "give the container more: docker run --shm-size=8g (or --ipc=host)"),
}
"""Where a job writes: bytes below which it cannot be expected to end well, and what to do then."""

LITTLE_ROOM = 10 * GIB
_SECRETS = ("TOKEN", "SECRET", "PASSWORD", "KEY")


def look(output_dir: str = "", deepspeed: str = "", place: Place | None = None) -> list[Finding]:
    """The findings about this process. A check that fails is one, so that a broken installation is looked at too.

    Args:
        output_dir: that a run is to write to; empty: none.
        deepspeed: path of a DeepSpeed JSON; empty: none.
        place: in a job. Only the first rank of a host looks at what is its host's.
    """
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
    has_others = place is not None and place.size > place.ranks_on_host
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "packages": lambda: check_packages(asked := required(), installed(asked)),
        "imports": imports,
        "devices": lambda: devices(place),
        "build locks": lambda: check_locks(locks(extension_folders())),
        "disk": lambda: disk(output_dir),
        "environment": lambda: [
            Finding(OK, "environment", ", ".join(map("=".join, environment(os.environ).items())) or "nothing is set")
        ],
    }
    if deepspeed:
        checks["deepspeed JSON"] = lambda: config(deepspeed, None if place is None else place.size)
    if place is None or place.local_rank == 0:
        checks |= {
            "patches": patches,
            "machine": machine,
            "network": lambda: check_network(*network(), chosen, has_others=has_others),
        }
    found: list[Finding] = []
    for name, check in checks.items():
        try:
            found += check()
        except Exception as error:
            broken = [one.check for one in found if one.text.startswith(_NO_IMPORT)]
            if broken:
                found.append(Finding(NOTE, name, f"not looked at, without {' and '.join(broken)}: {named(error)}"))
            else:
                remedy = f"find out why the look at {name} fails, and repair what it names: {named(error)}"
                found.append(Finding(PROBLEM, name, f"could not be looked at: {named(error)}", remedy))
    return found


def facts() -> dict[str, Any]:
    """Values of this process that the ranks of a job compare."""
    versions: dict[str, str | None] = {}
    with contextlib.suppress(Exception):  # what is missing is among the findings
        versions = installed(required())
        import torch
        from deepspeed.accelerator import get_accelerator

        versions["accelerator"] = get_accelerator().device_name()
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else ""
    return {
        "host": socket.gethostname(),
        "versions": versions,
        "environment": environment(os.environ),
        "ahead_s": time.time() - time.perf_counter(),
    }


def required() -> dict[str, str]:
    """Versions that paceline's metadata asks for, of Python too."""
    from packaging.requirements import Requirement

    try:
        requirements = map(Requirement, metadata.requires("paceline") or ())
    except metadata.PackageNotFoundError:
        return {}
    needed = [one for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
    python = metadata.metadata("paceline")["Requires-Python"] or ""
    return {"python": python} | {one.name: str(one.specifier) for one in needed}


def installed(names: Iterable[str]) -> dict[str, str | None]:
    """Versions of Python, paceline and packages; None: not installed."""
    found: dict[str, str | None] = dict.fromkeys(("paceline", *names, *OPTIONAL))
    for name in found:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found | {"python": platform.python_version()}


def check_packages(asked: Mapping[str, str], found: Mapping[str, str | None]) -> Iterator[Finding]:
    from packaging.specifiers import SpecifierSet

    for name, version in found.items():
        wanted = f", asked for {asked[name]}" if asked.get(name) else ""
        install = f'pip install "{name}{asked.get(name)}"' if name != "python" else "install paceline for such a Python"
        if name == "paceline" and version is None:
            remedy = "install paceline in this Python: pip install -e . in its repository"
            yield Finding(PROBLEM, name, "is not installed, only imported: versions cannot be compared", remedy)
        elif version is None:
            yield Finding(PROBLEM if name in asked else OK, name, f"is not installed{wanted}", install)
        elif not SpecifierSet(asked.get(name, "")).contains(version, prereleases=True):
            yield Finding(PROBLEM, name, f"{version}{wanted}", install)
        else:
            yield Finding(OK, name, f"{version}{wanted}")


_NO_IMPORT = "cannot be imported"


def imports(names: Iterable[str] = ("torch", "deepspeed")) -> Iterator[Finding]:
    """Try the packages that nothing goes without."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # what a broken installation raises is not only ImportError
            remedy = f'make `python -c "import {name}"` work: {named(error)}'
            yield Finding(PROBLEM, name, f"{_NO_IMPORT}: {named(error)}", remedy)


def patches() -> Iterator[Finding]:
    """Compare the declared patches with the sources that are installed."""
    from deepspeed.accelerator import get_accelerator

    from ..patches.registry import all_patches

    declared = [one for one in all_patches() if one.accelerator in ("", get_accelerator().device_name())]
    refused = [(one, problem) for one in declared if (problem := one.problem())]
    for patch, problem in refused:
        if patch.optional:
            yield Finding(NOTE, "patch", f"left out: {problem}")
        else:
            remedy = f"{patch.target}: install the versions that paceline asks for; `paceline patches` says more"
            yield Finding(PROBLEM, "patch", f"does not fit: {problem}", remedy)
    if not refused:
        yield Finding(OK, "patches", f"all {len(declared)} fit what is installed")


def devices(place: Place | None) -> Iterator[Finding]:
    """The accelerator that DeepSpeed has found and the memory of its GPUs; of a job's rank, of its own GPU."""
    import torch
    from deepspeed.accelerator import get_accelerator

    name = str(get_accelerator().device_name())
    count = torch.cuda.device_count() if name == "cuda" else 0
    yield check_devices(name, count, torch.version.cuda, has_driver=os.path.exists("/dev/nvidiactl"))
    for index in range(count) if place is None else [place.local_rank % count] if count else ():
        free, total = torch.cuda.mem_get_info(index)
        text = f"{torch.cuda.get_device_name(index)}, {_gib(free)} of {_gib(total)} free"
        is_taken = free < total / 2
        advice = "something else uses it: `nvidia-smi` shows what" if is_taken else ""
        yield Finding(NOTE if is_taken else OK, f"cuda:{index}", text, advice)
    yield from check_sharing(count, place, os.environ)


def check_devices(name: str, count: int, cuda: str | None, *, has_driver: bool) -> Finding:
    if name == "cpu" and has_driver:
        why = "DeepSpeed uses the CPU" if cuda else "this torch is built without CUDA"
        advice = "unset DS_ACCELERATOR to use its GPUs" if cuda else "install a torch that is built for CUDA"
        return Finding(NOTE, "devices", f"cpu, although this machine has an NVIDIA driver: {why}", advice)
    if name == "cuda" and not count:
        remedy = "look at `nvidia-smi`, CUDA_VISIBLE_DEVICES and the container's access to GPUs; DS_ACCELERATOR=cpu "
        return Finding(PROBLEM, "devices", "cuda, and torch sees no GPU", f"{remedy}does without them")
    return Finding(OK, "devices", f"{name}, {count} GPUs, CUDA {cuda}" if count else name)


def check_sharing(count: int, place: Place | None, variables: Mapping[str, str]) -> Iterator[Finding]:
    """Ranks that share GPUs, and kernels that share a queue.

    Args:
        count: GPUs of this host; 0 on another accelerator.
    """
    if place is not None and 0 < count < place.ranks_on_host:
        text = f"{place.ranks_on_host} ranks share {count}: gloo in NCCL's place, which is slow"
        yield Finding(NOTE, "devices", text, "run one rank per GPU for speed")
    elif count and variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        text = (
            "1: all streams share one queue, in which kernels of different NCCL communicators (between stages, between "
            "replicas) wait for each other, without end if two ranks have them in different orders"
        )
        remedy = "unset CUDA_DEVICE_MAX_CONNECTIONS, or set it to 8, CUDA's own value"
        yield Finding(PROBLEM if place is not None else NOTE, "CUDA_DEVICE_MAX_CONNECTIONS", text, remedy)


def machine(cgroup: str | os.PathLike[str] = CGROUP) -> Iterator[Finding]:
    """Cores and memory that this process may have."""
    import psutil

    memory = psutil.virtual_memory()
    cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} logical cores"
    room = f"{_gib(memory.available)} of {_gib(memory.total)} memory free"
    yield Finding(OK, "machine", f"{socket.gethostname()}, {platform.platform()}, {cores}, {room}")
    for limit in memory_limits(cgroup):
        if limit.limit_bytes < memory.total:
            text = f"may use {_gib(limit.limit_bytes)} of memory: what takes more is killed without a word"
            yield Finding(NOTE, "container", text)


def check_locks(found: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    for lock in found:
        path, age = lock["path"], f"{lock['age_s'] / 60:.0f} minutes"
        if lock["holder"] is not None:
            yield Finding(OK, "build", f"process {lock['holder']} builds an extension since {age}: {path}")
        elif lock["age_s"] < YOUNG_S:
            text = f"{path} is new, and no process that can be seen here holds it: another host may build there"
            yield Finding(NOTE, "build lock", text, "look again in a minute")
        else:
            text = f"{path} was left {age} ago by a build that was killed: DeepSpeed waits for it without end"
            remedy = f"rm {path} (unless another host that shares this folder is building there now)"
            yield Finding(PROBLEM, "build lock", text, remedy)
    if not found:
        yield Finding(OK, "build locks", "none was left in torch's folder of extensions")


def disk(output_dir: str) -> Iterator[Finding]:
    """Room where a job writes, and whether it may."""
    from huggingface_hub.constants import HF_HUB_CACHE

    paths = (output_dir, tempfile.gettempdir(), HF_HUB_CACHE, "/dev/shm" if os.path.isdir("/dev/shm") else "")
    for (check, (least, other)), path in zip(PLACES.items(), paths, strict=True):
        if not path:
            continue
        there = next(one for one in (Path(path).absolute(), *Path(path).absolute().parents) if one.exists())
        usage = shutil.disk_usage(there)
        text = f"{path}: {_gib(usage.free)} of {_gib(usage.total)} free"
        if not there.is_dir():
            yield Finding(PROBLEM, check, f"{path} is a file, or under one", f"give a folder for {check}, not {path}")
        elif not os.access(there, os.W_OK | os.X_OK):
            remedy = f"make {path} writable for this user, or {other}"
            yield Finding(PROBLEM, check, f"{path} cannot be written to", remedy)
        elif usage.free < least:  # where little of /dev/shm is free, NCCL fails, and on CPUs loaders' workers may
            level = NOTE if check == "/dev/shm" and not os.path.exists("/dev/nvidiactl") else PROBLEM
            yield Finding(level, check, text, f"free some of {path}, or {other}")
        elif usage.free < LITTLE_ROOM and check == "--output_dir":
            yield Finding(NOTE, check, text, "a checkpoint has 12 to 18 bytes for each parameter")
        else:
            yield Finding(OK, check, text)


def config(path: str, world_size: int | None = None) -> Iterator[Finding]:
    """A DeepSpeed JSON as ``paceline check-config`` reads it: its warnings, what is filled in later, or the error.

    Args:
        world_size: ranks of the job; that a JSON with a pipeline does not go with so many is a note, as a run may have
            others. None: alone.
    """
    from ..config import check_ds_config, open_autos, read_ds_config
    from ..config.for_ranks import resolve_for_ranks

    check, notes, ranks = "deepspeed JSON", list[str](), ""
    try:
        found = read_ds_config(path)
        section = check_ds_config(found, notes.append)
    except ValueError as error:
        why = " ".join(str(error).split())
        yield Finding(PROBLEM, check, why if path in why else f"{path}: {why}", f"correct {path}: {why}")
        return
    if world_size is not None and "pipeline" in section.model_fields_set:
        try:
            plan = resolve_for_ranks(section, found, world_size)
            ranks = f"; on {world_size} ranks: {plan.stages} stages, data-parallel size {plan.data_parallel}"
        except ValueError as error:
            notes.append(f"does not run on the {world_size} ranks of this job: {error}")
    for line in notes:
        yield Finding(NOTE, check, line)
    shown = json.dumps(section.model_dump(mode="json", exclude_none=True))
    filled = f"; from the command line: {', '.join(autos)}" if (autos := open_autos(found)) else ""
    yield Finding(OK, check, f'{path}: "paceline": {shown}{filled}{ranks}')


def network() -> tuple[str, list[str], dict[str, list[str]]]:
    """This host's name, the addresses that it leads to, and those of the interfaces that are up."""
    import psutil

    families, host = (socket.AF_INET, socket.AF_INET6), socket.gethostname()
    interfaces = {
        name: [one.address.partition("%")[0] for one in psutil.net_if_addrs().get(name, ()) if one.family in families]
        for name, stats in psutil.net_if_stats().items()
        if stats.isup
    }
    try:
        leads_to = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except (OSError, UnicodeError):
        leads_to = []
    return host, leads_to, interfaces


def check_network(
    host: str, leads_to: Sequence[str], interfaces: Mapping[str, Sequence[str]], chosen: str, *, has_others: bool
) -> Iterator[Finding]:
    """Check where gloo listens.

    Args:
        leads_to: addresses of ``host``: gloo takes them unless an interface is chosen.
        interfaces: that are up, with their addresses.
        chosen: GLOO_SOCKET_IFNAME; empty: not set.
        has_others: whether the job has other hosts.
    """
    outward = [name for name, those in interfaces.items() if not all(map(_is_loopback, those))]
    yield Finding(OK, "interfaces", ", ".join(f"{name} {' '.join(interfaces[name])}" for name in outward) or "loopback")
    for name in chosen.split(",") if chosen else ():
        if name not in interfaces or (has_others and name not in outward):
            why = f"other hosts cannot reach {name}" if name in interfaces else f"no interface {name} is up"
            remedy = f"set GLOO_SOCKET_IFNAME to one of {', '.join(outward or interfaces)}, or unset it"
            yield Finding(PROBLEM, "GLOO_SOCKET_IFNAME", f"{chosen}: {why}", remedy)
    text = f"{host} leads to {', '.join(leads_to) or 'no address'}"
    if chosen or any(address in interfaces[name] for name in outward for address in leads_to):
        yield Finding(OK, "host name", f"{text}{f'; gloo uses {chosen}' if chosen else ''}")
        return
    remedy = f"write the address of {host} into /etc/hosts, or export GLOO_SOCKET_IFNAME={[*outward, 'eth0'][0]}"
    if has_others:
        yield Finding(PROBLEM, "host name", f"{text}, where others cannot reach it: gloo tells them to", remedy)
    else:  # gloo takes the loopback
        yield Finding(NOTE, "host name", f"{text}, where other hosts cannot reach it", f"for several hosts: {remedy}")


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Select the ``variables`` that change what a job does; none that may be a secret."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if _CHANGES_A_JOB.fullmatch(name) and not any(word in name for word in _SECRETS)
    }


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
