"""What becomes of an average, in engines: each rule beside two jobs that are averaged by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from support.archipelago import (
    TOKENS,
    Island,
    assert_equal,
    assert_near,
    config_of,
    lighthouses,
    run_islands,
    weights_of,
)
from support.jobs import MICRO_BATCHES, model_config, step_batches
from support.ranks import run_ranks

MEAN = {"min_islands": 2, "first_round": "mean"}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "nesterov": ({"outer": "nesterov", "every_tokens": 2 * TOKENS}, {}, 5),
    "nesterov, parts": ({"outer": "nesterov", "parts": 3, "every_tokens": 3 * TOKENS}, {}, 7),
    "overlap": ({"overlap_steps": 2, "every_tokens": 3 * TOKENS}, {}, 7),
    "reset": ({"optimizer_state": "reset", "every_tokens": 2 * TOKENS}, {}, 5),
    "average, SGD": ({"optimizer_state": "average", "every_tokens": 2 * TOKENS, "scale_learning_rate": False}, SGD, 5),
    "combined, one step more": ({"combine_rounds": 2, "every_tokens": 2 * TOKENS}, {}, 7),
    "rate": ({"decay_tokens": 16 * TOKENS, "every_tokens": 2 * TOKENS}, SGD, 5),
}
"""The section, the config, and how many steps."""


def engine_of(light: str, averaging: dict[str, Any] | None, changes: dict[str, Any]) -> Any:
    import paceline

    config = config_of(light, 1, averaging, gradient_accumulation_steps=MICRO_BATCHES, **changes)
    return paceline.initialize(model=model_config(num_hidden_layers=2), config=config)[0]


def train_step(engine: Any, island: int, step: int) -> float:
    return float(engine.train_batch(iter(step_batches(1000 * island + step, "plain"))))


def island(lights: list[str], number: int) -> dict[str, tuple[list[float], dict[str, Tensor], list[float]]]:
    """Losses, final weights and learning rates as scheduled, of each case."""
    found = {}
    for light, (name, (section, changes, steps)) in zip(lights, CASES.items(), strict=True):
        engine = engine_of(light, {**MEAN, **section}, changes)
        losses = [train_step(engine, number, step) for step in range(steps)]
        engine.finish_averaging()
        found[name] = losses, weights_of(engine), engine.get_lr()
        engine.destroy()
    return found


class ByHand:
    """Two jobs in one process."""

    def __init__(self, section: dict[str, Any], changes: dict[str, Any]) -> None:
        self.section = section
        self.engines = [engine_of("", None, changes) for _ in range(2)]
        self.values = [dict(self._named(engine)) for engine in self.engines]
        self.names = sorted(self.values[0])
        self.anchors = {name: self.values[0][name].clone() for name in self.names}
        self.momenta = {name: torch.zeros_like(tensor) for name, tensor in self.anchors.items()}
        self.averages: list[dict[str, Tensor]] = []
        self.round, self.step = 0, 0
        self.sent_at: dict[int, int] = {}

    @staticmethod
    def _named(engine: Any) -> Any:
        from paceline.state.named import names_of

        return ((name, parameter.data) for parameter, name in names_of(engine.module).items())

    def part(self) -> list[str]:
        """Of about equal size."""
        from paceline.averaging.rules import parts_of

        parts = parts_of([self.anchors[name].numel() for name in self.names], self.section.get("parts", 1))
        return [self.names[i] for i in parts[self.round % len(parts)]]

    def snapshot(self) -> list[dict[str, Tensor]]:
        return [{name: value.clone() for name, value in values.items()} for values in self.values]

    def average(self, sent: list[dict[str, Tensor]] | None = None, sent_at: int | None = None) -> None:
        """A round of what they had when they sent it; at the end of training it may be of a shorter period."""
        part, every = self.round % self.section.get("parts", 1), self.section["every_tokens"] // TOKENS
        at = self.step if sent_at is None else sent_at
        period = 1.0 if sent_at is not None else (at - self.sent_at.get(part, 0)) / every
        if not period:
            return
        self.sent_at[part] = at
        for name in self.part():
            snapshot = [values[name].clone() for values in self.values]
            one, other = snapshot if sent is None else [values[name] for values in sent]
            new = (one + other) / 2
            if self.section.get("outer") == "nesterov":
                change = self.anchors[name] - new
                kept = 0.9**period * self.momenta[name]
                new = self.anchors[name] - 0.7 * (change + 0.9 * (change + period * kept))
                self.momenta[name] = kept + change
                self.anchors[name] = new
            for values, own in zip(self.values, (one, other), strict=True):
                values[name].add_(new - own) if sent is not None else values[name].copy_(new)
            self.anchors[name] = new
        self.round += 1
        self.averages.append({name: tensor.clone() for name, tensor in self.anchors.items()})
        self._states()

    def _states(self) -> None:
        kind = self.section.get("optimizer_state")
        both = [
            {owned.name: engine.optimizer.state[owned.master] for owned in engine.optimizer.owned}
            for engine in self.engines
        ]
        if kind == "reset":
            for engine in self.engines:
                engine.optimizer.state.clear()
        elif kind == "average":
            for name, one in both[0].items():
                other = both[1][name]
                for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
                    if key in one:
                        mean = (one[key] + other[key]) / 2
                        one[key].copy_(mean)
                        other[key].copy_(mean)

    def train(self, step: int) -> list[float]:
        if (decay := self.section.get("decay_tokens")) is not None:
            for engine in self.engines:
                for group in engine.optimizer.param_groups:
                    group["lr"] = 0.1 * 2 * 10 ** -min(1.0, 2 * step * TOKENS / decay)
        self.step = step + 1
        return [train_step(engine, number, step) for number, engine in enumerate(self.engines)]


def by_hand() -> dict[str, Any]:
    found = {}
    for name, (section, changes, steps) in CASES.items():
        jobs = ByHand(section, changes)
        every = section["every_tokens"] // TOKENS // section.get("parts", 1)
        overlap, sent, sent_at, losses = section.get("overlap_steps", 0), None, 0, []
        for step in range(steps):
            losses.append(jobs.train(step))
            if (step + 1) % every == overlap and overlap and step + 1 > every:
                jobs.average(sent, sent_at)
                sent = None
            if (step + 1) % every == 0:
                sent, sent_at = jobs.snapshot(), step + 1
                if not overlap:
                    jobs.average(None, sent_at)
        if sent is not None and overlap:
            jobs.average(sent, sent_at)
        for _ in range(section.get("parts", 1)):
            jobs.average()
        final = jobs.values
        if section.get("combine_rounds"):
            oldest, one, other = jobs.averages[-3:]
            share = steps % every / every  # of a period, since the last whole one
            weights = (0.0, 1.0, 1.0) if not share else (1 - share, 1.0, share)
            terms = zip(weights, (oldest, one, other), strict=True)
            final = [_sum([{n: t * w for n, t in model.items()} for w, model in terms], 2)] * 2
        found[name] = losses, [{n: v.clone() for n, v in values.items()} for values in final]
        for engine in jobs.engines:
            engine.destroy()
    return found


def _sum(models: list[dict[str, Tensor]], divisor: int) -> dict[str, Tensor]:
    return {name: torch.stack([model[name] for model in models]).sum(0) / divisor for name in models[0]}


def test_a_rule_is_what_it_is_by_hand() -> None:
    with lighthouses(len(CASES)) as lights:
        islands = [ranks[0] for ranks in run_islands([Island(island, 1, (lights, number)) for number in range(2)])]
    for case, (losses, weights) in run_ranks(by_hand, 1)[0].items():
        print("case", case)
        assert_equal(islands[0][case][1], islands[1][case][1])
        for number, found in enumerate(islands):
            assert found[case][0] == pytest.approx([both[number] for both in losses], rel=1e-5)
            assert_near(found[case][1], weights[number], 1e-5)
            assert found[case][2] == [0.1 if "optimizer" in CASES[case][1] else 1e-3]  # the scheduler sees no factor


EARLY = {"min_islands": 2, "first_round": "mean", "combine_rounds": 2, "combine_weights": "held_out"}


def held_out_loss_of(engine: Any) -> float:
    return float(engine.eval_batch(iter(step_batches(777, "plain"))))


def called_and_combined(lights: list[str], number: int) -> dict[str, Any]:
    """One island has its period after two steps; the other would go on, and comes when it is called.

    Then a model that is combined by its held-out loss, beside the losses of what it is combined of.
    """
    changes = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    # The one that is called has time for the step that it is in, however long that takes.
    every, grace_s = (2 * TOKENS, 0.5) if number == 0 else (10**6, 600.0)
    engine = engine_of(lights[0], {**MEAN, "every_tokens": every, "grace_s": grace_s}, changes)
    steps = 0
    while engine.averager.round == 0:
        train_step(engine, number, steps)
        steps += 1
    [exchange] = [each for each in engine.averager.exchanges if each["losses"] == each["losses"]][-1:]
    found = {"steps": steps, "weights": exchange["weights"], "tokens": exchange["tokens"]}
    found["factor"] = engine.averager.learning_rate_factor
    engine.averager.close()
    engine.destroy()

    engine = engine_of(lights[1], {**EARLY, "every_tokens": TOKENS}, changes)
    for step in range(3):
        train_step(engine, number, step)
        if step:
            found[f"loss {step}"] = held_out_loss_of(engine)
    try:
        engine.finish_averaging()
    except ValueError as error:
        found["refused"] = str(error)
    engine.finish_averaging(lambda: held_out_loss_of(engine))
    found["loss"] = held_out_loss_of(engine)
    engine.destroy()
    return found


def test_a_straggler_is_called_and_weights_are_fitted() -> None:
    with lighthouses(2) as lights:
        jobs = [Island(called_and_combined, 1, (lights, number)) for number in range(2)]
        first, second = (ranks[0] for ranks in run_islands(jobs))
    assert first["steps"] == 2
    tokens = [island["tokens"] for island in (first, second)]
    assert tokens == [2 * TOKENS, second["steps"] * TOKENS]
    wanted = [number / sum(tokens) for number in tokens]
    for island in (first, second):
        assert sorted(island["weights"]) == pytest.approx(sorted(wanted))
        assert island["factor"] == 2.0
        assert "there are no held-out data to fit the weights on: give finish_averaging" in island["refused"]
        assert island["loss"] <= min(island["loss 1"], island["loss 2"]) + 1e-6
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-6)
