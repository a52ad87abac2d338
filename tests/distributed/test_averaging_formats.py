"""Islands that send in few bits: they stay together, follow what is exact, and go on from where they were saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from support.archipelago import TOKENS, Island, assert_equal, config_of, lighthouses, run_islands, weights_of
from support.jobs import MICRO_BATCHES, model_config, step_batches

STEPS = 6
EVERY = {"min_islands": 2, "first_round": "mean", "every_tokens": 2 * TOKENS}
CASES: dict[str, dict[str, Any]] = {
    "nesterov, parts": {"outer": "nesterov", "parts": 2},
    "overlap, states": {"overlap_steps": 1, "optimizer_state": "average"},
}


def engine_of(light: str, averaging: dict[str, Any], stages: int) -> Any:
    import paceline

    config = config_of(light, stages, {**EVERY, **averaging}, gradient_accumulation_steps=MICRO_BATCHES)
    return paceline.initialize(model=model_config(num_hidden_layers=2), config=config)[0]


def train(engine: Any, number: int, first: int, last: int) -> None:
    for step in range(first, last):
        engine.train_batch(iter(step_batches(1000 * number + step, "plain")))


def island(lights: list[str], number: int, stages: int, formats: list[str | None]) -> dict[str, Any]:
    """Weights before and after, and bytes of the regular rounds, of each case and format."""
    found = {}
    for light, (name, section, format) in zip(
        lights, ((n, s, f) for n, s in CASES.items() for f in formats), strict=True
    ):
        engine = engine_of(light, {**section, "format": format}, stages)
        before = weights_of(engine)
        train(engine, number, 0, STEPS)
        engine.finish_averaging()
        sent = [each["bytes_sent"] for each in engine.averager.exchanges if each["bytes_sent"]]
        found[name, format] = before, weights_of(engine), sent
        engine.destroy()
    return found


def joined(ranks: list[Any], key: Any, which: int) -> dict[str, Tensor]:
    return {name: tensor for rank in ranks for name, tensor in rank[key][which].items()}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return float(sum((one[name] - other[name]).square().sum() for name in one) ** 0.5)


FORMATS: list[str | None] = [None, "int8", "int4"]


@pytest.fixture(scope="module")
def runs() -> Any:
    """One island of two stages and one of a single stage."""
    with lighthouses(len(CASES) * len(FORMATS)) as lights:
        jobs = [Island(island, ranks, (lights, number, ranks, FORMATS)) for number, ranks in enumerate((2, 1))]
        return run_islands(jobs)


@pytest.mark.parametrize("case", CASES)
def test_few_bits_do_what_exact_averages_do(case: str, runs: Any) -> None:
    first, second = runs
    before, exact = (joined(first, (case, None), which) for which in (0, 1))
    moved = distance(before, exact)
    for format, most in (("int8", 0.03), ("int4", 0.25)):
        own = joined(first, (case, format), 1)
        if case != "overlap, states":  # at the end each has what came during its last steps
            assert_equal(own, joined(second, (case, format), 1))
        assert 0 < distance(own, exact) < most * moved


def test_bytes_are_those_of_the_format(runs: Any) -> None:
    """Without what is exact: the optimizer's states, and the first words of islands that have just come."""
    sent = {format: runs[0][0]["nesterov, parts", format][2] for format in FORMATS}
    assert len(sent["int8"]) == len(sent["int4"]) == len(sent[None]) > 2
    for exact, eight, four in zip(sent[None], sent["int8"], sent["int4"], strict=True):
        assert 3.5 < exact / eight < 4.0
        assert 6.0 < exact / four < 7.2


def whole_and_resumed(lights: list[str], folder: str, number: int) -> list[dict[str, Tensor]]:
    section = {"outer": "nesterov", "format": "int4"}
    engine = engine_of(lights[0], section, 1)
    train(engine, number, 0, STEPS)
    engine.finish_averaging()
    found = [weights_of(engine)]
    engine.destroy()
    engine = engine_of(lights[1], section, 1)
    train(engine, number, 0, 3)
    engine.save_checkpoint(f"{folder}/{number}", tag="three")
    engine.averager.close()
    engine.destroy()
    engine = engine_of(lights[2], section, 1)
    engine.load_checkpoint(f"{folder}/{number}", tag="three")
    train(engine, number, 3, STEPS)
    engine.finish_averaging()
    return [*found, weights_of(engine)]


def test_what_is_left_to_be_sent_is_saved(tmp_path: Path) -> None:
    with lighthouses(3) as lights:
        islands = run_islands([Island(whole_and_resumed, 1, (lights, str(tmp_path), number)) for number in range(2)])
    for [(whole, resumed)] in islands:
        assert_equal(resumed, whole)
