"""Experts on several ranks of a stage change nothing: pipelines × expert-parallel × data-parallel are one process."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint import Checkpoint
from paceline.launch.cli import main
from support.errors import runtime_errors
from support.expert_pipelines import (
    DEEPSEEK,
    Case,
    joined,
    make,
    model_config,
    most_in_empty_slots,
    order,
    packed,
    shuffle,
    shuffled,
    state,
    steps,
)
from support.jobs import (
    BATCH,
    LENGTH,
    MICRO_BATCHES,
    TINY,
    ds_config,
    finetune,
    flags,
    step_batches,
    wait_for_what_is_sent_ahead,
)
from support.ranks import run_ranks

STEPS = 4

DENSE_FIRST = Case("deepseek_v3", zero=1, clipping=0.5)
RECOMPUTED = Case("deepseek_v3", checkpointing=True)
BF16 = Case(zero=1, clipping=0.5, dtype="bf16")
FIVE = Case(zero=1, clipping=0.5, num_experts=5)
SIX = Case("deepseek_v3", clipping=0.5, checkpointing=True, num_experts=6)
FIVE_BF16 = FIVE._replace(dtype="bf16")
FIVE_ON_THREE = FIVE._replace(zero=0, micro_batches=6)
CASES = (DENSE_FIRST, RECOMPUTED, BF16, FIVE, SIX, FIVE_BF16, FIVE_ON_THREE)


def train(cases: list[Case], stages: int, experts: int) -> dict[Case, dict[str, Any]]:
    """Experts that are no multiple of the ranks that share them move: some ranks have more, others fewer or none."""
    found = {}
    for case in cases:
        moves = case.num_experts % experts > 0
        engine = make(case, stages, experts, **({"moe": {"rebalance_every": 0, "replicas": 1}} if moves else {}))
        losses, norms = [], []
        for step in range(STEPS):
            if moves and step == 1:
                engine.place_experts(dict.fromkeys(engine.expert_layers, packed(case.num_experts, experts)))
            losses += steps(engine, step, 1)
            norms.append(engine.grad_norm())
        replica, replicas = engine.grid.data_parallel_id, engine.dp_world_size
        # Replicas have different numbers of micro-batches; in the second evaluation all but one have none.
        held_out = step_batches(STEPS)[: MICRO_BATCHES - 1]
        evaluations = [engine.evaluate(held_out[replica::replicas]), engine.evaluate(held_out[:1] * (replica == 0))]
        kept = {name: layer.num_slots for name, layer in engine.expert_layers.items()}
        found[case] = {
            "losses": losses,
            "norms": norms,
            "evaluations": evaluations,
            "state": state(engine),
            "kept": kept,
            "empty": most_in_empty_slots(engine),
        }
        engine.destroy()
    return found


@lru_cache
def alone() -> dict[Case, dict[str, Any]]:
    """One rank with all experts, itself proven to be Hugging Face's own model (test_pipeline_parity.py)."""
    return run_ranks(train, 1, list(CASES), 1, 1)[0]


@pytest.mark.parametrize(
    ("stages", "experts", "replicas", "cases"),
    [
        (1, 2, 2, [DENSE_FIRST]),
        (2, 2, 2, [DENSE_FIRST, RECOMPUTED, BF16]),
        (1, 2, 4, [FIVE]),
        (1, 4, 4, [SIX, FIVE_BF16]),
        (1, 3, 3, [FIVE_ON_THREE]),
    ],
)
def test_experts_on_several_ranks_change_nothing(stages: int, experts: int, replicas: int, cases: list[Case]) -> None:
    ranks = run_ranks(train, stages * replicas, cases, stages, experts)
    for case in cases:
        found, wanted = [rank[case] for rank in ranks], alone()[case]
        exact = case.dtype == "fp32"
        assert any(rank["kept"] for rank in found)
        assert all(slots == -(-case.num_experts // experts) for rank in found for slots in rank["kept"].values())
        assert all(rank["empty"] == 0.0 for rank in found)
        for rank in found:
            assert rank["losses"] == found[0]["losses"]
            assert rank["losses"] == pytest.approx(wanted["losses"], rel=1e-6 if exact else 2e-3), case
            assert rank["norms"] == pytest.approx(wanted["norms"], rel=1e-5 if exact else 5e-2), case
            for one, other in zip(rank["evaluations"], wanted["evaluations"], strict=True):
                assert one["eval_loss"] == pytest.approx(other["eval_loss"], rel=1e-6 if exact else 5e-3)
                assert one["eval_tokens"] == other["eval_tokens"]
        state, whole = joined(found), joined([wanted])
        assert state.keys() == whole.keys()
        for (name, kind), tensor in whole.items():
            # Adam turns the rounding of near-zero gradients into steps of the learning rate.
            atol = {"master": 2e-4, "step": 0.0}.get(kind, 1e-6) if exact else 5e-3
            torch.testing.assert_close(state[name, kind], tensor, rtol=1e-4, atol=atol, msg=f"{case}: {kind} of {name}")


BEFORE, AFTER = 2, 3


def save(root: str, stages: int, experts: int, case: Case) -> list[float]:
    from paceline.comm.control import ControlPlane
    from paceline.runtime.model_export import export

    engine = make(case, stages, experts, moe={"rebalance_every": 0})
    steps(engine, 0, 1)
    shuffle(engine)
    steps(engine, 1, BEFORE - 1)
    engine.save_checkpoint(f"{root}/out", tag="saved")
    export(engine.module, f"{root}/live", ControlPlane.create(stages))
    return steps(engine, BEFORE, AFTER)


def load(root: str, stages: int, experts: int, case: Case) -> list[float]:
    engine = make(case, stages, experts, **({"moe": {"rebalance_every": 0}} if experts == 2 else {}))
    if experts == 2:
        shuffle(engine)
    engine.load_checkpoint(f"{root}/out", tag="saved")
    if experts == 2:
        for layer in engine.expert_layers.values():
            assert layer.placement.devices == order(0, case.num_experts), f"{layer.name} does not lie as it was saved"
    assert most_in_empty_slots(engine) == 0.0
    engine.save_checkpoint(f"{root}/out", tag=f"again-{stages}-{experts}")
    return steps(engine, BEFORE, AFTER)


@pytest.mark.parametrize(
    ("case", "into"),
    [
        (BF16._replace(family="deepseek_v3"), [(2, 1, 2)]),
        (DENSE_FIRST._replace(num_experts=5, micro_batches=6), [(4, 2, 2), (3, 1, 3), (2, 2, 1)]),
    ],
    ids=["bf16", "five"],
)
def test_checkpoint_fits_every_number_of_ranks(case: Case, into: list[tuple[int, int, int]], tmp_path: Path) -> None:
    """Saved with experts in no order, it knows them by their numbers: it loads anywhere, and exports as the model."""
    from transformers import AutoModelForCausalLM

    wanted = run_ranks(save, 4, str(tmp_path), 2, 2, case)[0]
    checkpoint = Checkpoint.open(tmp_path / "out" / "saved")
    assert checkpoint.shape("model.layers.2.mlp.experts.down_proj") == (case.num_experts, 32, 16)
    for world_size, stages, experts in into:
        found = run_ranks(load, world_size, str(tmp_path), stages, experts, case)[0]
        if (world_size, stages, experts) == (4, 2, 2):
            assert found == wanted, "in every bit, as it was saved in this shape"
        assert found == pytest.approx(wanted, rel=1e-5 if case.dtype == "fp32" else 1e-2)
        again = Checkpoint.open(tmp_path / "out" / f"again-{stages}-{experts}")
        assert sorted(again.names) == sorted(checkpoint.names)
        for name in checkpoint.names:
            assert sorted(again.kinds(name)) == sorted(checkpoint.kinds(name))
            for kind in checkpoint.kinds(name):
                assert torch.equal(again.read(name, kind), checkpoint.read(name, kind)), f"{kind} of {name}"

    assert main(["export", str(tmp_path / "out" / "saved"), str(tmp_path / "exported")]) == 0
    live, info = AutoModelForCausalLM.from_pretrained(tmp_path / "live", output_loading_info=True)
    assert not any(info.values()), info
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").state_dict()
    for name, tensor in live.state_dict().items():
        assert torch.equal(tensor, exported[name]), name
        if name in checkpoint.names and case.dtype == "fp32":
            kind = "master" if "master" in checkpoint.kinds(name) else "value"
            assert torch.equal(tensor, checkpoint.read(name, kind)), name


def train_placed(case: Case, schedule: Any) -> list[dict[str, Any]]:
    """Experts in order; in another order in every second step; likewise with copies; where the rebalancer puts them."""
    found = []
    for moves, every, replicas in ((False, 0, 0), (True, 0, 0), (True, 0, 1), (False, 2, 0)):
        pipeline = {"stages": 2, "partition": "uniform", "schedule": schedule}
        engine = make(case, 2, 2, pipeline=pipeline, moe={"rebalance_every": every, "replicas": replicas})
        losses = []
        for step in range(STEPS):
            if moves and step % 2:
                shuffle(engine)
            losses += steps(engine, step, 1)
        assert most_in_empty_slots(engine) == 0.0
        routed = sum(int(layer.routed.sum()) for layer in engine.expert_layers.values())
        windows = len(engine.rebalancer.windows)
        decided = [(decision["step"], decision["stage"]) for decision in engine.rebalancer.decisions]
        found.append(
            {"losses": losses, "state": state(engine), "routed": routed, "windows": windows, "decided": decided}
        )
        engine.destroy()
    return found


@pytest.mark.parametrize(
    ("case", "schedule", "stages"),
    [
        (Case("deepseek_v3", zero=1, num_experts=5), "1f1b", (0, 1)),
        (RECOMPUTED, {"type": "multidirection", "staleness": 0, "directions": 2}, (0,)),
    ],
    ids=["zero1-five", "directions"],
)
def test_where_experts_lie_changes_nothing(case: Case, schedule: Any, stages: tuple[int, ...]) -> None:
    ranks = run_ranks(train_placed, 4, case, schedule)
    in_order, shuffled, copied, rebalanced = ([rank[run] for rank in ranks] for run in range(4))
    whole = joined(in_order)
    for run in (shuffled, rebalanced):
        assert [rank["losses"] for rank in run] == [rank["losses"] for rank in in_order]
        for key, tensor in joined(run).items():
            assert torch.equal(tensor, whole[key]), key
    assert copied[0]["losses"] == pytest.approx(in_order[0]["losses"], rel=1e-6)
    for key, tensor in joined(copied).items():
        atol = 2e-4 if key[1] == "master" else 1e-6
        torch.testing.assert_close(tensor, whole[key], rtol=1e-4, atol=atol, msg=str(key))
    # Each token once for each of its two experts in each of two layers, also where a forward is computed twice.
    assert sum(rank["routed"] for rank in in_order) == STEPS * MICRO_BATCHES * BATCH * LENGTH * 2 * 2
    assert rebalanced[0]["windows"] == STEPS // 2
    # The first rank has the decisions of both stages; devices that hold the same ones decide together.
    decided = [(step, stage) for step in (2, 4) for stage in stages]
    assert [rank["decided"] for rank in rebalanced] == [decided, [], [], []]


WAYS_AHEAD = ("in order", "at once", "ahead", "for nothing", "rebalanced")


def train_ahead(case: Case, ways: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Experts in order; in another order, for which their values were sent before a step, or before a step and for
    nothing; where the rebalancer puts them, which moves whatever it finds to move."""
    from dataclasses import replace

    from paceline.moe import rebalancer
    from paceline.planning.experts import Placement
    from paceline.planning.switching import SwitchRule

    wait_for_what_is_sent_ahead()
    rebalancer.LEAST_BYTES = 1
    consider = SwitchRule.consider
    found: dict[str, dict[str, Any]] = {}
    for way in ways:
        every, schedule = (2, "adaptive") if way == "rebalanced" else (0, "1f1b")
        pipeline = {"stages": 2, "partition": "uniform", "schedule": schedule}
        engine = make(case, 2, 2, pipeline=pipeline, moe={"rebalance_every": every})
        left_out = steps_left_out(engine)
        in_order = {name: layer.placement for name, layer in engine.expert_layers.items()}
        losses, moves, prepared = [], [], []
        if way == "rebalanced":
            SwitchRule.consider = lambda *args: replace(consider(*args), switch=True)
        for step in range(STEPS_AHEAD):
            if step in (1, 3) and way in ("ahead", "for nothing"):
                wanted = shuffled(engine) if step == 1 else in_order
                prepared.append(engine.prepare_experts(wanted))
            if step in (2, 4) and way not in ("in order", "rebalanced"):
                while not engine.experts_are_prepared():
                    pass
                wanted = shuffled(engine) if step == 2 else in_order
                if way == "for nothing" and step == 2:  # others move, and then back
                    other = {
                        name: Placement(layer.placement.devices[::-1], layer.placement.owned[::-1])
                        for name, layer in engine.expert_layers.items()
                    }
                    engine.place_experts(other)
                moves.append(engine.place_experts(wanted))
            losses += steps(engine, step, 1)
        assert most_in_empty_slots(engine) == 0.0
        decisions = [d for d in engine.rebalancer.decisions if d.get("moved")]
        found[way] = {"losses": losses, "state": state(engine), "moves": moves, "prepared": prepared}
        found[way]["decided"] = [(d["step"], d["moved"], d["paused_bytes"], d["num_bytes"]) for d in decisions]
        found[way]["left_out"] = left_out
        engine.destroy()
    return found


STEPS_AHEAD = 6


def steps_left_out(engine: Any) -> list[int]:
    """Steps whose messages say nothing of the links, as they come."""
    steps: list[int] = []
    engine.reports.skip_messages = lambda after: steps.append(engine.global_steps)
    return steps


@pytest.mark.parametrize(
    ("case", "ways"),
    [
        (Case("deepseek_v3", zero=1, num_experts=5), ("in order", "for nothing")),
        (BF16._replace(family="deepseek_v3", zero=1), WAYS_AHEAD),
    ],
    ids=["fp32", "bf16"],
)
def test_values_of_experts_are_sent_ahead(case: Case, ways: tuple[str, ...]) -> None:
    """Before they move, beside steps that change them: every bit is as if they had stayed."""
    ranks = run_ranks(train_ahead, 4, case, ways)
    runs = {way: [rank[way] for rank in ranks] for way in ways}
    in_order = runs["in order"]
    whole = joined(in_order)
    for way, run in runs.items():
        assert [rank["losses"] for rank in run] == [rank["losses"] for rank in in_order], way
        for key, tensor in joined(run).items():
            assert torch.equal(tensor, whole[key]), (way, key)
    assert all(rank["prepared"] == [True, True] for rank in runs["for nothing"])
    if ways != WAYS_AHEAD:
        return
    for rank, other in zip(runs["ahead"], runs["at once"], strict=True):
        assert rank["prepared"] == [True, True]
        for move, plain in zip(rank["moves"], other["moves"], strict=True):
            assert move["moved"] == plain["moved"] > 0
            assert move["num_bytes"] >= plain["num_bytes"]
            assert 0 < move["paused_bytes"] < 0.6 * plain["paused_bytes"], "what steps changed"
    rebalanced = runs["rebalanced"]
    assert rebalanced[0]["decided"], "something moved"
    assert all(rank["left_out"] == rebalanced[0]["left_out"] for rank in rebalanced)
    for step, *_ in rebalanced[0]["decided"]:  # values come beside it, all else beside the next
        assert {step, step + 1} & set(range(STEPS_AHEAD)) <= set(rebalanced[0]["left_out"])


LATE = 8
"""Steps without a flush."""


def train_late(case: Case, pipeline: dict[str, Any], run: str) -> list[dict[str, Any]]:
    """Experts where the rebalancer puts them, in order, in another order, with copies, all drained after some steps.

    The rebalancer moves whatever it finds to move: that drains the run. Every step of it is recorded.
    """
    from dataclasses import replace

    from paceline.planning.switching import SwitchRule

    consider = SwitchRule.consider
    SwitchRule.consider = lambda *args: replace(consider(*args), switch=True)
    found: list[dict[str, Any]] = []
    for moves, every, replicas in ((False, 3, 0), (False, 0, 0), (True, 0, 0), (True, 0, 1)):
        moe, report = {"rebalance_every": every, "replicas": replicas}, {"trace_every": 1 if every else 100}
        engine = make(case, 2, 2, pipeline=pipeline, moe=moe, report=report)
        engine.run_dir = Path(run)
        losses, drained = [], []
        for step in range(LATE):
            losses += steps(engine, step, 1)
            if engine.asynchronous.is_settled:
                drained.append(step)
            elif found and step in found[0]["drained"]:
                shuffle(engine) if moves else engine.flush()
                assert engine.asynchronous.is_settled
        engine.flush()
        moved = sum(decision.get("moved", 0) for decision in engine.decisions.decisions)
        found.append({"losses": losses, "state": state(engine), "drained": drained, "moved": moved})
        engine.destroy()
    return found


@pytest.mark.parametrize(
    ("case", "schedule", "partition"),
    [
        (Case("deepseek_v3", zero=1), {"type": "one_direction"}, [0, 2, 5]),
        (FIVE, {"type": "multidirection", "directions": 2, "optimizer_owners": "mirror"}, "uniform"),
    ],
    ids=["a stage without experts", "owners"],
)
def test_without_a_flush_experts_move_after_a_drain(case: Case, schedule: Any, partition: Any, tmp_path: Path) -> None:
    """Every bit is that of a run that is drained after the same steps, and whose experts stay."""
    pipeline = {"stages": 2, "schedule": schedule, "partition": partition}
    ranks = run_ranks(train_late, 4, case, pipeline, str(tmp_path))
    rebalanced, in_order, shuffled, copied = ([rank[run] for rank in ranks] for run in range(4))
    assert all(rank["drained"] == rebalanced[0]["drained"] for rank in rebalanced)
    assert 0 < len(rebalanced[0]["drained"]) < LATE / 2
    assert rebalanced[0]["moved"] > 0
    assert len(list(tmp_path.glob("trace/*.json*"))) >= LATE, "steps with a drain at their end are recorded too"
    whole = joined(in_order)
    for run in (rebalanced, shuffled):
        assert [rank["losses"] for rank in run] == [rank["losses"] for rank in in_order]
        for key, tensor in joined(run).items():
            assert torch.equal(tensor, whole[key]), key
    assert copied[0]["losses"] == pytest.approx(in_order[0]["losses"], rel=1e-6)
    for key, tensor in joined(copied).items():  # copies that are not renewed in time are 1e-4 away
        torch.testing.assert_close(tensor, whole[key], rtol=0, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")


def test_the_job_tells_the_decisions_of_every_stage(tmp_path: Path) -> None:
    """Also where the first stage, whose rank writes them, has no experts itself."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 3}
    sizes |= {
        "head_dim": 8,
        **DEEPSEEK,
    }  # of the rotary part; known from the others only where a config is made of them
    overrides = ",".join(f"{name}={value}" for name, value in sizes.items())
    config = ds_config(
        expert_parallel={"enabled": True, "autoep_size": 2},
        paceline={"pipeline": {"stages": 2, "partition": [0, 2, 5]}, "moe": {"rebalance_every": 2}},
    )
    (tmp_path / "ds.json").write_text(json.dumps(config))
    values = {**TINY, "model_type": "deepseek_v3", "config_overrides": overrides, "max_steps": 4}
    values |= {"eval_strategy": "no", "save_strategy": "no", "deepspeed": tmp_path / "ds.json"}
    ranks = run_ranks(finetune, 4, flags(**values, output_dir=tmp_path / "run"))
    assert {code for code, _ in ranks} == {0}, ranks
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    decided = [line["decision"] for line in lines if "decision" in line]
    assert [(decision["step"], decision["stage"]) for decision in decided] == [(2, 1), (4, 1)]
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert [(row["step"], row["kind"], row["stage"]) for row in report["decisions"]] == [
        (2, "experts", 1),
        (4, "experts", 1),
    ]
    assert [layer["layer"] for layer in report["experts"]] == [f"model.layers.{n}.mlp.experts" for n in (1, 2)]
    assert re.search("stage 1: (experts stay|[0-9]+ experts? moved)", (tmp_path / "run" / "report.html").read_text())


FAMILIES = (
    "aria_text",  # weights the other way round
    "deepseek_v3",
    "gpt_oss",  # biases, gate and up interleaved, clamped
    "nemotron_h",  # experts without a gate
    "qwen2_moe",
)


def compare(families: tuple[str, ...]) -> dict[str, Any]:
    """Of a model whose experts lie on two ranks and of one that has them all: loss, and gradients summed over both."""
    import copy

    import torch.distributed as dist

    from paceline.hf.family_configs import causal_lm_configs, tiny_configs
    from paceline.hf.stage import Cut
    from paceline.hf.weights import load_stage
    from paceline.moe.hf_experts import take_share

    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    for config_class in causal_lm_configs():
        if config_class.model_type not in families:
            continue
        model = load_stage(None, tiny_configs(config_class)[0], Cut.whole(4)).model
        ids = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(rank))
        for implementation, is_even in (("grouped_mm", True), ("grouped_mm", False), ("eager", False)):
            one, other = copy.deepcopy(model), copy.deepcopy(model)
            for each in (one, other):
                each.set_experts_implementation(implementation)
                for name, parameter in each.named_parameters():
                    if not is_even and name.endswith(("gate.weight", "router.weight")):
                        parameter.data.zero_()  # all tokens to the same experts: a rank may get none
            layers = take_share(other, rank, 2)
            for name, layer in layers.items():
                layer.begin(name, dist.group.WORLD)
            losses = [each(input_ids=ids, labels=ids, use_cache=False).loss for each in (one, other)]
            for loss in losses:
                loss.backward()
            whole = {name: p.grad for name, p in one.named_parameters()}
            spread = {f"{name}.{leaf}" for name, layer in layers.items() for leaf, _ in layer.named_parameters()}
            pairs = {}
            for name, parameter in other.named_parameters():
                wanted = whole[name]
                if name in spread:
                    dist.all_reduce(wanted)
                    wanted = wanted.chunk(2)[rank]
                pairs[name] = (parameter.grad, wanted)
            key = f"{config_class.model_type}, {implementation}, {'even' if is_even else 'uneven'}"
            found[key] = {"losses": [float(loss) for loss in losses], "gradients": pairs, "spread": len(spread)}
    return found


def test_families() -> None:
    ranks = run_ranks(compare, 2, FAMILIES)
    assert {key.partition(",")[0] for key in ranks[0]} == set(FAMILIES)
    for rank in ranks:
        for key, found in rank.items():
            assert found["losses"][0] == found["losses"][1], key
            assert found["spread"] >= 2, key
            for name, (gradient, wanted) in found["gradients"].items():
                if wanted is None:
                    assert gradient is None, f"{key}: {name}"
                else:
                    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6, msg=f"{key}: {name}")


def breaks_off(root: str) -> list[list[str]]:
    """Errors of an engine after values were on their way, and after masters and states were, beside a step."""
    from paceline.moe import moving
    from paceline.state import exchange_beside

    found = []
    for module in (moving, exchange_beside):
        engine = make(Case(zero=1), 1, 2, moe={"rebalance_every": 0})
        steps(engine, 0, 1)
        sends, module.carry_out = module.carry_out, no_route
        found.append(errors_of_moving(engine, root))
        module.carry_out = sends
        engine.destroy()
    return found


def no_route(*_: Any, **__: Any) -> None:
    raise RuntimeError("no route to host")


def errors_of_moving(engine: Any, root: str) -> list[str]:
    import paceline

    return runtime_errors(
        (
            lambda: [engine.place_experts(shuffled(engine)), steps(engine, 1, 1)],
            lambda: steps(engine, 1, 1),
            lambda: engine.save_checkpoint(root),
            lambda: paceline.export(engine.module, f"{root}/model", engine.control),
        )
    )


def test_an_engine_whose_experts_are_between_ranks_does_not_go_on(tmp_path: Path) -> None:
    """Nor does it write what is left of its model over what was written before."""
    for found in run_ranks(breaks_off, 2, str(tmp_path)):
        for first, *others in found:
            assert first == "no route to host"
            for message in others:
                assert re.search(r"left half-way \(.*no route to host\).*load the last checkpoint", message)
    assert list(tmp_path.iterdir()) == []


def refused() -> list[str]:
    """What is said of configs that do not fit, on this rank."""
    import paceline
    from paceline import CausalLMPipeline

    told = []

    def tell(**changes: Any) -> None:
        stages = changes.pop("stages", 2)
        config = {**ds_config(stages), "expert_parallel": {"enabled": True, "autoep_size": 2}, **changes}
        model = changes.pop("model", None) or model_config("mixtral")
        config.pop("model", None)
        try:
            paceline.initialize(model=model, config=config)
        except ValueError as error:
            told.append(str(error))

    tell(optimizer={"type": "Adafactor", "params": {"lr": 1e-3}})
    tell(expert_parallel={"enabled": False}, paceline={"pipeline": {"stages": 2}, "moe": {}})
    late = {"stages": 2, "schedule": "one_direction"}
    tell(paceline={"pipeline": late}, pipeline={"activation_checkpoint_interval": 1})
    pipeline = CausalLMPipeline(model_config("mixtral"), num_stages=2, expert_parallel=2, partition=[0, 3, 5])
    tell(model=pipeline, expert_parallel={"enabled": True, "autoep_size": 1})
    config = ds_config(2)
    config["paceline"]["pipeline"]["partition"] = [0, 2, 5]
    engine, *_ = paceline.initialize(model=pipeline, config=config)
    assert len(engine.expert_layers) == (1, 2)[engine.stage_id], "given to the pipeline, the JSON need not say it"
    return told


def test_what_does_not_fit_is_refused_on_every_rank() -> None:
    ranks = run_ranks(refused, 4)
    assert all(told == ranks[0] for told in ranks)
    wanted = [
        "optimizer Adafactor looks at a parameter as a whole, and of the experts' every rank has another part: choose ",
        "paceline.moe is there, and every rank has all experts of its stage: write ",
        'the model has experts, pipeline.activation_checkpoint_interval is 1 and "one_direction" has no flush: ',
        "expert_parallel.autoep_size is 1 and the pipeline was built with expert_parallel=2: leave ",
    ]
    assert len(ranks[0]) == len(wanted), ranks[0]
    for told, begins in zip(ranks[0], wanted, strict=True):
        assert told.startswith(begins), told
