"""The job that runs on every host of a lab: emulated expert-parallel training, contestants in turn, timed.

    emulated_experts.py FOLDER

``FOLDER/job.json`` has the emulation, the contestants and the steps of a round (:func:`lab.experts.train_experts`);
every rank writes ``FOLDER/rank<N>.jsonl``, a line a step. All contestants live in the same processes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import paceline
from lab.device import DEVICE
from lab.experts import EmulatedExperts, ExpertEmulation, TracedRouter, model


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled, for half a minute
    deepspeed.init_distributed("gloo")
    paceline.repair_deepspeed()  # both: AutoEP of this version does not start with some models otherwise
    job = json.loads((folder / "job.json").read_text())
    emulation = ExpertEmulation(**job["emulation"])
    contestants = {label: Contestant(emulation, section) for label, section in job["contestants"].items()}
    with (folder / f"rank{dist.get_rank()}.jsonl").open("w") as lines:
        for number in range(-(-emulation.num_steps // job["round_steps"])):
            for label, contestant in contestants.items():
                dist.barrier()
                began = time.perf_counter()
                for _ in range(min(job["round_steps"], emulation.num_steps - contestant.num_steps)):
                    said = contestant.step()
                    ended = time.perf_counter()
                    record = {"contestant": label, "round": number, "seconds": ended - began, **said}
                    lines.write(json.dumps(record) + "\n")
                    began = ended
    dist.barrier()
    dist.destroy_process_group()


class Contestant:
    """An engine, and how far it is in the trace.

    Args:
        section: ``paceline.moe``; None: stock AutoEP.
    """

    def __init__(self, emulation: ExpertEmulation, section: dict[str, Any] | None) -> None:
        self.emulation = emulation
        self.num_steps = 0
        net = model(emulation)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,  # DeepSpeed clips by default
            "steps_per_print": None,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": emulation.zero},
            "expert_parallel": {"enabled": True, "autoep_size": dist.get_world_size()},
        }
        initialize: Callable[..., Any] = deepspeed.initialize
        if section is not None:
            initialize, config = paceline.initialize, {**config, "paceline": {"moe": section}}
        self.engine, *_ = initialize(model=net, model_parameters=list(net.parameters()), config=config)
        self.layers = [layer for layer in net.modules() if isinstance(layer, AutoEPMoELayer)]
        for layer in self.layers:
            layer.router.__class__ = TracedRouter
            layer.experts.__class__ = EmulatedExperts
            layer.experts.emulate(emulation.row_s)
        chance = torch.Generator().manual_seed(dist.get_rank())
        self.batch = torch.randint(0, 64, (1, emulation.num_tokens), generator=chance)
        self._sample = -1
        self._num_decisions = 0

    def step(self) -> dict[str, Any]:
        """One step of training: what there is to say about it."""
        self._follow(self.emulation.sample(self.num_steps))
        DEVICE.begin_step(1.0)
        loss = self.engine(input_ids=self.batch, labels=self.batch).loss
        self.engine.backward(loss)
        self.engine.step()
        record = {
            "step": self.num_steps,
            "loss": loss.item(),
            "expert_s": [layer.experts.taken_s for layer in self.layers],
            "decisions": self._decisions(),
        }
        self.num_steps += 1
        for layer in self.layers:
            layer.experts.taken_s = 0.0
        return record

    def _follow(self, sample: int) -> None:
        if sample == self._sample:
            return
        self._sample = sample
        for number, layer in enumerate(self.layers):
            layer.router.follow(self.emulation.chosen(sample, number, dist.get_rank(), dist.get_world_size()))

    def _decisions(self) -> list[dict[str, Any]]:
        """Those after this step."""
        known = self.engine.decisions.decisions if hasattr(self.engine, "decisions") else []
        new, self._num_decisions = known[self._num_decisions :], len(known)
        return new


if __name__ == "__main__":
    main(Path(sys.argv[1]))
