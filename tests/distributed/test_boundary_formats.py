"""Formats of boundaries: what is computed is what rounding at the boundary makes of it, whatever runs the step."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.jobs import LAYERS, MICRO_BATCHES, TINY, ds_config, finetune, flags, model_config, step_batches
from support.ranks import run_ranks

STEPS = 3
INT8 = {"forward": "int8", "backward": "int8"}
CUT = [0, 3, 6]
"""Embedding and two layers, two layers and head."""


def make_engine(boundary: Any, schedule: Any = None, family: str = "llama", partition: Any = None, **more: Any) -> Any:
    import paceline

    stages = len(partition or CUT) - 1
    replicas = int(os.environ["WORLD_SIZE"]) // stages
    config = ds_config(
        gradient_accumulation_steps=MICRO_BATCHES // replicas,
        paceline={
            "pipeline": {
                "stages": stages,
                "partition": partition or CUT,
                "schedule": schedule,
                "boundary": boundary,
            }
        },
        **more,
    )
    return paceline.initialize(model=model_config(family, tie_word_embeddings=False), config=config)[0]


def steps_of(engine: Any, first: int, last: int, kind: str = "padded") -> list[float]:
    replica, replicas = engine.grid.data_parallel_id, engine.dp_world_size
    batches = (step_batches(step, kind)[replica::replicas] for step in range(first, last))
    return [engine.train_batch(iter(batch)).item() for batch in batches]


def weights(engine: Any) -> dict[str, Tensor]:
    return {engine.module.state_name(n): p.detach().clone() for n, p in engine.module.named_parameters()}


def train(boundary: Any, schedule: Any = None, order: str | None = None, kind: str = "padded", **more: Any) -> Any:
    from paceline.runtime.engine import PacelineEngine

    PacelineEngine.transport_order = order
    engine = make_engine(boundary, schedule, **more)
    losses = steps_of(engine, 0, STEPS, kind)
    if getattr(engine, "flush", None) is not None:
        engine.flush()
    sizes = {name: lane.records[-1].num_bytes for name, lane in engine.links.transports[0].lanes().items()}
    found = {"losses": losses, "weights": weights(engine), "sizes": sizes}
    engine.destroy()
    return found


# -- against one process that rounds -----------------------------------------------------------------------------------


class Rounded(torch.autograd.Function):
    """What a boundary does to activations and to their gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: str, backward: str) -> Tensor:
        from paceline.comm.formats import BoundaryFormats, pack, unpack

        formats = BoundaryFormats.named(forward, backward)
        assert formats.forward is not None
        ctx.format = formats.backward
        return unpack(pack(tensor, formats.forward))  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        from paceline.comm.formats import pack, unpack

        return unpack(pack(gradient, ctx.format)), None, None


def train_alone(forward: str, backward: str) -> tuple[list[float], float]:
    """Losses, and a held-out loss without rounding."""
    from paceline.hf.stage import Cut
    from paceline.hf.weights import load_stage

    model = load_stage(None, model_config(tie_word_embeddings=False), Cut.whole(LAYERS)).model
    hook = model.model.layers[1].register_forward_hook(lambda *call: Rounded.apply(call[2], forward, backward))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        batches = step_batches(step)
        tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        parts = [model(**batch, num_items_in_batch=tokens, use_cache=False).loss for batch in batches]
        for part in parts:
            part.backward()
        losses.append(float(sum(parts)))
        optimizer.step()
        optimizer.zero_grad()
    hook.remove()
    held_out = step_batches(50)
    tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in held_out)
    with torch.no_grad():
        return losses, float(sum(model(**b, num_items_in_batch=tokens, use_cache=False).loss for b in held_out))


def train_and_evaluate(boundary: Any) -> tuple[list[float], float]:
    engine = make_engine(boundary)
    losses = steps_of(engine, 0, STEPS)
    return losses, engine.evaluate(step_batches(50))["eval_loss"]


@pytest.mark.parametrize(
    ("forward", "backward"), [("bf16", "bf16"), ("int8", "int8"), ("fp8_e4m3", "int8"), ("int4", "int4")]
)
def test_a_step_is_that_of_one_process_that_rounds(forward: str, backward: str) -> None:
    """An evaluation does not round: it is of the model that will be used."""
    wanted, held_out = run_ranks(train_alone, 1, forward, backward)[0]
    for losses, evaluated in run_ranks(train_and_evaluate, 2, {"forward": forward, "backward": backward}):
        assert losses == pytest.approx(wanted, rel=1e-6)
        assert evaluated == pytest.approx(held_out, rel=1e-6)


# -- among themselves --------------------------------------------------------------------------------------------------


def trained(*cases: dict[str, Any]) -> list[Any]:
    return [train(**case) for case in cases]


def assert_equal(found: list[Any], names: list[str]) -> None:
    for name, other in zip(names, found, strict=True):
        assert other["losses"] == found[0]["losses"], name
        assert all(torch.equal(tensor, found[0]["weights"][key]) for key, tensor in other["weights"].items()), name


def test_no_bit_depends_on_what_runs_the_step() -> None:
    """Among them the paired order, messages in another sequence, and backwards of inputs and weights apart."""
    cut = [0, 2, 4, 6]
    common = {"boundary": INT8, "family": "mixtral", "kind": "ragged", "partition": cut}
    cases = [
        common,
        {**common, "order": "paired"},
        *({**common, "schedule": schedule} for schedule in ({"type": "kfkb", "k": 2}, "zbh1")),
        {**common, "pipeline": {"activation_checkpoint_interval": 1}},
    ]
    for found in run_ranks(trained, 3, *cases):
        assert_equal(found, [str(case) for case in cases])


def test_nothing_is_rounded_unless_asked() -> None:
    cases = [{"boundary": boundary} for boundary in (None, {}, {"forward": "int8"}, {"backward": "int8"})]
    first, second = run_ranks(trained, 2, *cases)
    assert_equal(first[:2], ["left out", "empty"])
    plain, _, forward, backward = first
    assert forward["losses"] != plain["losses"]
    assert (backward["losses"][0], backward["losses"] != plain["losses"]) == (plain["losses"][0], True)
    sizes = [{**of_first["sizes"], **of_second["sizes"]} for of_first, of_second in zip(first, second, strict=True)]
    values, rows, side = 2 * 16 * 32, 2 * 16, 4 * 2 * 16
    whole, small = 4 * values, values + 4 * rows
    wanted = [(whole + side, whole), (whole + side, whole), (small + side, whole), (whole + side, small)]
    assert [(found["activations_out"], found["gradients_in"]) for found in sizes] == wanted


def test_replicas_and_updates_that_come_late_train_too() -> None:
    plain, halves = run_ranks(trained, 4, {"boundary": None}, {"boundary": INT8, "zero_optimization": {"stage": 1}})[0]
    assert halves["losses"] == pytest.approx(plain["losses"], rel=2e-3)
    for schedule in ("one_direction", {"type": "multidirection"}):
        cases = [{"boundary": boundary, "schedule": schedule} for boundary in (None, INT8)]
        exact, rounded = run_ranks(trained, 2, *cases)[0]
        assert rounded["losses"] != exact["losses"]
        assert rounded["losses"] == pytest.approx(exact["losses"], rel=2e-3)


def whole_and_resumed(folder: str) -> list[Any]:
    engine = make_engine(INT8)
    steps_of(engine, 0, 1)
    engine.save_checkpoint(folder, tag="one")
    whole = steps_of(engine, 1, STEPS), weights(engine)
    other = make_engine(INT8)
    other.load_checkpoint(folder, tag="one")
    return [whole, (steps_of(other, 1, STEPS), weights(other))]


def test_resume_is_bitwise(tmp_path: Path) -> None:
    for (losses, state), (again, other) in run_ranks(whole_and_resumed, 2, str(tmp_path)):
        assert again == losses
        assert all(torch.equal(other[name], tensor) for name, tensor in state.items())


def moved() -> list[Any]:
    """Layers move between two steps; and one that was cut so from the start, from the same weights on."""
    engine = make_engine(INT8, partition=[0, 2, 6])
    engine.repartition(CUT)
    found = steps_of(engine, 0, STEPS), weights(engine)
    other = make_engine(INT8)
    return [found, (steps_of(other, 0, STEPS), weights(other))]


def test_layers_that_move_take_the_boundary_with_them() -> None:
    for (losses, state), (again, other) in run_ranks(moved, 2):
        assert again == losses
        assert all(torch.equal(other[name], tensor) for name, tensor in state.items())


def chosen() -> tuple[list[str], list[int], list[float]]:
    """The first step of a run is in one format, the next in another, as the tuner would have it."""
    from paceline.planning.candidates import Candidate

    engine = make_engine({"allowed": ["int8", "int4"]}, {"type": "adaptive", "retune_every": 1000})
    names, sizes, losses, noted = [], [], [], 0
    for step, name in enumerate(("", "int8", "int4", "")):
        engine.run_candidate(Candidate(2, boundary=name))
        losses += steps_of(engine, step, step + 1)
        names.append(engine.schedule.name)
        lane = next(lane for name, lane in engine.links.transports[0].lanes().items() if name.startswith("activations"))
        deadline = time.monotonic() + 60
        while len(lane.records) < noted + MICRO_BATCHES and time.monotonic() < deadline:
            time.sleep(0.01)  # its thread notes them when it comes to it
        noted = len(lane.records)
        sizes.append(lane.records[-1].num_bytes)
    return names, sizes, losses


def test_a_format_may_be_chosen_between_steps() -> None:
    rounded, exact = run_ranks(chosen, 2), run_ranks(trained, 2, {"boundary": None})[0][0]
    for names, sizes, losses in rounded:
        assert names == [
            f"1f1b, micro-batch 2{more}" for more in ("", ", int8 between stages", ", int4 between stages", "")
        ]
        assert [size - 128 for size in sizes] == [4096, 1152, 768, 4096]
        assert losses[0] == exact["losses"][0]
        assert losses[:STEPS] == pytest.approx(exact["losses"], rel=1e-2)
        assert losses[1] != exact["losses"][1]


def test_the_job_reports_what_is_rounded_away(tmp_path: Path) -> None:
    config, output = tmp_path / "ds.json", tmp_path / "model"
    pipeline = {"stages": 2, "boundary": {"forward": "int8", "backward": "int4"}}
    config.write_text(json.dumps({"gradient_accumulation_steps": 2, "paceline": {"pipeline": pipeline}}))
    for code, errors in run_ranks(finetune, 2, flags(**TINY, deepspeed=config, output_dir=output)):
        assert code == 0, errors
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    told = [line["boundary_error"] for line in lines if "boundary_error" in line]
    assert len(told) == TINY["max_steps"] // TINY["logging_steps"]
    for found in told:
        (forward,), (backward,) = found["forward"], found["backward"]
        assert 1e-3 < forward < 2e-2
        assert 3e-2 < backward < 2e-1
