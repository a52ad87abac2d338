"""`paceline doctor` on the ranks of a job: what it reports of them, and of ranks that do not take part."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from lab.hosts import DEVICE, Hosts, available, enter
from support.accidents import Running, accident
from support.ranks import launch, run_ranks

CONFIG = Path(__file__).resolve().parents[2] / "ds_configs" / "pp2.json"
TIMEOUT_S = 30.0
"""More than ranks that are well need on a machine that is busy."""
PATIENT = ["--timeout", "600"]
"""Where all are well: ranks may take minutes to start."""


def look(args: list[str], of_rank: dict[int, dict[str, str]] | None = None, folders: list[str] | None = None) -> Any:
    """Exit status and what was printed.

    Args:
        of_rank: variables that only this rank has.
        folders: to be in, by rank.
    """
    from paceline.launch import doctor

    rank = int(os.environ["RANK"])
    os.environ.update((of_rank or {}).get(rank, {}))
    if folders:
        os.chdir(folders[rank])
    out = io.StringIO()
    with redirect_stdout(out):
        status = doctor.main([f"--local_rank={rank}", *args])
    return status, out.getvalue()


def problems(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["check"]: one for one in report["findings"] if one["level"] == "problem"}


def test_ranks_that_are_well(tmp_path: Path) -> None:
    """Three: an odd number of ranks has links that are tried one after the other."""
    output = tmp_path / "new" / "output"
    args = ["--json", "--output_dir", str(output), "--deepspeed", str(CONFIG), *PATIENT]
    (status, text), *others = run_ranks(look, 3, args)
    assert others == [(0, ""), (0, "")]
    report = json.loads(text)
    assert status == 0, report["to_fix"]
    assert [row["answers"] for row in report["ranks"]] == [True] * 3
    assert all(row["products_per_s"] > 0 and abs(row["clock_s"]) < 1 for row in report["ranks"])
    assert [(link["from"], link["to"]) for link in report["links"]] == [(0, 1), (1, 2)]
    for link in report["links"]:
        assert link["right"]
        assert 0 < link["latency_s"] < 1
        assert link["bytes_per_s"] is None or link["bytes_per_s"] > 1e6
    checks = {one["check"]: one for one in report["findings"]}
    assert checks["ranks"]["text"] == "all 3 answer, on 1 host"
    assert checks["--output_dir"]["text"] == f"{output}: all ranks see what rank 0 writes"
    assert not (tmp_path / "new").exists(), "it leaves nothing behind"
    assert set(report["facts"]) == {"0", "1", "2"}


def test_text_differences_and_a_folder_that_is_not_shared(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    own = {1: {"NCCL_P2P_DISABLE": "1", "HF_HUB_OFFLINE": "0"}}
    args = ["--output_dir", "out", *PATIENT]
    (status, text), (other, nothing) = run_ranks(look, 2, args, own, [str(f) for f in folders])
    assert (status, other, nothing) == (1, 1, "")
    lines = text.splitlines()
    assert lines[0].split()[:4] == ["rank", "host", "device", "python"]
    assert [line.split()[0] for line in lines[1:3]] == ["0", "1"]
    shown = "(not set) on rank 0, 1 on rank 1"
    assert re.search(rf"^problem  NCCL_P2P_DISABLE differs +{re.escape(shown)}$", text, re.MULTILINE)
    assert re.search(r"^note     HF_HUB_OFFLINE differs +1 on rank 0, 0 on rank 1; set ", text, re.MULTILINE)
    assert re.search(
        r"^problem  --output_dir +out is not the same folder on all nodes: rank 1 cannot", text, re.MULTILINE
    )
    todo = lines[lines.index("What to fix") + 1 :]
    assert [line[:2] for line in todo] == ["1.", "2."]
    assert not list(folders[0].iterdir()), "it leaves nothing behind"


@pytest.mark.launcher
def test_as_users_start_it(tmp_path: Path) -> None:
    done = launch(["--module", "paceline.launch.doctor", "--json", "--output_dir", str(tmp_path), *PATIENT], 2)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    report = json.loads(line)
    assert [row["answers"] for row in report["ranks"]] == [True, True]
    assert report["problems"] == 0
    assert "Traceback" not in done.stderr


RANK_1_DIES = """
import os, signal, sys, time
from pathlib import Path

is_listening = Path(sys.argv.pop(1))
if os.environ["RANK"] == "1":
    while not is_listening.exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
from paceline.launch.doctor import main
from paceline.supervise.lifetime import Preemption

enter = Preemption.__enter__

def listens(self):
    entered = enter(self)
    is_listening.touch()
    return entered

Preemption.__enter__ = listens
raise SystemExit(main())
"""
"""As soon as rank 0 listens to signals: before, the launcher's would end it without a word."""


@pytest.mark.launcher
def test_a_launcher_that_ends_the_others_when_one_has_died(tmp_path: Path) -> None:
    """The launcher sends SIGTERM to rank 0 when rank 1 is gone; the report comes first."""
    program = ["--no_python", sys.executable, "-c", RANK_1_DIES, str(tmp_path / "is_listening")]
    done = launch(["--no_local_rank", *program], 2, with_command=False)
    assert done.returncode != 0
    assert "Traceback" not in done.stdout + done.stderr
    assert re.search(r"^problem  \w+ .*(rank 1 of 2 does not answer|ended this before)", done.stdout, re.MULTILINE), (
        done.stdout + done.stderr
    )


def suffer(what: str, victim: int) -> None:
    """The doctor, with an accident of one rank: before it comes, or as the ranks exchange. Ends as the module does."""
    from paceline.doctor import trial
    from paceline.launch import doctor
    from paceline.supervise.lifetime import end_process

    rank = int(os.environ["RANK"])
    happens, _, when = what.partition(", ")
    if rank == victim and when == "before":
        accident(happens)
    if rank == victim and when == "exchanging":
        speed = trial.device_speed

        def device_speed(device: Any) -> float:
            accident(happens)
            return speed(device)

        trial.device_speed = device_speed
    if rank == victim and when == "joining":
        trial.join = lambda *args: accident(happens)
    begun = time.monotonic()
    try:
        code = doctor.main(["--timeout", str(TIMEOUT_S)])
    except SystemExit as stop:
        code = int(stop.code or 0)
    print(f"took {time.monotonic() - begun:.1f} s")
    end_process(code)


ACCIDENTS = {
    "is stopped, before": r"rank {v} of 3 does not answer",
    "is stopped, exchanging": r"rank {v} is gone \(nothing heard for \d+ s: stopped, or its machine",
    "is killed, exchanging": r"rank {v} is gone \(its process ended without a word\)",
    "raises, exchanging": r"rank {v} failed computing: MemoryError: no more of it",
    "hangs, exchanging": r"rank {v} hangs computing: \d+ s",
    "is killed, joining": r"rank {v} met the others and has not been heard of since",
    "raises, joining": r"cannot be made: MemoryError: no more of it \[rank {v}\]",
}
CASES = [
    *[(what, 1) for what in ACCIDENTS],
    *[("is killed, exchanging", 0), ("raises, exchanging", 0)],
]


@pytest.fixture(scope="module")
def all_of() -> Iterator[Any]:
    """Jobs that mostly wait run beside each other, a few at a time."""
    begun: dict[Any, Running] = {}

    def one_of(case: tuple[str, int], cases: Iterable[tuple[str, int]]) -> Running:
        if case not in begun:
            begun.update({one: Running(suffer, 3, *one) for one in cases})
        return begun[case]

    yield one_of
    for running in begun.values():
        running.kill()


@pytest.mark.parametrize(("what", "victim"), CASES)
def test_a_rank_that_has_an_accident_is_named(what: str, victim: int, all_of: Any) -> None:
    at = CASES.index((what, victim)) // 5 * 5
    ended = all_of((what, victim), CASES[at : at + 5]).end(stopped=victim if "stopped" in what else None)
    text = "\n".join(ended.outputs)
    assert not any("Traceback" in output for output in ended.outputs), text
    reports = [output for output in ended.outputs if "What to fix" in output]
    assert len(reports) == 1, text
    assert re.search(rf"^problem  \w.* +{ACCIDENTS[what].format(v=victim)}", reports[0], re.MULTILINE), reports[0]
    if "joining" not in what:  # there the others tell that they could not, too
        assert len(re.findall(r"^problem ", reports[0], re.MULTILINE)) == 1, reports[0]
    assert ended.codes == [-9 if r == victim and ("stop" in what or "kill" in what) else 1 for r in range(3)], text
    assert ended.left == []


def come_without_rank_0() -> Any:
    """Rank 1 alone: nobody listens."""
    from paceline.launch import doctor

    if os.environ["RANK"] == "0":
        return 0
    return doctor.main(["--timeout", "2"])


def test_rank_0_does_not_come(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(come_without_rank_0, 2) == [0, 1]
    said = re.findall(r"^paceline: error: .*$", capfd.readouterr().out, re.MULTILINE)
    assert len(said) == 1
    assert re.match(r"paceline: error: rank 1 does not reach rank 0 at 127\.0\.0\.1 port \d+ within 2 s; see ", said[0])


def on_host(hosts: list[str], address: str, interface: str) -> None:
    """Be the only rank of one of these hosts, the first of which has this address."""
    enter(hosts[int(os.environ["RANK"])])
    os.environ.update(MASTER_ADDR=address, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GLOO_SOCKET_IFNAME=interface)


def look_on_host(args: list[str], *host: Any) -> Any:
    on_host(*host)
    return look(args)


def end_on_host(args: list[str], *host: Any) -> None:
    """Ends as the module does."""
    from paceline.launch import doctor
    from paceline.supervise.lifetime import end_process

    on_host(*host)
    end_process(doctor.main(args))


@pytest.mark.skipif(bool(available()), reason=available())
def test_hosts_with_limited_links() -> None:
    """The limit is found, and hosts are told apart though they have one name."""
    with Hosts(2, mbit=80) as hosts:
        args = ["--json", *PATIENT], hosts.namespaces, hosts.addresses[0], DEVICE
        (status, text), other = run_ranks(look_on_host, 2, *args)
    assert other == (0, "")
    report = json.loads(text)
    assert (status, report["problems"]) == (0, 0)
    for link in report["links"]:
        for way in ("bytes_per_s", "back_bytes_per_s"):
            assert 1e6 < link[way] < 12e6, link  # a busy machine is slower, and faster than the limit nobody is
    (ranks,) = [one for one in report["findings"] if one["check"] == "ranks"]
    assert ranks["text"] == "all 2 answer, on 2 hosts"
    links = [one for one in report["findings"] if one["check"] == "links"]
    assert [one["level"] for one in links] == ["note"]
    assert all("1 link between hosts" in one["text"] and "adaptive" in one["remedy"] for one in links)


@pytest.mark.skipif(bool(available()), reason=available())
def test_hosts_that_meet_and_cannot_connect() -> None:
    """Gloo tells each the other's loopback address."""
    with Hosts(2) as hosts:
        args = ["--timeout", str(TIMEOUT_S)], hosts.namespaces, hosts.addresses[0], "lo"
        job = Running(end_on_host, 2, *args)
        try:
            ended = job.end()
        finally:
            job.kill()
    report = ended.outputs[0]
    assert ended.codes == [1, 1], report
    assert re.search(r"^problem  process group .*\[rank 0\]$", report, re.MULTILINE), report
    assert re.search(r"^problem  GLOO_SOCKET_IFNAME +lo: other hosts cannot reach lo$", report, re.MULTILINE), report
    assert "has not been heard of" not in report
    assert "Traceback" not in report
