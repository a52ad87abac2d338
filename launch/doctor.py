"""``paceline doctor``: is this installation, and this cluster, fit to train, and what is to be fixed?

Alone it looks at the installation. Started on all ranks of a job it also has them exchange as a run does, for seconds::

    paceline doctor
    deepspeed --hostfile hosts --module paceline.launch.doctor --output_dir tuned --deepspeed ds_configs/pp4.json
    torchrun --nproc_per_node 2 -m paceline.launch.doctor

Rank 0 prints the report. The exit status is 0, 1 if there are problems, or 2 for wrong usage; torchrun adds a traceback
of its own to any status but 0. A rank that does not answer within ``--timeout`` is a problem with a name.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paceline.comm.launcher_variables import translate
from paceline.doctor import finding, installation, job_checks
from paceline.doctor.finding import PROBLEM, Finding
from paceline.doctor.meeting import Place, Unmet, deadline, exchange, meet
from paceline.messages import named

if TYPE_CHECKING:
    from paceline.supervise.first_cause import Cause

TIMEOUT_S = 30.0
_LEAST_TIMEOUT_S = 2.0
_SPARE_S = 5.0
"""Slack that a waiting rank adds for ranks that wait for others themselves."""

_TOLD_S, _CAUSE_S = 1.0, 4.0
_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument("--deepspeed", default="", metavar="FILE", help="also check this DeepSpeed JSON")
    parser.add_argument("--output_dir", "--output-dir", default="", metavar="DIR", help="that a run is to write to")
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT_S,
        metavar="S",
        help=f"seconds after which a rank of a job counts as missing (default {TIMEOUT_S:g})",
    )
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # of DeepSpeed's launcher


def main(argv: Sequence[str] | None = None) -> int:
    """``paceline doctor`` on this rank, as launchers start it; the exit status."""
    from paceline.launch import cli

    return cli.main(["doctor", *(sys.argv[1:] if argv is None else argv)])


def run(args: argparse.Namespace) -> int:
    """The command; its exit status.

    Raises:
        ValueError: a time limit that is none.
    """
    if not _LEAST_TIMEOUT_S <= args.timeout < float("inf"):
        raise ValueError(f"--timeout is {args.timeout:g}: give seconds, {_LEAST_TIMEOUT_S:g} at least.")
    if args.local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(args.local_rank))
    translate(os.environ)
    try:
        place = Place.of(os.environ)
    except Unmet as unmet:
        return _alone(args, unmet.finding)
    return _alone(args) if place is None else _Job(place, args).run()


def _alone(args: argparse.Namespace, *more: Finding) -> int:
    with contextlib.redirect_stdout(sys.stderr):  # where what packages print at import disturbs no JSON
        found = [*installation.look(args.output_dir, args.deepspeed), *more]
        known = installation.facts()
        system, text = _environments()
    if args.json:
        print(json.dumps({**finding.as_dict(found), "facts": known, "system": system}, indent=2))
    else:
        print(f"{text}{finding.as_text(found)}")
    return finding.exit_status(found)


def _environments() -> tuple[dict[str, Any], str]:
    """What torch's ``collect_env`` and ``ds_report`` say, as values and as text; nothing of a broken installation."""
    said = io.StringIO()
    try:
        from deepspeed.env_report import debug_report
        from torch.utils.collect_env import get_env_info, pretty_str

        info = get_env_info()
        with contextlib.redirect_stdout(said):
            debug_report()
    except Exception:  # the findings say why
        return {}, ""
    return info._asdict(), f"{pretty_str(info)}\n\n{said.getvalue()}\n"


class _Job:
    """This rank's part; rank 0's makes the report, once, from whatever is known when the job ends."""

    def __init__(self, place: Place, args: argparse.Namespace) -> None:
        self.place, self.args = place, args
        self.facts: dict[int, dict[str, Any]] = {}
        self.trials: dict[int, dict[str, Any]] = {}
        self.own_trial: dict[str, Any] = {}
        self.watch: Any = None
        self._reporting = threading.Lock()
        self._stdout = sys.stdout

    def run(self) -> int:
        """The exit status, the same on all ranks that can agree on one."""
        try:
            from paceline.supervise.lifetime import Preemption
        except ImportError:  # without psutil there is no job
            return self._unmet(Finding(PROBLEM, "psutil", "cannot be imported", "pip install psutil"))
        with Preemption(in_training=False, interrupt=True, tell=self._stopped):
            try:
                with contextlib.redirect_stdout(sys.stderr):
                    return self._run()
            except Unmet as unmet:
                return self._unmet(unmet.finding)

    def _run(self) -> int:
        place, timeout_s = self.place, self.args.timeout
        # Rank 0 is reached or not, but also a connection that is there may never answer.
        with deadline(timeout_s + _SPARE_S, self._rank_0_is_silent):
            store = meet(place, timeout_s)
        config = self.args.deepspeed if place.rank == 0 else ""
        found = installation.look(self.args.output_dir, config, place)
        own = installation.facts() | {"identity": _identity(), "findings": [asdict(one) for one in found]}
        self.facts[place.rank] = own
        self.facts = self._exchange(store, "facts", own, timeout_s)
        if len(self.facts) < place.size:
            self._give_up()
        return self._try(store)

    def _exchange(self, store: Any, topic: str, value: Any, timeout_s: float) -> dict[int, Any]:
        with deadline(2 * timeout_s + _SPARE_S, self._rank_0_is_silent):
            try:
                return exchange(store, topic, self.place, value, timeout_s)
            except RuntimeError:  # the connection to the store is lost, and with it rank 0
                self._rank_0_is_silent()
                raise

    def _try(self, store: Any) -> int:
        """All ranks have met; now they exchange."""
        import torch.distributed as dist

        from paceline.doctor import trial

        why, timeout_s = "", self.args.timeout
        with deadline(timeout_s + _SPARE_S, lambda: self._have_joined(store, "it does not end")):
            try:
                device = trial.join(store, self.place.rank, self.place.size, timeout_s)
                self.own_trial["device"] = str(device)
            except Exception as error:
                why = named(error)
        self._have_joined(store, why)
        self.watch = trial.TrialWatch(lambda: self._failed(self.watch.cause))
        try:
            self.watch.start(timeout_s)
            gathered = trial.examine(self.watch, device, self.args.output_dir, self.own_trial)
            self.trials = dict(enumerate(gathered))
        except Exception as error:
            self._failed(self.watch.fail(error))
        agreed = [self._report() if self.place.rank == 0 else 0]
        self.watch.doing("waiting for the report", 0)
        dist.broadcast_object_list(agreed, src=0, device=device)
        self.watch.close()
        dist.destroy_process_group()
        return int(agreed[0])

    def _have_joined(self, store: Any, why: str) -> None:
        """End the job unless all ranks connect, which those at unreachable addresses cannot, though they have met.

        Args:
            why: this rank cannot; empty: it can.
        """
        # Gloo's side that connects is refused at once, the side that listens waits until its deadline in `_try`.
        causes = self._exchange(store, "joined", why, self.args.timeout + 2 * _SPARE_S)
        found = []
        if silent := [rank for rank in range(self.place.size) if rank not in causes]:
            shown = finding.show_ranks(silent)
            text = f"{shown} met the others and has not been heard of since"
            found.append(Finding(PROBLEM, "ranks", text, f"look at what {shown} wrote, and at its host: does it hang?"))
        for said in dict.fromkeys(filter(None, causes.values())):
            remedy = (
                "have each host's name lead to an address that the others reach, or set GLOO_SOCKET_IFNAME "
                "(NCCL_SOCKET_IFNAME) to such an interface; open the hosts' ports to each other"
            )
            ranks = tuple(rank for rank, text in causes.items() if text == said)
            found.append(Finding(PROBLEM, "process group", f"cannot be made: {said}", remedy, ranks))
        if found:
            self._give_up(*found)

    # -- when something is wrong ---------------------------------------------------------------------------------

    def _give_up(self, *why: Finding) -> None:
        """Rank 0 reports, and ends first: a launcher ends the others then, and shows whose status that was."""
        if self.place.rank == 0:
            self._report(*why)
        time.sleep(_TOLD_S if self.place.rank == 0 else 2 * _TOLD_S)  # the store, which others read, is rank 0's
        self._end(1)

    def _unmet(self, why: Finding) -> int:
        """Report why there is no job for this rank: no other rank has the reason."""
        if self.place.rank == 0:
            return self._report(why)
        print(f"paceline: error: {why.text}; {why.remedy}", file=sys.stderr, flush=True)
        return 1

    def _rank_0_is_silent(self) -> None:
        waited = f"rank {self.place.rank} has waited {self.args.timeout:g} s and more for it"
        text = f"rank 0 does not answer at {self.place.host} port {self.place.port}: {waited}"
        remedy = "look at what rank 0 wrote, and at its host: does it hang, was it stopped?"
        self._unmet(Finding(PROBLEM, "ranks", text, remedy))
        self._end(1)

    def _failed(self, cause: Cause) -> None:
        """The job cannot go on. One rank reports: rank 0, unless it is rank 0 that is gone."""
        from paceline.supervise.lifetime import wake_siblings

        try:
            if self.place.rank == (cause.speaker if cause.rank == 0 else 0):
                remedy = f"look at what rank {cause.rank} wrote, and at its host: is it up, is it out of memory?"
                self._report(Finding(PROBLEM, "ranks", cause.text, remedy))
            wake_siblings()
        finally:
            self._end(1)

    def _stopped(self, code: int, text: str) -> None:
        """A signal, or the launcher has ended: mostly because another rank has."""
        if code == _INTERRUPTED:
            return
        cause = None
        if self.watch is not None:
            self.watch._concluded.wait(_CAUSE_S)
            cause = self.watch.cause
        if cause is not None:
            self._failed(cause)
        elif self.place.rank == 0:
            remedy = "look at what the other ranks and the launcher wrote: one of them has ended first"
            ended = Finding(PROBLEM, "launcher", f"ended this before it was done: {text}", remedy)
            self._report(ended, unheard=text)
        self._end(1)

    def _end(self, code: int) -> None:
        """Now: threads of a transport that waits for a rank that is gone would keep the process."""
        from paceline.supervise.lifetime import end_process

        end_process(code)

    def _report(self, *more: Finding, unheard: str = "") -> int:
        """Say what is known; the exit status."""
        if not self._reporting.acquire(blocking=False):  # another thread says it
            time.sleep(_CAUSE_S)
            return 1
        trials = self.trials or {self.place.rank: dict(self.own_trial)}
        size = self.place.size
        known = self.facts
        of_ranks = job_checks.rows(known, size, trials)
        # Without an answer of rank 0, this rank has only its own facts.
        judged = job_checks.judge(known, size, trials, unheard) if self.place.rank == 0 and known else []
        found = [*more, *judged]
        if self.args.json:
            shown = {"ranks": of_ranks, "links": job_checks.links_of(trials), **finding.as_dict(found), "facts": known}
            text = json.dumps(shown)
        else:
            text = f"{job_checks.table(of_ranks)}\n\n{finding.as_text(found)}" if known else finding.as_text(found)
        print(text, file=self._stdout, flush=True)
        return finding.exit_status(found)


def _identity() -> str:
    """Identity of the host, as the engine has it."""
    try:
        from paceline.runtime.rank_reports import host_name

        return host_name()
    except Exception:  # the installation is broken, which is in the report
        return ""


if __name__ == "__main__":
    sys.exit(main())
