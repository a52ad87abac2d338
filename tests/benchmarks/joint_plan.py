"""Unequal devices, a slow link and skewed experts at once: a plan that sees them together, against its parts in turns.

    python tests/benchmarks/joint_plan.py [--steps 42] [--output FILE]

Needs root (tests/lab) and about ten minutes. Four hosts hold a Qwen3-MoE in two stages, whose two ranks share the
experts of the stage. Devices have the speeds 4 : 2 and 1 : 1, one host's link is slow, and tokens go to experts as in a
recorded run (tests/lab/expert_trace.json). Attention and experts sleep for what they would take on the device.

* ``fixed``: equal numbers of layers, experts in the model's order, 1F1B.
* ``partition``, ``placement``: only layers move (with the schedule), or only experts.
* ``in turns``: both, each as if the other were not: a layer whose experts are unevenly busy is taken for one on a
  slower device, and experts are placed as if all devices were equal. So it was before loads and speeds were told apart.
* ``joint``: both, as they are now.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SPEEDS = (4.0, 2.0, 1.0, 1.0)
EVERY = 6
"""Steps between plannings."""
HIDDEN, TOP_K = 128, 2
PARTITION = {"method": "uniform", "repartition_every": EVERY}
ADAPTIVE = {"type": "adaptive", "retune_every": EVERY}
MOE = {"rebalance_every": EVERY}
CONTESTANTS: dict[str, dict[str, Any]] = {
    "fixed": {"pipeline": {}},
    "partition": {"pipeline": {"partition": PARTITION, "schedule": ADAPTIVE}},
    "placement": {"pipeline": {}, "moe": MOE},
    "in turns": {"pipeline": {"partition": PARTITION, "schedule": ADAPTIVE}, "moe": MOE},
    "joint": {"pipeline": {"partition": PARTITION, "schedule": ADAPTIVE}, "moe": MOE},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--contestants", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of a micro-batch")
    parser.add_argument("--row-s", type=float, default=1.2e-4, help="seconds of a row in an expert's forward")
    parser.add_argument("--attention-s", type=float, default=6e-3, help="seconds of attention's forward")
    parser.add_argument("--mbit", type=float, default=1000.0)
    parser.add_argument("--slow-mbit", type=float, default=100.0, help="of the second host")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job is not None:
        Job(json.loads(args.job.read_text())).run(args.job.with_name("steps.jsonl"))
        return
    from facts import facts

    from lab.hosts import Hosts, available

    if reason := available():
        sys.exit(reason)
    found = {}
    with Hosts(len(SPEEDS), mbit=args.mbit) as hosts:
        hosts.set_rate(1, args.slow_mbit)
        for name in args.contestants:
            with tempfile.TemporaryDirectory(prefix="joint-plan-") as folder:
                job = Path(folder, "job.json")
                job.write_text(json.dumps({"contestant": name, **vars(args)}, default=str))
                hosts.run([sys.executable, __file__, "--job", str(job)], timeout=900)
                lines = Path(folder, "steps.jsonl").read_text().splitlines()
                found[name] = summary([json.loads(line) for line in lines])
            print(name, json.dumps(found[name]), flush=True)
    losses = {tuple(each.pop("losses")) for each in found.values()}
    best = min((each["step_s"] for name, each in found.items() if name != "joint"), default=0.0)
    result = {
        "emulated_compute": True,
        "contestants": found,
        "joint_times_best_of_the_others": round(best / found["joint"]["step_s"], 3) if "joint" in found else None,
        "equal_losses": len(losses) == 1,
        **facts(args, "job"),
    }
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["joint_times_best_of_the_others"]), result["equal_losses"])


def summary(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """The step at the end, when it was reached, and what was decided."""
    seconds = [step["seconds"] for step in steps]
    last = statistics.median(seconds[-EVERY:])
    reached = next(n for n in range(len(seconds)) if statistics.median(seconds[n : n + 3]) < 1.05 * last)
    return {
        "step_s": round(last, 3),
        "first_step_s": round(statistics.median(seconds[1:4]), 3),
        "reached_after_steps": reached,
        "steps_s": [round(each, 3) for each in seconds],
        "partition": steps[-1]["parts"],
        "decisions": [decision for step in steps for decision in step["decisions"]],
        "losses": [step["loss"] for step in steps],
    }


class Job:
    """One contestant on one rank."""

    def __init__(self, job: dict[str, Any]) -> None:
        import deepspeed
        import torch

        from lab.experts import ExpertEmulation, read_trace

        torch.set_num_threads(1)
        deepspeed.utils.logger.setLevel("ERROR")
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled, for half a minute
        self.job, self.rank = job, int(os.environ["RANK"])
        trace = read_trace()
        tokens = tuple(map(tuple, trace[0] + trace[-1]))  # layers of both, one model's
        self.emulation = ExpertEmulation((tokens,), row_s=job["row_s"], num_tokens=job["tokens"])
        self._emulate()
        if job["contestant"] == "in turns":
            from paceline.moe import load_measurements
            from paceline.runtime.expert_part import Experts

            load_measurements.rank_speeds = lambda *_: None
            Experts.uneven_s = lambda _: {}  # type: ignore[method-assign]

    def _emulate(self) -> None:
        """Attention and experts take their time, and tokens go where the trace says, wherever a layer is made."""
        import torch
        from torch.nn import functional
        from transformers.models.qwen3_moe import modeling_qwen3_moe as family

        from lab.device import DEVICE
        from lab.experts import BACKWARD, Begins, Computation, Ends
        from paceline.moe.hf_experts import HFExpertLayer

        job, emulation = self.job, self.emulation
        chosen = [emulation.chosen(0, layer, self.rank % 2, 2) for layer in range(emulation.num_layers)]

        class Taken:
            taken_s = 0.0

        def lasting(x: torch.Tensor, seconds: float, run: Any) -> Any:
            backward = Computation(Taken(), "backward", BACKWARD * seconds)  # type: ignore[arg-type]
            forward = Computation(Taken(), "forward", seconds)  # type: ignore[arg-type]
            ends = Ends.apply(x, backward) if x.requires_grad else x
            forward.begin()
            output = run(ends)
            forward.end()
            return Begins.apply(output, backward) if x.requires_grad else output

        attend, compute, make = family.Qwen3MoeAttention.forward, HFExpertLayer._compute, family.Qwen3MoeDecoderLayer

        def attention(layer: Any, hidden_states: torch.Tensor, **more: Any) -> Any:
            rest: list[Any] = []

            def run(x: torch.Tensor) -> torch.Tensor:
                output, *others = attend(layer, hidden_states=x, **more)
                rest[:] = others
                return output

            return lasting(hidden_states, job["attention_s"], run), *rest

        def experts(layer: Any, rows: torch.Tensor, *more: Any) -> torch.Tensor:
            return lasting(rows, rows.shape[0] * job["row_s"], lambda x: compute(layer, x, *more))

        def route(gate: Any, hidden_states: torch.Tensor) -> Any:
            logits = functional.linear(hidden_states.reshape(-1, gate.hidden_dim), gate.weight)
            scores = logits.softmax(dim=-1).gather(1, chosen[gate.layer_idx])
            return logits, scores / scores.sum(dim=-1, keepdim=True), chosen[gate.layer_idx]

        begin = make.__init__

        def numbered(layer: Any, config: Any, layer_idx: int) -> None:
            begin(layer, config, layer_idx)
            layer.mlp.gate.layer_idx = layer_idx

        family.Qwen3MoeAttention.forward = attention
        HFExpertLayer._compute = experts  # type: ignore[method-assign]
        family.Qwen3MoeTopKRouter.forward = route
        make.__init__ = numbered
        DEVICE.begin_step(SPEEDS[self.rank])

    def run(self, output: Path) -> None:
        import torch
        from transformers import Qwen3MoeConfig

        import paceline
        from lab.device import DEVICE

        job, emulation = self.job, self.emulation
        section = CONTESTANTS[job["contestant"]]
        pipeline = {"stages": 2, "partition": "uniform", "schedule": "1f1b", **section["pipeline"]}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": job["micro_batches"],
            "gradient_clipping": 0.0,
            "steps_per_print": None,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": 1},
            "expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": "qwen3_moe"},
            "paceline": {**section, "pipeline": pipeline},
        }
        net = Qwen3MoeConfig(
            vocab_size=64,
            hidden_size=HIDDEN,
            intermediate_size=HIDDEN,
            moe_intermediate_size=32,
            num_hidden_layers=emulation.num_layers,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=HIDDEN // 2,
            num_experts=emulation.num_experts,
            num_experts_per_tok=TOP_K,
            max_position_embeddings=emulation.num_tokens,
            tie_word_embeddings=False,
        )
        torch.manual_seed(0)
        engine, *_ = paceline.initialize(model=net, config=config)
        chance = torch.Generator().manual_seed(engine.grid.data_parallel_id)
        ids = torch.randint(0, 64, (1, emulation.num_tokens), generator=chance)
        known = 0
        with output.open("w") if self.rank == 0 else open(os.devnull, "w") as lines:
            for _ in range(job["steps"]):
                DEVICE.begin_step(SPEEDS[self.rank])
                torch.distributed.barrier()
                begun = time.perf_counter()
                loss = engine.train_batch(iter([{"input_ids": ids, "labels": ids}] * job["micro_batches"]))
                decided = engine.decisions.decisions
                new, known = decided[known:], len(decided)
                line = {
                    "seconds": time.perf_counter() - begun,
                    "loss": loss.item(),
                    "parts": list(engine.module.parts),
                    "decisions": [shown(decision) for decision in new if decision["switched"]],
                }
                lines.write(json.dumps(line) + "\n")
                lines.flush()
        engine.destroy()
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def shown(decision: dict[str, Any]) -> dict[str, Any]:
    keys = ("what", "step", "stage", "from", "to", "schedule", "speeds", "imbalance_before", "imbalance_after", "moved")
    return {key: decision[key] for key in keys if key in decision}


if __name__ == "__main__":
    main()
