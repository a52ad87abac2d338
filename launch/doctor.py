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
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from paceline.doctor import facts, finding, installation, job_checks
from paceline.doctor.finding import PROBLEM, Finding
from paceline.doctor.meeting import Deadline, Place, Unmet, heard, meet, tell

if TYPE_CHECKING:
    from paceline.supervise.first_cause import Cause

BAD_USAGE = 2
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run on this rank; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, of a job in one line")
    parser.add_argument("--local_rank", "--local-rank", type=int, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(args.local_rank))
    try:
        return run(args)
    except ValueError as error:
        print(f"paceline: error: {error}", file=sys.stderr, flush=True)
        return BAD_USAGE


def run(args: argparse.Namespace) -> int:
    """The command; its exit status.

    Raises:
        ValueError: a time limit that is none.
    """
    if not _LEAST_TIMEOUT_S <= args.timeout < float("inf"):
        raise ValueError(f"--timeout is {args.timeout:g}: give seconds, {_LEAST_TIMEOUT_S:g} at least.")
    try:
        place = Place.of(os.environ)
    except Unmet as unmet:
        return _alone(args, unmet.finding)
    return _alone(args) if place is None else _Job(place, args).run()


def _alone(args: argparse.Namespace, *more: Finding) -> int:
    with _quiet_stdout():
        known = facts.gather(args.output_dir, args.deepspeed)
    found = [*installation.judge(known), *more]
    if args.json:
        print(json.dumps({**finding.as_dict(found), "facts": known}, indent=2))
    else:
        print(finding.as_text(found))
    return finding.exit_status(found)


@contextlib.contextmanager
def _quiet_stdout() -> Iterator[None]:
    """Send what packages print at import to stderr, where it does not disturb a JSON."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


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
                with _quiet_stdout():
                    return self._run()
            except Unmet as unmet:
                return self._unmet(unmet.finding)

    def _run(self) -> int:
        rank, timeout_s = self.place.rank, self.args.timeout
        is_first = os.environ.get("LOCAL_RANK", "0") == "0"
        # Rank 0 is reached or not, but also a connection that is there may never answer.
        with Deadline(timeout_s + _SPARE_S, self._rank_0_is_silent):
            store = meet(self.place, timeout_s)
        own = facts.gather(self.args.output_dir, self.args.deepspeed if rank == 0 else "", patches=is_first)
        own["identity"] = _identity()
        self.facts[rank] = own
        with Deadline(2 * timeout_s + _SPARE_S, self._rank_0_is_silent):
            all_are_here = self._tell_facts(store, own)
        if not all_are_here:
            return self._report([]) if rank == 0 else 1
        return self._try(store)

    def _tell_facts(self, store: Any, own: dict[str, Any]) -> bool:
        """Exchange facts; whether rank 0 has heard all ranks."""
        rank, size, timeout_s = self.place.rank, self.place.size, self.args.timeout
        try:
            tell(store, "facts", rank, own)
            if rank == 0:
                self.facts.update(heard(store, "facts", range(size), time.monotonic() + timeout_s))
                tell(store, "all", 0, len(self.facts) == size)
            return bool(heard(store, "all", [0], float("inf"))[0])
        except RuntimeError:  # the connection to the store is lost, and with it rank 0
            self._rank_0_is_silent()
            raise

    def _try(self, store: Any) -> int:
        """All ranks have met; now they exchange."""
        import torch.distributed as dist

        from paceline.doctor import trial

        rank, size, timeout_s = self.place.rank, self.place.size, self.args.timeout
        try:
            with Deadline(timeout_s + _SPARE_S, lambda: self._cannot_join(store, "it does not end")):
                device = trial.join(store, rank, size, timeout_s)
            self.own_trial["device"] = str(device)
            tell(store, "joined", rank, True)
            with Deadline(timeout_s + 2 * _SPARE_S, self._rank_0_is_silent):
                joined = heard(store, "joined", range(size), time.monotonic() + timeout_s + _SPARE_S)
        except Exception as error:
            return self._cannot_join(store, f"{type(error).__name__}: {error}")
        if len(joined) < size:
            return self._cannot_join(store, "")
        self.watch = trial.TrialWatch(self._cause_is_known)
        try:
            self.watch.start(timeout_s)
            gathered = trial.examine(self.watch, device, self.args.output_dir, self.own_trial)
            self.trials = dict(enumerate(gathered))
        except Exception as error:
            self._failed(self.watch.fail(error))
        status = self._report([]) if rank == 0 else 0
        self.watch.doing("waiting for the report", 0)
        agreed = [status]
        dist.broadcast_object_list(agreed, src=0, device=device)
        self.watch.close()
        dist.destroy_process_group()
        return int(agreed[0])

    # -- when something is wrong ---------------------------------------------------------------------------------

    def _unmet(self, why: Finding) -> int:
        """Report why there is no job for this rank: no other rank has the reason."""
        if self.place.rank == 0:
            return self._report([why])
        print(f"paceline: error: {why.text}; {why.remedy}", file=sys.stderr, flush=True)
        return 1

    def _rank_0_is_silent(self) -> None:
        waited = f"rank {self.place.rank} has waited {self.args.timeout:g} s and more for it"
        text = f"rank 0 does not answer at {self.place.host} port {self.place.port}: {waited}"
        remedy = "look at what rank 0 wrote, and at its host: does it hang, was it stopped?"
        self._unmet(Finding(PROBLEM, "ranks", text, remedy))
        self._end(1)

    def _cannot_join(self, store: Any, why: str) -> int:
        """Report ranks that find each other in the store and cannot connect, such as at unreachable addresses.

        Args:
            why: as this rank sees it; empty: others cannot.
        """
        try:
            if self.place.rank == 0:
                self._report(self._who_cannot_join(store, why))
                tell(store, "reported", 0, True)
                time.sleep(_TOLD_S)  # for the others to read it
            else:
                self._leave_it_to_rank_0(store, why)
        finally:
            self._end(1)
        return 1

    def _leave_it_to_rank_0(self, store: Any, why: str) -> None:
        """Wait for rank 0's report: a launcher would end rank 0 when this rank ends."""
        patience_s = 2 * self.args.timeout + 3 * _SPARE_S
        with Deadline(patience_s + _SPARE_S, self._rank_0_is_silent):
            try:
                if why:
                    tell(store, "failed", self.place.rank, " ".join(why.split()))
                has_reported = bool(heard(store, "reported", [0], time.monotonic() + patience_s))
            except RuntimeError:  # the store is lost
                has_reported = False
        if not has_reported:
            self._rank_0_is_silent()
        time.sleep(2 * _TOLD_S)  # rank 0 ends first: a launcher shows whose status that is

    def _who_cannot_join(self, store: Any, why: str) -> list[Finding]:
        others = range(1, self.place.size)
        until_s = time.monotonic() + self.args.timeout + _SPARE_S  # some may still try
        causes = {0: " ".join(why.split())} if why else {}
        joined = heard(store, "joined", others, time.monotonic())
        causes.update(heard(store, "failed", [one for one in others if one not in joined], until_s))
        found = []
        if silent := [one for one in others if one not in causes and one not in joined]:
            shown = finding.show_ranks(silent)
            text = f"{shown} met the others and has not been heard of since"
            found.append(Finding(PROBLEM, "ranks", text, f"look at what {shown} wrote, and at its host: does it hang?"))
        for said in dict.fromkeys(causes.values()):
            ranks = tuple(one for one, text in causes.items() if text == said)
            remedy = (
                "have each host's name lead to an address that the others reach, or set GLOO_SOCKET_IFNAME "
                "(NCCL_SOCKET_IFNAME) to such an interface; open the hosts' ports to each other"
            )
            found.append(Finding(PROBLEM, "process group", f"cannot be made: {said}", remedy, ranks))
        return found

    def _cause_is_known(self) -> None:
        """Called by the watch, from its thread, while this rank waits or computes."""
        self._failed(self.watch.cause)

    def _failed(self, cause: Cause) -> None:
        """The job cannot go on. One rank reports: rank 0, unless it is rank 0 that is gone."""
        from paceline.supervise.lifetime import wake_siblings

        try:
            if self.place.rank == (cause.speaker if cause.rank == 0 else 0):
                self._report([_of_cause(cause)])
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
            self._report([Finding(PROBLEM, "launcher", f"ended this before it was done: {text}", remedy)], text)
        self._end(1)

    def _end(self, code: int) -> None:
        """Now: threads of a transport that waits for a rank that is gone would keep the process."""
        from paceline.supervise.lifetime import end_process

        end_process(code)

    def _report(self, more: Sequence[Finding], unheard: str = "") -> int:
        """Say what is known; the exit status."""
        if not self._reporting.acquire(blocking=False):  # another thread says it
            time.sleep(_CAUSE_S)
            return 1
        trials = self.trials or {self.place.rank: dict(self.own_trial)}
        size = self.place.size
        known = dict(self.facts)
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


def _of_cause(cause: Cause) -> Finding:
    remedy = f"look at what rank {cause.rank} wrote, and at its host: is it up, is it out of memory, was it stopped?"
    return Finding(PROBLEM, "ranks", cause.text, remedy)


def _identity() -> str:
    """Identity of the host, as the engine has it."""
    try:
        from paceline.runtime.rank_reports import host_name

        return host_name()
    except Exception:  # the installation is broken, which is in the report
        return ""


if __name__ == "__main__":
    sys.exit(main())
