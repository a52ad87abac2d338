"""The families that torch or DeepSpeed have too give their orders."""

import pytest
from deepspeed.runtime.pipe.schedule import BackwardPass, DualPipeVSchedule, ForwardPass, TrainSchedule
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from paceline.schedules import families


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("GPipe", families.gpipe(4, 6)),
        ("Interleaved1F1B", families.interleaved(4, 12, 2)),
        ("Interleaved1F1B", families.interleaved(3, 6, 3)),
    ],
)
def test_orders_are_those_of_torch(name, schedule):
    chunks = None if schedule.num_chunks == 1 else schedule.num_chunks
    theirs = get_schedule_ops(name, schedule.num_ranks, schedule.num_micro_batches, chunks)
    kinds = {"FORWARD": "F", "BACKWARD": "B", "FULL_BACKWARD": "B"}
    for rank, actions in enumerate(theirs):
        ours = [(a.kind, a.micro_batch, schedule.stage(rank, a)) for a in schedule.orders[rank]]
        computes = [a for a in actions if a and a.computation_type.name in kinds]
        assert ours == [(kinds[a.computation_type.name], a.microbatch_index, a.stage_index) for a in computes]


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(1, 3), (2, 2), (4, 2), (4, 9), (5, 16)])
def test_1f1b_is_that_of_deepspeed(num_stages, num_micro_batches):
    """Its instructions name buffers, not micro-batches; both kinds run in micro-batch order."""
    schedule = families.one_f_one_b(num_stages, num_micro_batches)
    kinds = {ForwardPass: "F", BackwardPass: "B"}
    for stage, order in enumerate(schedule.orders):
        steps = TrainSchedule(num_micro_batches, num_stages, stage).steps()
        theirs = [kinds[type(one)] for instructions in steps for one in instructions if type(one) in kinds]
        assert [action.kind for action in order] == theirs


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(1, 2), (1, 5), (2, 4), (3, 9), (4, 8), (4, 16), (5, 12)])
def test_dualpipev_is_that_of_deepspeed(num_ranks, num_micro_batches):
    """Its buffers are numbered phase · M + micro-batch."""
    kinds = {ForwardPass: "F", BackwardPass: "B"}
    for rank, order in enumerate(families.dualpipev(num_ranks, num_micro_batches).orders):
        steps = DualPipeVSchedule(num_micro_batches, num_ranks, rank).steps()
        computes = [one for instructions in steps for one in instructions if type(one) in kinds]
        assert all(one.buffer_id // num_micro_batches == one.phase for one in computes)
        assert [tuple(action) for action in order] == [
            (kinds[type(one)], one.buffer_id % num_micro_batches, one.phase) for one in computes
        ]
