"""How well a step is predicted: simulated against measured seconds, on emulated hosts.

    python tests/benchmarks/prediction.py [--parallel 2] [--steps 5] [--split | --formats]

Needs root (tests/lab). Each setting is a number of hosts, of micro-batches, a schedule and a rate. With ``--split``
schedules are those whose backwards are split, in which half of a backward is that of the weights. With ``--formats``
activations and gradients travel in one; how long that takes to encode and decode is measured beforehand, by itself, as
"adaptive" does it. Nothing is fitted to
the steps: compute is what the layers sleep, and what a limited host can send is its rate times the share of payload in
the bytes on the wire; one plain TCP transfer a rate is measured and shown beside that rule, and stands for the network
without a limit. A host's sending side is shared by all that it sends: activations to the next stage, gradients to the
one before. Messages are large against the limiter's burst of 128 KiB, which it lets through at once after a pause.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from facts import facts

from lab.contestants import label_of, num_chunks_of
from lab.emulation import Emulation
from lab.hosts import BURST_BYTES, Hosts, available
from lab.training import median_step_s, train
from lab.transfer import PAYLOAD_SHARE, goodput_bytes_per_s
from paceline.comm.formats import FORMATS
from paceline.planning.format_costs import AS_IT_IS, with_format
from paceline.runtime.format_times import format_costs
from paceline.schedules.costs import Costs
from paceline.schedules.families import kfkb
from paceline.schedules.schedule import Schedule
from paceline.schedules.simulate import simulate
from paceline.schedules.split_families import DUALPIPEV_SPLIT, SPLIT_FAMILIES

_PEAKS = ("kept", "verified")


@dataclass(frozen=True)
class Setting:
    """One comparison: hosts, micro-batches, k or a name of :data:`SPLIT_FAMILIES`, and every host's Mbit/s (None: no
    limit)."""

    stages: int
    micro_batches: int
    schedule: int | str
    mbit: float | None
    format: str = ""

    @property
    def contestant(self) -> str:
        if self.format:
            kind = {"type": "kfkb", "k": self.schedule} if isinstance(self.schedule, int) else {"type": self.schedule}
            boundary = {"forward": self.format, "backward": self.format}
            return f"{self.format}={json.dumps({'schedule': kind, 'boundary': boundary})}"
        if isinstance(self.schedule, int):
            return f"kfkb{self.schedule}={json.dumps({'type': 'kfkb', 'k': self.schedule})}"
        return "our-dualpipev-split" if self.schedule == DUALPIPEV_SPLIT else self.schedule

    def value(self) -> Schedule:
        if isinstance(self.schedule, int):
            return kfkb(self.stages, self.micro_batches, self.schedule)
        return SPLIT_FAMILIES[self.schedule](self.stages, self.micro_batches)


SETTINGS = [
    Setting(2, 4, 1, None),
    Setting(2, 8, 2, 100),
    Setting(2, 16, 4, 200),
    Setting(2, 32, 1, 400),
    Setting(3, 4, 4, 200),
    Setting(3, 8, 1, 100),
    Setting(3, 16, 4, 400),
    Setting(3, 32, 2, None),
    Setting(4, 4, 2, 100),
    Setting(4, 8, 1, None),
    Setting(4, 8, 4, 200),
    Setting(4, 16, 1, 200),
    Setting(4, 16, 2, 100),
    Setting(4, 16, 2, 200),
    Setting(4, 16, 4, 400),
    Setting(4, 32, 2, 400),
]

SPLIT_SETTINGS = [
    Setting(2, 4, "zbh1", None),
    Setting(2, 8, "zbv", 400),
    Setting(2, 16, "vmin", None),
    Setting(3, 6, "zbh2", 200),
    Setting(3, 8, "zbv", None),
    Setting(3, 12, "vhalf", 400),
    Setting(3, 16, "zbh1", None),
    Setting(4, 8, "zbh1", 400),
    Setting(4, 8, "zbv", None),
    Setting(4, 8, DUALPIPEV_SPLIT, None),
    Setting(4, 16, "zbh2", None),
    Setting(4, 16, "vmin", None),
]

FORMAT_SETTINGS = [
    Setting(2, 8, 1, 400, "int8"),
    Setting(2, 16, 2, 200, "int4"),
    Setting(3, 8, "zbh1", 400, "int8"),
    Setting(3, 16, 1, 400, "bf16"),
    Setting(4, 8, 1, 200, "int8"),
    Setting(4, 8, 2, 400, "fp8_e4m3"),
    Setting(4, 16, "zbh2", 400, "int8"),
    Setting(4, 16, 1, 200, "int4"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--forward-s", type=float, nargs=1, default=[0.05])
    parser.add_argument("--backward-s", type=float, nargs=1, default=[0.1])
    parser.add_argument("--message-kib", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5, help="measured in each setting, after two")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3, 4], help="only settings with so many")
    parser.add_argument("--parallel", type=int, default=1, help="settings that run side by side")
    parser.add_argument("--split", action="store_true", help="schedules with split backwards")
    parser.add_argument("--formats", action="store_true", help="what passes between stages is encoded")
    parser.add_argument("--output", type=Path, help="default: beside this file")
    args = parser.parse_args()
    name, chosen = "prediction.json", SETTINGS
    if args.split:
        name, chosen = "prediction_split_emulated.json", SPLIT_SETTINGS
    elif args.formats:
        name, chosen = "prediction_formats.json", FORMAT_SETTINGS
    output = args.output or Path(__file__).with_name(name)
    if reason := available():
        sys.exit(reason)
    settings = [setting for setting in chosen if setting.stages in args.stages]
    goodput = {rate: measured_goodput(rate) for rate in dict.fromkeys(setting.mbit for setting in settings)}
    with ThreadPoolExecutor(args.parallel) as pool, ExitStack() as labs:
        runs = []
        for setting in settings:
            hosts = labs.enter_context(Hosts(setting.stages, mbit=setting.mbit))
            runs.append(pool.submit(compare, hosts, setting, goodput[setting.mbit], args))
        # When this block is left early: nothing more begins, then the hosts end, and with them what the pool waits for.
        labs.callback(pool.shutdown, wait=False, cancel_futures=True)
        rows = []
        for run in runs:
            rows.append(run.result())
            print(json.dumps(rows[-1]), flush=True)
    errors = [abs(row["error"]) for row in rows]
    result = {
        "emulated_compute": True,
        "median_error": round(statistics.median(errors), 4),
        "worst_error": round(max(errors), 4),
        "settings_compared": rows,
        "goodput_mbit": {str(rate): round(8e-6 * value, 1) for rate, value in goodput.items()},
        "payload_share": round(PAYLOAD_SHARE, 4),
        **facts(args),
    }
    output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"median error {result['median_error']:.1%}, worst {result['worst_error']:.1%} of {len(rows)} settings")


def measured_goodput(rate: float | None) -> float:
    """Bytes per second of one transfer of about a second."""
    with Hosts(2, mbit=rate) as hosts:
        num_bytes = round((rate or 4000) * 1e6 / 8)
        return goodput_bytes_per_s(hosts, 0, 1, num_bytes, BURST_BYTES if rate else 0)


def compare(hosts: Hosts, setting: Setting, goodput: float, args: argparse.Namespace) -> dict[str, Any]:
    """Measured and simulated seconds of a step."""
    message_bytes = args.message_kib * 1024
    emulation = Emulation.of(setting.stages, args.forward_s, args.backward_s, message_bytes, setting.micro_batches)
    name = setting.contestant
    records = train(hosts, [name], emulation, steps=args.steps)
    measured = median_step_s(records, label_of(name))
    kept, verified = ([tuple(p) for p in next(r[key] for r in reversed(records) if key in r)] for key in _PEAKS)
    sent = goodput if setting.mbit is None else setting.mbit * 1e6 / 8 * PAYLOAD_SHARE
    schedule, num_chunks = setting.value(), num_chunks_of(name)
    num_parts = setting.stages * num_chunks
    costs = Costs(
        forward_s=(args.forward_s[0] / num_chunks,) * num_parts,
        backward_s=(args.backward_s[0] / num_chunks,) * num_parts,
        message_bytes=(float(message_bytes),) * (num_parts - 1),
        hosts=tuple(range(setting.stages)),
        egress_bytes_per_s=(sent,) * setting.stages,
    )
    if setting.format:
        shape = 1, message_bytes // 4  # the lab's messages are one row, of which int4 sends nothing apart
        seconds = format_costs([setting.format], torch.float32, torch.device("cpu"), shape)[setting.format]
        share = FORMATS[setting.format].num_bytes(message_bytes // 4) / message_bytes
        costs = with_format(costs, AS_IT_IS, seconds._replace(share=share))
    simulated = simulate(schedule, costs).makespan_s
    return {
        "stages": setting.stages,
        "micro_batches": setting.micro_batches,
        "schedule": schedule.name,
        **({"format": setting.format} if setting.format else {}),
        "mbit": setting.mbit,
        "measured_s": round(measured, 4),
        "simulated_s": round(simulated, 4),
        "error": round(simulated / measured - 1, 4),
        "keeps_what_is_verified": kept == verified,
    }


if __name__ == "__main__":
    main()
