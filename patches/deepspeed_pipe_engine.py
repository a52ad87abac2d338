"""``deepspeed/runtime/pipe/engine.py``: the pool of receive buffers hands out memory of another dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.patches.registry import BY_REPAIR, Patch, Use

if TYPE_CHECKING:
    from deepspeed import PipelineEngine


def allocate_or_extend_buffers(self: PipelineEngine, idx: int, shape: list[int], dtype: Any) -> Any:
    """``PipelineEngine._allocate_or_extend_buffers``, for a buffer of the dtype that is asked for.

    Activations and gradients are received into the same pool, by their index in the tuple that is sent. The two can
    differ in dtype at an index: of ``(int64, float)`` only the second has a gradient, which is then at index 0. A
    buffer that is only large enough would receive floats as integers.

    An engine class of one's own takes this function as its method, and needs no patch.
    """
    from functools import reduce
    from operator import mul

    numel = reduce(mul, shape) if len(shape) > 0 else 1
    pool = self._grad_layer_buf
    if len(pool) <= idx or pool[idx].numel() < numel or pool[idx].dtype != dtype:
        new_buf = self._allocate_buffer(shape, dtype=dtype, num_buffers=1)[0]
        if len(pool) <= idx:
            pool.append(new_buf)
        else:
            pool[idx] = new_buf
        return pool[idx]
    return pool[idx].flatten()[:numel].view(shape)


RECEIVE_POOL = Patch(
    target="deepspeed.runtime.pipe.engine:PipelineEngine._allocate_or_extend_buffers",
    make=Use(allocate_or_extend_buffers),
    requires="deepspeed>=0.19.8,<0.20",
    reason="stages that pass integers and floats on train on garbage: a receive buffer is reused for another dtype",
    removable_when="DeepSpeed's pool of receive buffers looks at the dtype",
    watches="deepspeed.runtime.pipe.engine:PipelineEngine._allocate_or_extend_buffers",
    fingerprint="59ebebde7a6a",
    applied_by=BY_REPAIR,
)

PATCHES = (RECEIVE_POOL,)
