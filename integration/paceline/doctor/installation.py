"""Findings from the facts of one process. Pure: :mod:`.facts` gathers them."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..messages import named
from ..supervise.build_locks import YOUNG_S
from .facts import meaning
from .finding import NOTE, OK, PROBLEM, Finding

GIB = 2**30
LEAST_ROOM = {"--output_dir": GIB, "temporary files": GIB // 4, "cache of the hub": GIB // 4}
"""Bytes of a disk below which a run cannot be expected to end well."""

LITTLE_ROOM = 10 * GIB
LEAST_SHARED = GIB // 4
"""Bytes of /dev/shm; Docker's default is a quarter of that."""

LEAST_OPEN_FILES = 4096
_IMPORTING = ("patches", "devices", "locks")
"""Facts whose gathering imports torch or DeepSpeed."""


def judge(facts: Mapping[str, Any], *, num_hosts: int = 1, ranks_on_host: int = 1) -> list[Finding]:
    """The findings about one process.

    Args:
        facts: as :func:`.facts.gather` gives them, in whole or in part.
        num_hosts: of the job.
        ranks_on_host: processes of the job on this host.
    """
    accelerator = facts.get("devices", {}).get("accelerator", "cpu")
    variables = facts.get("environment", {})
    cores = facts.get("machine", {}).get("usable_cores", 0)
    has_infiniband = bool(facts.get("network", {}).get("infiniband"))
    judges: dict[str, Callable[[Any], Iterator[Finding]]] = {
        **_JUDGES,
        "devices": lambda devices: _devices(devices, ranks_on_host),
        "shared_memory": lambda shared: _shared_memory(shared, accelerator),
        "limits": lambda limits: _limits(limits, has_infiniband),
        "network": lambda network: _network(network, variables, num_hosts),
        "environment": lambda known: _environment(known, cores, ranks_on_host, facts.get("devices")),
    }
    found: list[Finding] = []
    failed = dict(facts.get("failed", {}))
    for name, judge_one in judges.items():
        if facts.get(name) is not None:
            try:
                found += judge_one(facts[name])
            except Exception as error:  # packaging, for example, may be what is missing
                failed[name] = named(error)
    broken = [name for name, why in facts.get("imports", {}).items() if why]
    for name, why in failed.items():
        check = name.replace("_", " ")
        if broken and name in _IMPORTING:
            found.append(Finding(NOTE, check, f"not looked at, since {' and '.join(broken)} cannot be imported"))
        else:
            remedy = f"find out why the look at {check} fails, and repair what it names: {why}"
            found.append(Finding(PROBLEM, check, f"could not be looked at: {why}", remedy))
    return found


def _python(python: Mapping[str, Any]) -> Iterator[Finding]:
    from packaging.specifiers import SpecifierSet

    asked = python["asked"]
    text = f"{python['version']} ({python['executable']})"
    if asked and not SpecifierSet(asked).contains(python["version"], prereleases=True):
        remedy = f"install paceline for a Python that is {asked}: this one is {python['version']}"
        yield Finding(PROBLEM, "python", f"{text}: paceline asks for {asked}", remedy)
    else:
        yield Finding(OK, "python", f"{text}{f', asked for {asked}' if asked else ''}")


def _packages(packages: Mapping[str, Any]) -> Iterator[Finding]:
    from packaging.specifiers import SpecifierSet

    if packages["paceline"] is None:
        remedy = "install paceline in this Python: pip install -e . in its repository"
        yield Finding(PROBLEM, "paceline", "is not installed, only imported: versions cannot be compared", remedy)
    else:
        yield Finding(OK, "paceline", packages["paceline"])
    for name, version in packages["found"].items():
        asked = packages["asked"].get(name)
        if asked is None:
            text = f"{version} (optional)" if version else "not installed (optional)"
            yield Finding(OK, name, text)
        elif version is None:
            yield Finding(PROBLEM, name, f"is not installed: paceline asks for {name}{asked}", _install(name, asked))
        elif not SpecifierSet(asked).contains(version, prereleases=True):
            yield Finding(PROBLEM, name, f"{version}: paceline asks for {asked}", _install(name, asked))
        else:
            yield Finding(OK, name, f"{version}{f', asked for {asked}' if asked else ''}")


def _install(name: str, asked: str) -> str:
    return f'pip install "{name}{asked}"'


def _imports(imports: Mapping[str, str]) -> Iterator[Finding]:
    for name, why in imports.items():
        if why:
            remedy = f'make `python -c "import {name}"` work: {why}'
            yield Finding(PROBLEM, name, f"cannot be imported: {why}", remedy)


def _patches(patches: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    refused = [patch for patch in patches if patch["problem"]]
    for patch in refused:
        if patch["optional"]:
            yield Finding(NOTE, "patch", f"left out: {patch['problem']}")
        else:
            remedy = f"{patch['target']}: install the versions that paceline asks for; `paceline patches` says more"
            yield Finding(PROBLEM, "patch", f"does not fit: {patch['problem']}", remedy)
    if not refused:
        yield Finding(OK, "patches", f"all {len(patches)} fit what is installed")


def _machine(machine: Mapping[str, Any]) -> Iterator[Finding]:
    limits = machine["cgroup"]
    cores = f"{machine['usable_cores']} of {machine['logical_cores']} logical cores"
    memory = f"{_gib(machine['available_bytes'])} of {_gib(machine['memory_bytes'])} memory free"
    yield Finding(OK, "machine", f"{machine['host']}, {machine['system']}, {cores}, {memory}")
    if limits["cores"] is not None and limits["cores"] < machine["usable_cores"]:
        yield Finding(
            NOTE,
            "container",
            f"may use {limits['cores']:g} cores, and sees {machine['usable_cores']}",
            f"set OMP_NUM_THREADS to at most {max(1, int(limits['cores']))} divided by the ranks on this host",
        )
    if limits["memory_bytes"] is not None and limits["memory_bytes"] < machine["memory_bytes"]:
        text = f"may use {_gib(limits['memory_bytes'])} of memory: what takes more is killed without a word"
        yield Finding(NOTE, "container", text)


def _locks(locks: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    for lock in locks:
        path, age = lock["path"], _age(lock["age_s"])
        if lock["holder"] is not None:
            yield Finding(OK, "build", f"process {lock['holder']} builds an extension since {age}: {path}")
        elif lock["age_s"] < YOUNG_S:
            text = f"{path} is {age} old, and no process that can be seen here holds it: another host may build there"
            yield Finding(NOTE, "build lock", text, "look again in a minute")
        else:
            yield Finding(
                PROBLEM,
                "build lock",
                f"{path} was left {age} ago by a build that was killed: DeepSpeed waits for it without end",
                f"rm {path} (unless another host that shares this folder is building there now)",
            )
    if not locks:
        yield Finding(OK, "build locks", "none was left in torch's folder of extensions")


def _disk(disk: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    for place in disk:
        check, path = place["purpose"], place["path"]
        text = f"{path}: {_gib(place['free_bytes'])} of {_gib(place['total_bytes'])} free"
        if not place["is_folder"]:
            yield Finding(PROBLEM, check, f"{path} is a file, or under one", f"give a folder for {check}, not {path}")
        elif not place["writable"]:
            remedy = f"make {path} writable for this user, or choose another place for {check} ({_CHOOSING[check]})"
            yield Finding(PROBLEM, check, f"{path} cannot be written to", remedy)
        elif place["free_bytes"] < LEAST_ROOM[check]:
            remedy = f"free some of the disk of {path}, or choose another place for {check} ({_CHOOSING[check]})"
            yield Finding(PROBLEM, check, text, remedy)
        elif place["free_bytes"] < LITTLE_ROOM and check != "temporary files":
            yield Finding(NOTE, check, text, "a checkpoint has 12 to 18 bytes for each parameter")
        else:
            yield Finding(OK, check, text)


_CHOOSING = {"--output_dir": "--output_dir", "temporary files": "TMPDIR", "cache of the hub": "HF_HOME"}


def _config(config: Mapping[str, Any]) -> Iterator[Finding]:
    check, path = "deepspeed JSON", config["path"]
    if config["error"]:
        text = config["error"] if path in config["error"] else f"{path}: {config['error']}"
        yield Finding(PROBLEM, check, text, f"correct {path}: {config['error']}")
        return
    for line in config["near_misses"]:
        yield Finding(NOTE, check, line)
    filled = f"; from the command line: {', '.join(config['autos'])}" if config["autos"] else ""
    yield Finding(OK, check, f'{path}: "paceline": {config["section"]}{filled}')


_JUDGES: dict[str, Callable[[Any], Iterator[Finding]]] = {
    "python": _python,
    "packages": _packages,
    "imports": _imports,
    "patches": _patches,
    "machine": _machine,
    "locks": _locks,
    "disk": _disk,
    "config": _config,
}


def _devices(devices: Mapping[str, Any], ranks_on_host: int) -> Iterator[Finding]:
    name, those = devices["accelerator"], devices["devices"]
    if name == "cpu" and devices["has_nvidia"]:
        cuda = devices["built_for_cuda"]
        reason = "DeepSpeed uses the CPU" if cuda else "this torch is built without CUDA"
        text = f"cpu, although this machine has an NVIDIA driver: {reason}"
        advice = "unset DS_ACCELERATOR to use its GPUs" if cuda else "install a torch that is built for CUDA"
        yield Finding(NOTE, "devices", text, advice)
    elif name == "cpu":
        yield Finding(OK, "devices", "cpu, no GPUs; ranks talk by gloo")
    elif name == "cuda" and not those:
        remedy = "look at `nvidia-smi`, CUDA_VISIBLE_DEVICES and the container's access to GPUs; DS_ACCELERATOR=cpu "
        yield Finding(PROBLEM, "devices", "cuda, and torch sees no GPU", remedy + "does without them")
    else:
        nccl = f"NCCL {devices['nccl']}, " if devices["nccl"] else ""
        built = f"CUDA {devices['built_for_cuda']}, driver {devices['driver'] or 'unknown'}"
        yield Finding(OK, "devices", f"{name}, {max(len(those), 1)} of them; {nccl}{built}")
    for index, device in enumerate(those):
        mode, free = device.get("compute_mode", "Default"), device.get("free_bytes")
        room = f", {_gib(free)} free" if free is not None else ""
        text = f"{device['name']}, {_gib(device['total_bytes'])}{room}, capability {device['capability']}"
        check = f"{name}:{index}"
        if mode == "Prohibited":
            remedy = f"nvidia-smi -i {index} -c DEFAULT (as root): its compute mode is {mode}"
            yield Finding(PROBLEM, check, f"{text}: its compute mode is {mode}, no process may use it", remedy)
        elif mode.startswith("Exclusive") and ranks_on_host > len(those):
            remedy = f"run at most {len(those)} ranks on this host, or nvidia-smi -i {index} -c DEFAULT (as root)"
            yield Finding(PROBLEM, check, f"{text}: its compute mode is {mode}, and ranks are to share it", remedy)
        elif free is not None and free < device["total_bytes"] / 2:
            yield Finding(NOTE, check, text, "something else uses it: `nvidia-smi` shows what")
        else:
            yield Finding(OK, check, text)
    if name == "cuda" and 0 < len(those) < ranks_on_host:
        text = f"{ranks_on_host} ranks share {len(those)}: gloo in NCCL's place, which is slow"
        yield Finding(NOTE, "devices", text, "run one rank per GPU for speed")


def _shared_memory(shared: Mapping[str, Any], accelerator: str) -> Iterator[Finding]:
    text = f"{_gib(shared['free_bytes'])} of {_gib(shared['total_bytes'])} free"
    if shared["free_bytes"] >= LEAST_SHARED:
        yield Finding(OK, "/dev/shm", text)
        return
    remedy = "give the container more shared memory: docker run --shm-size=8g (or --ipc=host); else free /dev/shm"
    needs = "NCCL and workers that load data fail with so little" if accelerator == "cuda" else "loaders' workers fail"
    level = PROBLEM if accelerator == "cuda" else NOTE
    yield Finding(level, "/dev/shm", f"{text}: {needs}", remedy)


def _limits(limits: Mapping[str, Any], has_infiniband: bool) -> Iterator[Finding]:
    soft, hard = limits["open_files"]
    if soft is not None and soft < LEAST_OPEN_FILES:
        least = LEAST_OPEN_FILES if hard is None else min(hard, LEAST_OPEN_FILES)
        root = "" if least == LEAST_OPEN_FILES else f"; to have {LEAST_OPEN_FILES}, raise the hard limit, {hard}"
        advice = f"ulimit -n {least} before the launcher{root}"
        yield Finding(
            PROBLEM if soft < LEAST_OPEN_FILES // 16 else NOTE,
            "open files",
            f"at most {soft}: many ranks, and loaders' workers, need more",
            advice,
        )
    else:
        yield Finding(OK, "open files", f"at most {'any number' if soft is None else soft}")
    locked = limits["locked_bytes"][0]
    if has_infiniband and locked is not None:
        advice = "ulimit -l unlimited (in a container: --ulimit memlock=-1)"
        text = f"at most {locked / 2**20:g} MiB: InfiniBand and RDMA need to lock more"
        yield Finding(PROBLEM, "locked memory", text, advice)
    else:
        yield Finding(OK, "locked memory", "no limit" if locked is None else f"at most {locked / 2**20:g} MiB")


def _network(network: Mapping[str, Any], variables: Mapping[str, str], num_hosts: int) -> Iterator[Finding]:
    interfaces = network["interfaces"]
    own = {address for one in interfaces.values() for address in one["addresses"]}
    outward = {
        name: one["addresses"]
        for name, one in interfaces.items()
        if one["is_up"] and any(not _is_loopback(address) for address in one["addresses"])
    }
    shown = ", ".join(f"{name} {' '.join(addresses)}" for name, addresses in outward.items()) or "loopback only"
    fast = f"; InfiniBand: {', '.join(network['infiniband'])}" if network["infiniband"] else ""
    yield Finding(OK, "interfaces", f"{shown}{fast}")
    gloo = variables.get("GLOO_SOCKET_IFNAME", "")
    yield from _chosen_interfaces(variables, interfaces, num_hosts)
    yield from _host_name(network, own, outward, gloo, num_hosts)
    if network["master"] and not network["master_addresses"]:
        remedy = f"set MASTER_ADDR (--master_addr) to an address of rank 0's host: {network['master']} leads nowhere"
        yield Finding(PROBLEM, "MASTER_ADDR", f"{network['master']} leads to no address", remedy)
    elif num_hosts > 1 and network["master"] and all(_is_loopback(one) for one in network["master_addresses"]):
        text = f"{network['master']} is loopback ({', '.join(network['master_addresses'])}), and there are other hosts"
        yield Finding(PROBLEM, "MASTER_ADDR", text, "give --master_addr an address of rank 0's host that others reach")


def _host_name(
    network: Mapping[str, Any], own: set[str], outward: Mapping[str, Any], gloo: str, num_hosts: int
) -> Iterator[Finding]:
    host, addresses = network["host"], network["addresses"]
    name = next(iter(outward), "eth0")
    remedy = f"write the address of {host} into /etc/hosts, or export GLOO_SOCKET_IFNAME={name}"
    level = PROBLEM if num_hosts > 1 else NOTE  # on one host gloo then takes the loopback
    if num_hosts == 1:
        remedy = f"for jobs over several hosts: {remedy}"
    if gloo:
        yield Finding(OK, "host name", f"{host} leads to {', '.join(addresses) or 'nothing'}; gloo uses {gloo}")
    elif not addresses:
        yield Finding(level, "host name", f"{host} leads to no address, and gloo looks for it", remedy)
    elif not any(address in own or _is_loopback(address) for address in addresses):
        text = f"{host} leads to {', '.join(addresses)}, which no interface of this host has: gloo cannot listen there"
        yield Finding(level, "host name", text, remedy)
    elif all(_is_loopback(address) for address in addresses):
        text = f"{host} leads to {', '.join(addresses)}, which other hosts cannot reach: gloo tells them to"
        yield Finding(level, "host name", text, remedy)
    else:
        yield Finding(OK, "host name", f"{host} leads to {', '.join(addresses)}")


def _chosen_interfaces(
    variables: Mapping[str, str], interfaces: Mapping[str, Any], num_hosts: int
) -> Iterator[Finding]:
    """Check the interfaces that variables name: gloo takes whole names, NCCL prefixes, ``=name`` and ``^not_name``."""
    usable = ", ".join(name for name, one in interfaces.items() if one["is_up"])
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = variables.get(variable, "")
        if not value or value.startswith("^"):
            continue
        is_whole = variable.startswith("GLOO") or value.startswith("=")
        for name in value.lstrip("=").split(","):
            those = [one for one in interfaces if one == name or (not is_whole and one.startswith(name))]
            if not those:
                remedy = f"set {variable} to one of {usable}, or unset it"
                yield Finding(PROBLEM, variable, f"{value}: this host has no interface {name}", remedy)
            elif not any(interfaces[one]["is_up"] for one in those):
                remedy = f"bring {name} up, or set {variable} to one of {usable}"
                yield Finding(PROBLEM, variable, f"{value}: the interface {name} is down", remedy)
            elif num_hosts > 1 and all(_is_loopback(one) for each in those for one in interfaces[each]["addresses"]):
                remedy = f"set {variable} to an interface that other hosts reach, of {usable}"
                yield Finding(PROBLEM, variable, f"{value}: other hosts cannot reach {name}", remedy)


def _environment(
    variables: Mapping[str, str], cores: int, ranks_on_host: int, devices: Mapping[str, Any] | None
) -> Iterator[Finding]:
    wrong = set()
    threads = variables.get("OMP_NUM_THREADS")
    if threads is None and cores:
        text = f"not set: each rank computes with {cores} threads on the CPU"
        advice = f"set it to {max(1, cores // max(ranks_on_host, 1))}" if ranks_on_host > 1 else ""
        yield Finding(NOTE if ranks_on_host > 1 else OK, "OMP_NUM_THREADS", text, advice)
    elif threads is not None and not (threads.isdecimal() and int(threads)):
        remedy = "set OMP_NUM_THREADS to a whole number of at least 1, or unset it"
        yield Finding(PROBLEM, "OMP_NUM_THREADS", f"{threads!r} is no number of threads", remedy)
        wrong.add("OMP_NUM_THREADS")
    elif threads is not None and cores and int(threads) * ranks_on_host > cores:
        text = f"{threads}, by {ranks_on_host} ranks on {cores} cores: they hold each other up"
        yield Finding(NOTE, "OMP_NUM_THREADS", text, f"set it to {max(1, cores // ranks_on_host)}")
        wrong.add("OMP_NUM_THREADS")
    if variables.get("CUDA_LAUNCH_BLOCKING") == "1":
        yield Finding(NOTE, "CUDA_LAUNCH_BLOCKING", "1: every kernel is waited for", "unset it unless you debug")
    if variables.get("CUDA_VISIBLE_DEVICES") == "" and (devices is None or devices["has_nvidia"]):
        yield Finding(NOTE, "CUDA_VISIBLE_DEVICES", "empty: this process sees no GPU", "unset it to see them")
    for name, value in variables.items():
        if name not in wrong and not (name == "CUDA_LAUNCH_BLOCKING" and value == "1"):
            yield Finding(OK, name, f"{value} ({meaning(name)})")


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def _age(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
