"""What loops written for other engines do between the steps of an asynchronous one: nothing of it changes a number."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.comm.host_barrier import HostBarrier, wait_for_hosts
from support.accidents import Running
from support.jobs import ds_config, model_config, step_batches
from support.ranks import RankError, launch, run_ranks

TESTS = Path(__file__).parents[1]
MULTI = {"type": "multidirection"}


def make(model: Any = None, optimizer: Any = None, schedule: Any = MULTI, **changes: Any) -> Any:
    import paceline

    section = {"pipeline": {"stages": 4, "partition": "uniform", "schedule": schedule}}
    config = ds_config(gradient_accumulation_steps=8, paceline=section, **changes)
    if optimizer is not None:
        del config["optimizer"]
    engine, *_ = paceline.initialize(model=model or model_config("llama"), config=config, optimizer=optimizer)
    return engine


def data(count: int = 9) -> Any:
    return chain.from_iterable(step_batches(step) for step in range(count))


def dropping() -> Any:
    return make(
        model_config("gpt2", resid_pdrop=0.3, embd_pdrop=0.1),
        pipeline={"activation_checkpoint_interval": 1},
    )


def interrupted(habit: str) -> Any:
    """Losses and the last norm of a few steps, with and without the habit."""
    found = []
    for has_it in (False, True):
        torch.manual_seed(0)
        engine, batches, losses = dropping(), data(), []
        for _ in range(3):
            losses.append(engine.train_batch(batches).item())
            if has_it and habit == "zero_grad":
                engine.zero_grad()
        if has_it and habit == "eval":
            engine.eval()  # before the flush, which recomputes what was computed in training
        evaluation = engine.evaluate(step_batches(50)[:4])["eval_loss"]
        found.append((losses, evaluation, float(engine.grad_norm())))
        engine.destroy()
    return found


@pytest.mark.parametrize("habit", ["zero_grad", "eval"])
def test_what_a_loop_does_between_steps_changes_nothing(habit: str) -> None:
    for without, with_it in run_ranks(interrupted, 4, habit):
        assert with_it == without


def rate_of(step: int) -> float:
    return 0.5**step


def with_rates_of_steps(by_hand: bool) -> Any:
    """Rates, losses and weights of a run whose rate halves with each step."""
    import paceline

    def halving(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    config = ds_config(gradient_accumulation_steps=8, optimizer={"type": "SGD", "params": {"lr": 1.0}})
    config["paceline"] = {"pipeline": {"stages": 2, "schedule": "one_direction"}}
    engine, *_ = paceline.initialize(
        model=model_config("llama"), config=config, lr_scheduler=None if by_hand else halving
    )
    batches, losses, rates = data(), [], []
    for step in range(4):
        if by_hand:
            for group in engine.optimizer.param_groups:
                group["lr"] = rate_of(step)
        rates.append(engine.get_lr()[0])
        losses.append(engine.train_batch(batches))
    engine.flush()
    weights = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    engine.destroy()
    return rates, [loss.item() for loss in losses], weights


def test_each_update_has_the_learning_rate_of_its_step_on_all_stages() -> None:
    """The first stage's gradients of a step are complete when the loop has set the rate of the next one."""
    wanted, found = run_ranks(with_rates_of_steps, 2, False), run_ranks(with_rates_of_steps, 2, True)
    for (rates, losses, weights), (own_rates, own_losses, own_weights) in zip(wanted, found, strict=True):
        assert rates == own_rates == [rate_of(step) for step in range(4)]
        assert losses == own_losses
        assert all(torch.equal(weight, own_weights[name]) for name, weight in weights.items())


class DevicesWork:
    """Work of a GPU beside the computation that it waits for: updates whose hosts are past their barrier."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._runs = False
        self.num_tasks = 0

    def host_barrier(self, world: Any, device: torch.device) -> HostBarrier:
        """In place of :func:`paceline.comm.host_barrier.host_barrier`, on a CPU."""
        return lambda group: self._leave_host(partial(wait_for_hosts, world, group))

    def _leave_host(self, wait: Callable[[], None]) -> None:
        self._note(False)
        wait()
        self._note(True)

    def run(self, queue: Any, task: Any) -> None:
        """In place of a queue's own."""
        self._run(queue, task)
        self.num_tasks += 1
        self._note(False)

    def _note(self, runs: bool) -> None:
        with self._changed:
            self._runs = runs
            self._changed.notify_all()

    def wait(self) -> None:
        """As a host does when it pins memory, or for ``torch.cuda.synchronize()``."""
        with self._changed:
            is_idle = self._changed.wait_for(lambda: not self._runs, 300)
            assert is_idle, "it waits for a rank that waits for this one"

    def stand_in(self) -> None:
        from paceline.optim.task_queue import TaskQueue
        from paceline.runtime import assembly

        def run(queue: Any, task: Any) -> None:
            self.run(queue, task)

        self._run, TaskQueue._run = TaskQueue._run, run  # type: ignore[method-assign]
        assembly.host_barrier = self.host_barrier


def waits_for_its_device() -> tuple[list[list[float]], int]:
    """Losses without and with waits for the device, before each message and after each step."""
    from paceline.comm.transport import Lane

    work, found, send = DevicesWork(), [], Lane.send

    def send_from_pinned_memory(lane: Lane, *args: Any) -> None:
        work.wait()
        send(lane, *args)

    for habit in ("no waits", "one iterator", "new ones"):
        if habit == "one iterator":
            work.stand_in()
            Lane.send = send_from_pinned_memory  # type: ignore[method-assign]
        engine, batches, losses = make(schedule="one_direction"), data(), []
        for step in range(4):
            source = iter(step_batches(step)) if habit == "new ones" else batches
            losses.append(engine.train_batch(source))
            if habit != "no waits":
                work.wait()
        engine.flush()
        found.append([loss.item() for loss in losses])
        engine.destroy()
    return found, work.num_tasks


def test_a_host_may_wait_for_its_device() -> None:
    for (plain, *waited), num_tasks in run_ranks(waits_for_its_device, 4):
        assert waited == [plain, plain]
        assert num_tasks >= 16  # a reduction and an update a step


def freezes() -> None:
    import paceline

    pipeline = {"stages": 2, "schedule": {"type": "one_direction"}, "recompute": 1}
    config = ds_config(gradient_accumulation_steps=8, paceline={"pipeline": pipeline})
    engine = paceline.initialize(model=model_config("llama"), config=config)[0]
    batches = data()
    engine.train_batch(batches)
    engine.flush()
    first = [parameter for name, parameter in engine.module.named_parameters() if ".layers.0." in name]
    for trains in (False, True):  # the second time without a flush
        for parameter in first:
            parameter.requires_grad_(trains)
        engine.train_batch(batches)


def test_layers_that_are_recomputed_are_frozen_after_a_flush() -> None:
    with pytest.raises(RankError, match=r"if parameters were .* trained again .* call engine.flush\(\) before"):
        run_ranks(freezes, 2)


def shuffles() -> list[float]:
    """Each rank has a loader of its own: the same order comes from the same generator."""
    torch.manual_seed(0)
    engine = make()
    rows = [row for step in range(4) for row in step_batches(step, "prompt")]
    loader = torch.utils.data.DataLoader(rows, batch_size=None, shuffle=True)
    batches = iter(loader)
    losses = [engine.train_batch(batches).item() for _ in range(3)]
    engine.flush()
    again = [engine.train_batch(iter(loader)).item()]
    engine.flush()
    return losses + again


def test_shuffling_loaders_stay_alike_on_all_ranks() -> None:
    ranks = run_ranks(shuffles, 4)
    assert ranks[0] == ranks[1] == ranks[2] == ranks[3]


def has_an_unused_parameter() -> list[list[float]]:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config("llama"))
    model.model.layers[0].self_attn.extra = torch.nn.Parameter(torch.ones(8))

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        if int(torch.distributed.get_rank()) % 2:
            parameters.reverse()  # nobody promised an order
        return torch.optim.AdamW(parameters, lr=1e-2)

    engine, batches = make(model, optimizer), data()
    losses = [engine.train_batch(batches).item() for _ in range(3)]
    engine.flush()
    return [losses] + [p.tolist() for n, p in engine.module.named_parameters() if n.endswith("extra")]


def test_ranks_may_name_parameters_in_different_orders() -> None:
    ranks = run_ranks(has_an_unused_parameter, 4)
    assert all(losses == ranks[0][0] for losses, *_ in ranks)
    assert sum(len(extra) for _, *extra in ranks) == 2  # its stage is on two devices
    assert len({tuple(value) for _, *extra in ranks for value in extra}) == 1


def looks_at_masters() -> list[str]:
    from deepspeed.utils import safe_get_full_fp32_param

    engine, batches, told = make(zero_optimization={"stage": 1}), data(), []
    named = {engine.module.state_name(n): p for n, p in engine.module.named_parameters() if p.dim() == 2}
    parameter = named[min(named)]  # all that have it look together
    engine.train_batch(batches)
    try:
        safe_get_full_fp32_param(parameter)
    except RuntimeError as error:
        told.append(str(error))
    engine.flush()
    told.append(str(torch.equal(safe_get_full_fp32_param(parameter), parameter.detach())))
    engine.train_batch(batches)
    engine.flush()
    return told


def test_masters_can_be_seen_between_steps_only() -> None:
    for told in run_ranks(looks_at_masters, 4):
        assert told == ["steps are under way, and their updates with them: call engine.flush() first.", "True"]


def ends(schedule: str) -> list[list[float]]:
    """Sums of this rank's weights after three steps, and at their end: flushed, and destroyed."""
    sums = []
    for how in ("flush", "destroy"):
        engine, batches = make(schedule=schedule), data()
        parameters = list(engine.module.parameters())
        for _ in range(3):
            engine.train_batch(batches)
        sums.append([])
        for act in (lambda: None, engine.flush if how == "flush" else engine.destroy):
            act()
            sums[-1].append(sum(float(parameter.double().sum()) for parameter in parameters))
        engine.destroy()
    return sums


@pytest.mark.parametrize("schedule", ["multidirection", "one_direction"])
def test_destroying_an_engine_finishes_its_steps(schedule: str) -> None:
    for flushed, destroyed in run_ranks(ends, 4, schedule):
        assert flushed == destroyed
        assert flushed[0] != flushed[1], "nothing was under way"


LEAVES = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from itertools import chain
import paceline
from support.jobs import ds_config, model_config, step_batches
section = {{"pipeline": {{"stages": 2, "partition": "uniform", "schedule": {{"type": "multidirection"}}}}}}
config = ds_config(gradient_accumulation_steps=4, paceline=section)
engine, *_ = paceline.initialize(model=model_config("llama"), config=config)
data = chain.from_iterable(step_batches(step)[:4] for step in range(9))
for step in range(3):
    loss = engine.train_batch(data)
print("rank", engine.global_rank, "saw", float(loss))
"""


@pytest.mark.launcher
@pytest.mark.skipif(sys.platform != "linux", reason="the launcher starts CPU ranks with gloo on Linux")
def test_a_script_may_end_while_updates_are_under_way(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES)
    done = launch([str(tmp_path / "leaves.py")], 2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("saw") == 2


def leaves_early(leave_s: float) -> None:
    """Two steps, and on rank 0 a third one; then what an interpreter does as it ends."""
    import paceline
    from paceline.runtime import asynchronous_run

    asynchronous_run.LEAVE_S = timedelta(seconds=leave_s)
    config = ds_config(paceline={"pipeline": {"stages": 2, "schedule": {"type": "one_direction"}}})
    engine = paceline.initialize(model=model_config("llama"), config=config)[0]
    batches = chain.from_iterable(step_batches(step)[:4] for step in range(9))
    try:
        for _ in range(3 - engine.global_rank):
            engine.train_batch(batches)
    finally:
        atexit._run_exitfuncs()
    os._exit(0)


def test_nobody_waits_long_for_one_that_goes_on() -> None:
    """Rank 1's script ends a step early: the job ends, and does not hang until gloo gives up after half an hour."""
    running = Running(leaves_early, 2, 2.0)
    try:
        ended = running.end()
    finally:
        running.kill()
    assert ended.codes == [1, 0], "\n".join(ended.outputs)
    assert "not all ranks came to the end of training" in ended.outputs[1]
