"""Findings from the facts and trials of all ranks of a job. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from ..messages import aligned
from . import installation
from .finding import NOTE, OK, PROBLEM, Finding, show_ranks

CLOCK_NOTE_S, CLOCK_PROBLEM_S = 0.5, 30.0
"""Seconds between the clocks of two hosts from which logs mislead, and from which files seem to be of the future."""

UNEQUAL = 1.25
"""A device that is slower than the fastest by this factor holds a pipeline of equal stages up."""

SLOW_LINK = 4.0
"""A link that is slower than the others by this factor is worth a word."""

SLOW_BYTES_PER_S = 125e6
_DECISIVE = ("paceline", "torch", "deepspeed", "transformers", "accelerate")
_OWN = ("RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES")
"""Variables that are each rank's own."""

_EACH_HOSTS_OWN = ("IFNAME", "DEBUG", "IB_HCA", "TOPO_FILE", "HOSTID")
"""Parts of the names of NCCL settings that may differ: adapters and files have other names on other hosts."""


def hosts_of(facts: Mapping[int, Mapping[str, Any]]) -> dict[str, list[int]]:
    """The ranks of each host, in order."""
    hosts: dict[str, list[int]] = {}
    for rank in sorted(facts):
        host = facts[rank].get("identity") or facts[rank].get("machine", {}).get("host") or f"host of rank {rank}"
        hosts.setdefault(host, []).append(rank)
    return hosts


def judge(
    facts: Mapping[int, Mapping[str, Any]],
    size: int,
    trials: Mapping[int, Mapping[str, Any]] | None = None,
    unheard: str = "",
) -> list[Finding]:
    """The findings about a job.

    Args:
        facts: of the ranks that have answered, as :func:`.facts.gather` gives them.
        size: how many ranks there should be.
        trials: what they found as they exchanged, as :func:`.trial.examine` gives it.
        unheard: why ranks are missing, if that is known.
    """
    hosts = hosts_of(facts)
    found = list(_missing(facts, size, unheard))
    found += _installations(facts, hosts)
    found += _versions(facts)
    found += _variables(facts)
    if trials:
        found += _clocks(trials, facts, hosts)
        found += _output(trials)
        found += _speeds(trials)
        found += _collectives(trials)
        found += _links(trials, hosts)
    return found


def _missing(facts: Mapping[int, Any], size: int, unheard: str) -> Iterator[Finding]:
    missing = [rank for rank in range(size) if rank not in facts]
    if missing:
        shown = show_ranks(missing)
        verb = "do not answer" if len(missing) > 1 else "does not answer"
        remedy = f"look at what {shown} wrote, and at its host: was it started, does it hang, does it reach rank 0?"
        yield Finding(PROBLEM, "ranks", f"{shown} of {size} {verb}{f': {unheard}' if unheard else ''}", remedy)
    else:
        yield Finding(OK, "ranks", f"all {size} answer, on {_count(len(hosts_of(facts)), 'host')}")


def _installations(facts: Mapping[int, Mapping[str, Any]], hosts: Mapping[str, Sequence[int]]) -> Iterator[Finding]:
    """Findings about single ranks; of ranks of one host those that its first rank does not have too."""
    of_ranks: list[list[Finding]] = [[] for _ in range(max(facts, default=-1) + 1)]
    checks = 0
    for ranks in hosts.values():
        first: set[tuple[str, str]] = set()
        for rank in ranks:
            judged = installation.judge(facts[rank], num_hosts=len(hosts), ranks_on_host=len(ranks))
            checks += len(judged)
            notable = [one for one in judged if one.level != OK]
            if rank != ranks[0]:
                notable = [one for one in notable if (one.level, one.check) not in first]
            first.update((one.level, one.check) for one in notable)
            of_ranks[rank] = notable
    distinct = list(dict.fromkeys(one for found in of_ranks for one in found))
    if not any(one.level == PROBLEM for one in distinct):
        yield Finding(OK, "installations", f"{checks} checks on {_count(len(hosts), 'host')} found no problem")
    for one in distinct:
        yield replace(one, ranks=_whose(one, of_ranks, hosts))


def _whose(one: Finding, of_ranks: Sequence[Sequence[Finding]], hosts: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """The ranks that a finding is about; where all hosts have it, all."""
    same = [rank for rank, found in enumerate(of_ranks) if one in found]
    return () if all(any(rank in ranks for rank in same) for ranks in hosts.values()) else tuple(same)


def _versions(facts: Mapping[int, Mapping[str, Any]]) -> Iterator[Finding]:
    of: dict[str, dict[int, str]] = {}
    for rank, known in facts.items():
        packages, python = known.get("packages", {}), known.get("python", {})
        versions = {"paceline": packages.get("paceline"), **packages.get("found", {})}
        if python:
            of.setdefault("Python", {})[rank] = python["version"]
        for name, version in versions.items():
            of.setdefault(name, {})[rank] = version or "not installed"
        accelerator = known.get("devices", {}).get("accelerator")
        if accelerator:
            of.setdefault("accelerator", {})[rank] = accelerator
            of.setdefault("NCCL", {})[rank] = known["devices"]["nccl"]
    differ = False
    for name, values in of.items():
        if len(set(values.values())) < 2:
            continue
        differ = True
        text = _shown(values)
        if name == "Python":
            is_grave = len({value.rpartition(".")[0] for value in values.values()}) > 1
        else:
            is_grave = name in (*_DECISIVE, "accelerator", "NCCL")
        remedy = f"have the same {name} on all ranks: {text}"
        yield Finding(PROBLEM if is_grave else NOTE, f"{name} differs", text, remedy)
    if not differ and len(facts) > 1:
        yield Finding(OK, "versions", "the same on all ranks")


def _variables(facts: Mapping[int, Mapping[str, Any]]) -> Iterator[Finding]:
    known = {rank: one["environment"] for rank, one in facts.items() if "environment" in one}
    names = dict.fromkeys(name for variables in known.values() for name in variables if name not in _OWN)
    differ = False
    for name in names:
        values = {rank: variables.get(name, "(not set)") for rank, variables in known.items()}
        if len(set(values.values())) > 1:
            differ = True
            is_grave = name.startswith("NCCL_") and not any(part in name for part in _EACH_HOSTS_OWN)
            is_grave = is_grave or name in ("DS_ACCELERATOR", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
            text = _shown(values)
            remedy = f"set {name} to one value on all ranks ({text}); DeepSpeed's launcher takes .deepspeed_env along"
            yield Finding(PROBLEM if is_grave else NOTE, f"{name} differs", text, remedy)
    if not differ and len(known) > 1:
        yield Finding(OK, "environment", "the same on all ranks")


def _clocks(
    trials: Mapping[int, Mapping[str, Any]], facts: Mapping[int, Mapping[str, Any]], hosts: Mapping[str, Sequence[int]]
) -> Iterator[Finding]:
    offsets = clock_offsets(trials, facts)
    firsts = [ranks[0] for ranks in hosts.values()]
    if len(offsets) < len(facts) or len(firsts) < 2:
        return
    seen = {rank: offsets[rank] for rank in firsts}
    apart_s = max(seen.values()) - min(seen.values())
    text = f"at most {apart_s:.3g} s apart"
    if apart_s < CLOCK_NOTE_S:
        yield Finding(OK, "clocks", text)
        return
    median_s = median(seen.values())
    wrong = [rank for rank in firsts if abs(seen[rank] - median_s) >= CLOCK_NOTE_S / 2]
    shown = ", ".join(f"rank {rank} {seen[rank]:+.3g} s" for rank in wrong)
    level = PROBLEM if apart_s >= CLOCK_PROBLEM_S else NOTE
    remedy = "have all hosts keep the same time (chrony or ntpd): `timedatectl` says whether one does"
    yield Finding(level, "clocks", f"{text} (against rank 0: {shown})", remedy)


def clock_offsets(trials: Mapping[int, Mapping[str, Any]], facts: Mapping[int, Mapping[str, Any]]) -> dict[int, float]:
    """Seconds that the time of day of each rank's host is ahead of rank 0's."""
    offsets: dict[int, float] = {}
    counter_s = 0.0  # of the rank's monotonic clock, against rank 0's
    for rank in sorted(trials):  # each compares its clock with the next one's
        if "clock_s" not in trials[rank] or not all("time" in facts.get(one, {}) for one in (0, rank)):
            break
        offsets[rank] = facts[rank]["time"]["ahead_s"] - facts[0]["time"]["ahead_s"] + counter_s
        counter_s += trials[rank]["clock_s"]
    return offsets


def _output(trials: Mapping[int, Mapping[str, Any]]) -> Iterator[Finding]:
    looked = {rank: trial["output"] for rank, trial in trials.items() if "output" in trial}
    if not looked:
        return
    first = next(iter(looked.values()))
    path, blind = first["path"], [rank for rank, one in looked.items() if not one["is_seen"]]
    if first["error"]:
        remedy = f"make {path} writable on rank 0's host, or give another --output_dir: {first['error']}"
        yield Finding(PROBLEM, "--output_dir", f"{path}: rank 0 cannot write there: {first['error']}", remedy)
    elif blind:
        text = f"{path} is not the same folder on all nodes: {show_ranks(blind)} cannot see what rank 0 writes there"
        yield Finding(PROBLEM, "--output_dir", text, f"give an --output_dir that all nodes share, unlike {path}")
    else:
        yield Finding(OK, "--output_dir", f"{path}: all ranks see what rank 0 writes")


def _speeds(trials: Mapping[int, Mapping[str, Any]]) -> Iterator[Finding]:
    speeds = {rank: trial["speed"] for rank, trial in trials.items() if trial.get("speed")}
    if not speeds:
        return
    fastest, slowest = max(speeds, key=speeds.__getitem__), min(speeds, key=speeds.__getitem__)
    ratio = speeds[fastest] / speeds[slowest]
    if ratio < UNEQUAL:
        yield Finding(OK, "speed", f"devices are alike: the fastest is {ratio:.2f} times as fast as the slowest")
        return
    text = f"rank {fastest} computes {ratio:.2f} times as fast as rank {slowest}"
    remedy = (
        f'see what else rank {slowest}\'s device does; where devices differ for good, "partition": "hetero" gives each '
        "as many layers as it can take"
    )
    yield Finding(NOTE, "speed", text, remedy)


def _collectives(trials: Mapping[int, Mapping[str, Any]]) -> Iterator[Finding]:
    wrong: dict[tuple[str, str], list[int]] = {}
    tried: dict[str, None] = {}
    for rank, trial in trials.items():
        for name, error in trial.get("collectives", {}).items():
            tried[name] = None
            if error:
                wrong.setdefault((name, error), []).append(rank)
    for (name, error), ranks in wrong.items():
        remedy = f"{name} has to work between all ranks: look at the backend's settings (NCCL_DEBUG=INFO says more)"
        yield Finding(PROBLEM, name, error, remedy, tuple(ranks))
    if right := [name for name in tried if name not in {name for name, _ in wrong}]:
        yield Finding(OK, "collectives", f"{', '.join(right)}: right numbers on all ranks")


def links_of(trials: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The links between neighbours that were tried: seconds of a small message, and bytes per second of large ones."""
    return [
        {"from": rank, "to": rank + 1, "order": order, **link}
        for rank, trial in sorted(trials.items())
        for order, link in trial.get("links", {}).items()
        if link
    ]


def _links(trials: Mapping[int, Mapping[str, Any]], hosts: Mapping[str, Sequence[int]]) -> Iterator[Finding]:
    links = links_of(trials)
    host_of = {rank: host for host, ranks in hosts.items() for rank in ranks}
    for link in (link for link in links if not link["right"]):
        text = f"rank {link['from']} to {link['to']}, {link['order']} order: the numbers that arrive are wrong"
        yield Finding(PROBLEM, "link", text, "suspect the network's hardware or driver between these ranks' hosts")
    for order in dict.fromkeys(link["order"] for link in links):
        for inside in (True, False):
            those = [
                one
                for one in links
                if one["order"] == order and (host_of.get(one["from"]) == host_of.get(one["to"])) == inside
            ]
            if those:
                yield from _compared(those, order, "inside hosts" if inside else "between hosts")


def _compared(links: Sequence[Mapping[str, Any]], order: str, where: str) -> Iterator[Finding]:
    rates = {(one["from"], one["to"]): min(_rates(one), default=None) for one in links}
    known = {edge: value for edge, value in rates.items() if value is not None}
    latencies = [one["latency_s"] for one in links]
    text = f"{_count(len(links), 'link')} {where}, {order} order: {_span(latencies, 1e3, 'ms')}"
    check = "links"
    if not known:
        yield Finding(OK, check, f"{text}, bandwidth too high to tell")
        return
    text += f", {_span(known.values(), 1e-6, 'MB/s')}"
    slow = [edge for edge, value in known.items() if value * SLOW_LINK < median(known.values())]
    if slow:
        shown = ", ".join(f"rank {a} to {b} {known[a, b] / 1e6:.3g} MB/s" for a, b in slow)
        remedy = (
            "compare the interface that each host uses (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), its speed and its load"
        )
        yield Finding(NOTE, check, f"{text}; much slower than the others: {shown}", remedy)
    elif where == "between hosts" and min(known.values()) < SLOW_BYTES_PER_S:
        remedy = (
            'on a network like this, "schedule": "adaptive" keeps stages busy; '
            "see that the fastest interface is used (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
        )
        yield Finding(NOTE, check, f"{text}: slow", remedy)
    else:
        yield Finding(OK, check, text)


def _rates(link: Mapping[str, Any]) -> list[float]:
    return [link[key] for key in ("bytes_per_s", "back_bytes_per_s") if link[key] is not None]


def rows(
    facts: Mapping[int, Mapping[str, Any]], size: int, trials: Mapping[int, Mapping[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """A row for each rank, for people and for a JSON; None is what is not known."""
    trials = trials or {}
    offsets = clock_offsets(trials, facts)
    found = []
    for rank in range(size):
        known, trial = facts.get(rank, {}), trials.get(rank, {})
        devices, packages = known.get("devices", {}), known.get("packages", {})
        versions = packages.get("found", {})
        links = [one for one in trial.get("links", {}).values() if one]
        best = max(links, key=lambda one: min(_rates(one), default=0.0), default=None)
        found.append(
            {
                "rank": rank,
                "answers": rank in facts,
                "host": known.get("machine", {}).get("host"),
                "device": trial.get("device") or devices.get("accelerator"),
                "python": known.get("python", {}).get("version"),
                "paceline": packages.get("paceline"),
                "torch": versions.get("torch"),
                "deepspeed": versions.get("deepspeed"),
                "transformers": versions.get("transformers"),
                "clock_s": offsets.get(rank),
                "products_per_s": trial.get("speed"),
                "next_latency_s": best and best["latency_s"],
                "next_bytes_per_s": best and min(_rates(best), default=None),
            }
        )
    return found


_COLUMNS = {
    "rank": ("rank", 1, "d"),
    "host": ("host", 1, ""),
    "device": ("device", 1, ""),
    "python": ("python", 1, ""),
    "paceline": ("paceline", 1, ""),
    "torch": ("torch", 1, ""),
    "deepspeed": ("deepspeed", 1, ""),
    "transformers": ("transformers", 1, ""),
    "clock_s": ("clock ms", 1e3, "+.3g"),
    "products_per_s": ("products/s", 1, ".4g"),
    "next_latency_s": ("to next ms", 1e3, ".3g"),
    "next_bytes_per_s": ("MB/s", 1e-6, ".4g"),
}


def table(of_ranks: Sequence[Mapping[str, Any]]) -> str:
    """The rows for people."""
    cells = [[heading for heading, _, _ in _COLUMNS.values()]]
    for row in of_ranks:
        cells.append(
            [
                "-" if row[key] is None else format(row[key] * scale if shape else row[key], shape)
                for key, (_, scale, shape) in _COLUMNS.items()
            ]
        )
    return "\n".join(aligned(cells, left=range(len(_COLUMNS))))


def _shown(values: Mapping[int, str]) -> str:
    """``2.13.0 on ranks 0-3, 2.12.0 on rank 4``, what most have first."""
    ranks: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        ranks.setdefault(value, []).append(rank)
    most = sorted(ranks.items(), key=lambda item: -len(item[1]))
    return ", ".join(f"{value or '(none)'} on {show_ranks(those)}" for value, those in most)


def _span(values: Iterable[float], scale: float, unit: str) -> str:
    scaled = sorted(value * scale for value in values)
    low, high = f"{scaled[0]:.3g}", f"{scaled[-1]:.3g}"
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
