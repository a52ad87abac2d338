"""Findings from the facts and trials of all ranks of a job. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from ..messages import aligned, plural
from .finding import NOTE, OK, PROBLEM, Finding, show_ranks

Of = Mapping[int, Mapping[str, Any]]
"""By rank."""

CLOCK_NOTE_S, CLOCK_PROBLEM_S = 0.5, 30.0
"""Seconds between the clocks of two hosts from which logs mislead, and from which files seem to be of the future."""

UNEQUAL = 1.25
"""A device that is slower than the fastest by this factor holds a pipeline of equal stages up."""

SLOW_LINK = 4.0
"""A link that is slower than the others by this factor is worth a word."""

SLOW_BYTES_PER_S = 125e6
_DECISIVE = ("paceline", "torch", "deepspeed", "transformers", "accelerate", "accelerator", "NCCL")
_COMMON = ("DS_ACCELERATOR", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
_OWN = ("RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES")
"""Variables that are each rank's own."""

_EACH_HOSTS_OWN = ("IFNAME", "DEBUG", "IB_HCA", "TOPO_FILE", "HOSTID")
"""Parts of the names of NCCL settings that may differ: adapters and files have other names on other hosts."""


def hosts_of(facts: Of) -> dict[str, list[int]]:
    """The ranks of each host, in order."""
    hosts: dict[str, list[int]] = {}
    for rank in sorted(facts):
        hosts.setdefault(facts[rank]["identity"], []).append(rank)
    return hosts


def judge(facts: Of, size: int, trials: Of | None = None, unheard: str = "") -> list[Finding]:
    """The findings about a job.

    Args:
        facts: of the ranks that have answered, as :func:`.installation.facts` gives them, with ``identity`` of the host
            and ``findings`` about it.
        size: how many ranks there should be.
        trials: what they found as they exchanged, as :func:`.trial.examine` gives it.
        unheard: why ranks are missing, if that is known.
    """
    hosts = hosts_of(facts)
    found = [*_missing(facts, size, unheard), *_installations(facts, hosts), *_versions(facts), *_variables(facts)]
    if trials:
        found += [*_clocks(trials, facts, hosts), *_output(trials), *_speeds(trials), *_links(trials, hosts)]
    return found


def _missing(facts: Of, size: int, unheard: str) -> Iterator[Finding]:
    missing = [rank for rank in range(size) if rank not in facts]
    if missing:
        shown = show_ranks(missing)
        verb = "do not answer" if len(missing) > 1 else "does not answer"
        remedy = f"look at what {shown} wrote, and at its host: was it started, does it hang, does it reach rank 0?"
        yield Finding(PROBLEM, "ranks", f"{shown} of {size} {verb}{f': {unheard}' if unheard else ''}", remedy)
    else:
        yield Finding(OK, "ranks", f"all {size} answer, on {plural(len(hosts_of(facts)), 'host')}")


def _installations(facts: Of, hosts: Mapping[str, Sequence[int]]) -> Iterator[Finding]:
    """Findings about single ranks; of ranks of one host those that its first rank does not have too."""
    ranks_with: dict[Finding, list[int]] = {}
    for ranks in hosts.values():
        told: set[tuple[str, str]] = set()
        for rank in ranks:
            judged = [Finding(**{**one, "ranks": ()}) for one in facts[rank].get("findings", ())]
            new = [one for one in judged if one.level != OK and (one.level, one.check) not in told]
            for one in new:
                ranks_with.setdefault(one, []).append(rank)
            told.update((one.level, one.check) for one in new)
    if not any(one.level == PROBLEM for one in ranks_with):
        yield Finding(OK, "installations", f"no problem on {plural(len(hosts), 'host')}")
    for one, those in ranks_with.items():
        is_everywhere = all(any(rank in ranks for rank in those) for ranks in hosts.values())
        yield replace(one, ranks=() if is_everywhere else tuple(those))


def _versions(facts: Of) -> Iterator[Finding]:
    found: list[Finding] = []
    for name, values in _by_name(facts, "versions", "not installed").items():
        # Another patch release of Python is no other Python.
        decisive = {value.rpartition(".")[0] if name == "python" else value for value in values.values()}
        is_grave = len(decisive) > 1 and name in (*_DECISIVE, "python")
        found += _differs(name, values, is_grave, f"have the same {name} on all ranks")
    yield from found or [Finding(OK, "versions", "the same on all ranks")]


def _variables(facts: Of) -> Iterator[Finding]:
    found: list[Finding] = []
    for name, values in _by_name(facts, "environment", "(not set)").items():
        is_grave = name.startswith("NCCL_") and not any(part in name for part in _EACH_HOSTS_OWN)
        remedy = f"set {name} to one value on all ranks (DeepSpeed's launcher takes .deepspeed_env along)"
        if name not in _OWN:
            found += _differs(name, values, is_grave or name in _COMMON, remedy)
    yield from found or [Finding(OK, "environment", "the same on all ranks")]


def _by_name(facts: Of, what: str, absent: str) -> dict[str, dict[int, str]]:
    names = dict.fromkeys(name for known in facts.values() for name in known.get(what, ()))
    return {name: {r: known.get(what, {}).get(name) or absent for r, known in facts.items()} for name in names}


def _differs(name: str, values: Mapping[int, str], is_grave: bool, remedy: str) -> Iterator[Finding]:
    """A finding unless ``values``, by rank, are one; what most have comes first."""
    ranks: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        ranks.setdefault(value, []).append(rank)
    if len(ranks) > 1:
        most = sorted(ranks.items(), key=lambda item: -len(item[1]))
        text = ", ".join(f"{value} on {show_ranks(those)}" for value, those in most)
        yield Finding(PROBLEM if is_grave else NOTE, f"{name} differs", text, f"{remedy}: {text}")


def _clocks(trials: Of, facts: Of, hosts: Mapping[str, Sequence[int]]) -> Iterator[Finding]:
    offsets = clock_offsets(trials, facts)
    if len(offsets) < len(facts) or len(hosts) < 2:
        return
    seen = {ranks[0]: offsets[ranks[0]] for ranks in hosts.values()}
    apart_s = max(seen.values()) - min(seen.values())
    text = f"at most {apart_s:.3g} s apart"
    if apart_s < CLOCK_NOTE_S:
        yield Finding(OK, "clocks", text)
        return
    median_s = median(seen.values())
    wrong = {rank: s for rank, s in seen.items() if abs(s - median_s) >= CLOCK_NOTE_S / 2}
    shown = ", ".join(f"rank {rank} {s:+.3g} s" for rank, s in wrong.items())
    level = PROBLEM if apart_s >= CLOCK_PROBLEM_S else NOTE
    remedy = "have all hosts keep the same time (chrony or ntpd): `timedatectl` says whether one does"
    yield Finding(level, "clocks", f"{text} (against rank 0: {shown})", remedy)


def clock_offsets(trials: Of, facts: Of) -> dict[int, float]:
    """Seconds that the time of day of each rank's host is ahead of rank 0's."""
    offsets: dict[int, float] = {}
    counter_s = 0.0  # of the rank's monotonic clock, against rank 0's
    for rank in sorted(trials):  # each compares its clock with the next one's
        if "clock_s" not in trials[rank] or not all("ahead_s" in facts.get(one, {}) for one in (0, rank)):
            break
        offsets[rank] = facts[rank]["ahead_s"] - facts[0]["ahead_s"] + counter_s
        counter_s += trials[rank]["clock_s"]
    return offsets


def _output(trials: Of) -> Iterator[Finding]:
    looked = {rank: trial["output"] for rank, trial in trials.items() if "output" in trial}
    for first in list(looked.values())[:1]:
        path, blind = first["path"], [rank for rank, one in looked.items() if not one["is_seen"]]
        if first["error"]:
            remedy = f"make {path} writable on rank 0's host, or give another --output_dir: {first['error']}"
            yield Finding(PROBLEM, "--output_dir", f"{path}: rank 0 cannot write there: {first['error']}", remedy)
        elif blind:
            text = (
                f"{path} is not the same folder on all nodes: {show_ranks(blind)} cannot see what rank 0 writes there"
            )
            yield Finding(PROBLEM, "--output_dir", text, f"give an --output_dir that all nodes share, unlike {path}")
        else:
            yield Finding(OK, "--output_dir", f"{path}: all ranks see what rank 0 writes")


def _speeds(trials: Of) -> Iterator[Finding]:
    speeds = {rank: trial["speed"] for rank, trial in trials.items() if trial.get("speed")}
    if not speeds:
        return
    fastest, slowest = max(speeds, key=speeds.__getitem__), min(speeds, key=speeds.__getitem__)
    ratio = speeds[fastest] / speeds[slowest]
    if ratio < UNEQUAL:
        yield Finding(OK, "speed", f"devices are alike: the fastest is {ratio:.2f} times as fast as the slowest")
        return
    remedy = f'see what else rank {slowest}\'s device does; where devices differ for good, "partition": "hetero" gives '
    text = f"rank {fastest} computes {ratio:.2f} times as fast as rank {slowest}"
    yield Finding(NOTE, "speed", text, remedy + "each as many layers as it can take")


def links_of(trials: Of) -> list[dict[str, Any]]:
    """The links between neighbours that were tried: seconds of a small message, and bytes per second of large ones."""
    return [
        {"from": rank, "to": rank + 1, **trial["link"]} for rank, trial in sorted(trials.items()) if trial.get("link")
    ]


def _links(trials: Of, hosts: Mapping[str, Sequence[int]]) -> Iterator[Finding]:
    host_of = {rank: host for host, ranks in hosts.items() for rank in ranks}
    groups: dict[str, list[dict[str, Any]]] = {}
    for link in links_of(trials):
        if not link["right"]:
            text = f"rank {link['from']} to {link['to']}: the numbers that arrive are wrong"
            yield Finding(PROBLEM, "link", text, "suspect the network's hardware or driver between these ranks' hosts")
        is_inside = host_of.get(link["from"]) == host_of.get(link["to"])
        groups.setdefault("inside hosts" if is_inside else "between hosts", []).append(link)
    for where, links in groups.items():
        yield _compared(links, where)


def _compared(links: Sequence[Mapping[str, Any]], where: str) -> Finding:
    rates = {f"rank {one['from']} to {one['to']}": rate for one in links if (rate := _rate(one)) is not None}
    text = f"{plural(len(links), 'link')} {where}: {_span((one['latency_s'] for one in links), 1e3, 'ms')}"
    if not rates:
        return Finding(OK, "links", f"{text}, bandwidth too high to tell")
    text += f", {_span(rates.values(), 1e-6, 'MB/s')}"
    used = "the interface that each host uses (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
    if slow := [edge for edge, rate in rates.items() if rate * SLOW_LINK < median(rates.values())]:
        shown = ", ".join(f"{edge} {rates[edge] / 1e6:.3g} MB/s" for edge in slow)
        remedy = f"compare {used}, its speed and its load"
        return Finding(NOTE, "links", f"{text}; much slower than the others: {shown}", remedy)
    if where == "between hosts" and min(rates.values()) < SLOW_BYTES_PER_S:
        remedy = f'"schedule": "adaptive" keeps stages busy on such a network; see that {used} is its fastest'
        return Finding(NOTE, "links", f"{text}: slow", remedy)
    return Finding(OK, "links", text)


def _rate(link: Mapping[str, Any]) -> float | None:
    """Bytes per second of the slower direction; None: too high to tell."""
    return min((link[key] for key in ("bytes_per_s", "back_bytes_per_s") if link[key] is not None), default=None)


def rows(facts: Of, size: int, trials: Of | None = None) -> list[dict[str, Any]]:
    """A row for each rank, for people and for a JSON; None is what is not known."""
    trials = trials or {}
    offsets, found = clock_offsets(trials, facts), []
    for rank in range(size):
        known, trial = facts.get(rank, {}), trials.get(rank, {})
        versions, link = known.get("versions", {}), trial.get("link") or None
        found.append(
            {
                "rank": rank,
                "answers": rank in facts,
                "host": known.get("host"),
                "device": trial.get("device") or versions.get("accelerator"),
                **{name: versions.get(name) for name in ("python", "paceline", "torch", "deepspeed", "transformers")},
                "clock_s": offsets.get(rank),
                "products_per_s": trial.get("speed"),
                "next_latency_s": link and link["latency_s"],
                "next_bytes_per_s": link and _rate(link),
            }
        )
    return found


_MEASURED = {
    "clock_s": ("clock ms", 1e3, "+.3g"),
    "products_per_s": ("products/s", 1, ".4g"),
    "next_latency_s": ("to next ms", 1e3, ".3g"),
    "next_bytes_per_s": ("MB/s", 1e-6, ".4g"),
}
_COLUMNS = ("rank", "host", "device", "python", "paceline", "torch", "deepspeed", "transformers", *_MEASURED)


def table(of_ranks: Sequence[Mapping[str, Any]]) -> str:
    """The rows for people."""

    def cell(name: str, value: Any) -> str:
        _, scale, shape = _MEASURED.get(name, ("", 0, ""))
        return "-" if value is None else format(value * scale, shape) if shape else str(value)

    heading = [_MEASURED.get(name, (name,))[0] for name in _COLUMNS]
    cells = [[cell(name, row[name]) for name in _COLUMNS] for row in of_ranks]
    return "\n".join(aligned([heading, *cells], left=range(len(_COLUMNS))))


def _span(values: Iterable[float], scale: float, unit: str) -> str:
    scaled = sorted(value * scale for value in values)
    low, high = f"{scaled[0]:.3g}", f"{scaled[-1]:.3g}"
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"
