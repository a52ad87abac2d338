"""Emulated expert-parallel training: a real model under AutoEP, whose tokens go where a recorded run sent them.

Everything is DeepSpeed's or ours, with two exceptions. The router prefers, for each token, the experts that the trace
gives it; and after its own small computation an expert sleeps for as long as an accelerator would take for its rows. A
rank's time in its experts is therefore proportional to its tokens, which is what placements are about, while the cores
are free for the others.

Legend: E experts, T tokens of a rank, K experts that a token goes to, H hidden size, R ranks.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.moe.ep_experts import GroupedExperts
from deepspeed.moe.ep_router import TokenChoiceTopKRouter
from torch import Tensor, nn

from lab.device import DEVICE
from lab.hosts import Hosts

TRACE = Path(__file__).with_name("expert_trace.json")
JOB = Path(__file__).with_name("emulated_experts.py")

TOP_K = 2
"""Experts of a token, as in the run that the trace is of."""

BACKWARD = 2.0
"""Times what the forward takes."""

_PREFERENCE = 100.0
"""Added to the score of a token's experts when they are chosen: scores are at most 1."""

_START_S = 240.0
"""Ranks import torch and more, all at once on few cores."""


@dataclass(frozen=True)
class ExpertEmulation:
    """A job to be emulated.

    Args:
        tokens: ``[samples][layers][E]``, how the tokens of a layer are spread over its experts, in any unit.
        row_s: of one row in an expert's forward; backward takes :data:`BACKWARD` times as long.
        num_tokens: T, of a rank in a step.
        steps_a_sample: for which the routing stays as it is.
        intermediate: width of an expert; its weights have ``3 * 32 * intermediate`` elements.
        zero: ZeRO stage.
    """

    tokens: tuple[tuple[tuple[float, ...], ...], ...]
    row_s: float
    num_tokens: int = 128
    steps_a_sample: int = 10
    intermediate: int = 128
    zero: int = 0

    @property
    def num_layers(self) -> int:
        return len(self.tokens[0])

    @property
    def num_experts(self) -> int:
        return len(self.tokens[0][0])

    @property
    def num_steps(self) -> int:
        return len(self.tokens) * self.steps_a_sample

    def sample(self, step: int) -> int:
        """Which one a step has; the last one stays."""
        return min(step // self.steps_a_sample, len(self.tokens) - 1)

    def rows(self, sample: int, layer: int, num_ranks: int) -> list[int]:
        """Rows of each expert in a step, all ranks together."""
        return rows_of(self.tokens[sample][layer], TOP_K * self.num_tokens * num_ranks)

    def chosen(self, sample: int, layer: int, rank: int, num_ranks: int) -> Tensor:
        """``[T, K]`` the experts of a rank's tokens. All ranks have the same mix, up to a row."""
        rows = self.rows(sample, layer, num_ranks)
        choices = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows))[rank::num_ranks]
        chosen = choices.view(TOP_K, self.num_tokens).T.contiguous()
        if (chosen[:, 0] == chosen[:, 1]).any():
            raise ValueError(
                f"sample {sample}, layer {layer}: an expert has more than one of {TOP_K} choices of a token: "
                f"its share is above 1 / {TOP_K}"
            )
        return chosen


def read_trace(file: Path = TRACE) -> list[list[list[int]]]:
    """``[samples][layers][E]`` routed tokens of a real run, ten of its steps apart."""
    tokens: list[list[list[int]]] = json.loads(file.read_text())["tokens"]
    return tokens


def rows_of(tokens: Sequence[float], total: int) -> list[int]:
    """``total`` whole rows in the proportions of ``tokens``: those with the largest remainders get what is left."""
    quota = [total * each / sum(tokens) for each in tokens]
    rows = [int(q) for q in quota]
    first = sorted(range(len(quota)), key=lambda e: (rows[e] - quota[e], e))
    for expert in first[: total - sum(rows)]:
        rows[expert] += 1
    return rows


def model(emulation: ExpertEmulation) -> nn.Module:
    """The same weights on every rank; attention and the rest are as small as can be."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=32,
            moe_intermediate_size=emulation.intermediate,
            num_hidden_layers=emulation.num_layers,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=emulation.num_experts,
            num_experts_per_tok=TOP_K,
            max_position_embeddings=emulation.num_tokens,
        )
    )


class TracedRouter(TokenChoiceTopKRouter):
    """Chooses the experts that it is told to. Scores, and what is learned from them, are those of the gate."""

    _bias: Tensor

    def follow(self, chosen: Tensor) -> None:
        """From now on tokens go to ``chosen [T, K]``."""
        self._bias = torch.zeros(len(chosen), self.num_experts).scatter_(1, chosen, _PREFERENCE)

    def forward(self, x: Tensor, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        assert expert_bias is None, "the trace decides, not a balancing bias"
        return super().forward(x, self._bias)  # type: ignore[no-any-return]


class EmulatedExperts(GroupedExperts):
    """Experts that compute, and sleep until the time is over that their rows take on the emulated device.

    Attributes:
        taken_s: by forwards and backwards since somebody set it to zero.
    """

    row_s: float
    taken_s: float

    def emulate(self, row_s: float) -> None:
        self.row_s, self.taken_s = row_s, 0.0

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        num_rows = int(x.detach().any(dim=1).sum())  # DeepSpeed fills up with rows of zeros
        if not num_rows:
            return super().forward(x, num_tokens_per_expert)  # type: ignore[no-any-return]
        backward = Computation(self, "backward", BACKWARD * num_rows * self.row_s)
        forward = Computation(self, "forward", num_rows * self.row_s)
        x = Ends.apply(x, backward)
        forward.begin()
        output = super().forward(x, num_tokens_per_expert)
        forward.end()
        return Begins.apply(output, backward)


class Computation:
    """What the emulated device does between two calls."""

    def __init__(self, experts: EmulatedExperts, kind: str, seconds: float) -> None:
        self._experts, self._kind, self._seconds = experts, kind, seconds
        self._running: AbstractContextManager[None] | None = None

    def begin(self) -> None:
        self._begun = time.perf_counter()
        self._running = DEVICE.computation(self._kind, 0, self._seconds)
        self._running.__enter__()

    def end(self) -> None:
        assert self._running is not None, "backward begins at the output"
        self._running.__exit__(None, None, None)
        self._experts.taken_s += time.perf_counter() - self._begun


class Begins(torch.autograd.Function):
    """At the experts' output: there their backward begins."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, backward: Computation) -> Tensor:
        ctx.computation = backward
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.computation.begin()
        return gradient, None


class Ends(torch.autograd.Function):
    """At the experts' input: there their backward ends."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backward: Computation) -> Tensor:
        ctx.computation = backward
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.computation.end()
        return gradient, None


def train_experts(
    hosts: Hosts,
    contestants: dict[str, dict[str, Any] | None],
    emulation: ExpertEmulation,
    *,
    round_steps: int | None = None,
    timeout: float | None = None,
) -> list[dict[str, Any]]:
    """Run ``contestants`` in turn, a rank a host, each over all samples of the emulation; one record a step.

    Args:
        contestants: by label, the section ``paceline.moe``; None: stock AutoEP.
        round_steps: of each contestant until it is the next one's turn; by default those of a sample.
        timeout: seconds until the job is killed.

    Returns:
        of each step of each contestant: ``contestant``, ``round``, ``step``, ``seconds``, ``loss``, ``expert_s``
        ``[layers][R]``, what the device took for the experts, and the ``decisions`` after it.

    Raises:
        HostError: the job failed.
    """
    mean_s = TOP_K * emulation.num_tokens * emulation.row_s * (1 + BACKWARD) * emulation.num_layers
    if timeout is None:
        timeout = _START_S + len(contestants) * emulation.num_steps * (10 * mean_s + 1.0)
    with tempfile.TemporaryDirectory(prefix="lab-experts-") as folder:
        job = {
            "emulation": asdict(emulation),
            "contestants": contestants,
            "round_steps": round_steps or emulation.steps_a_sample,
        }
        Path(folder, "job.json").write_text(json.dumps(job))
        hosts.run([sys.executable, str(JOB), folder], timeout=timeout)
        ranks = [
            [json.loads(line) for line in Path(folder, f"rank{rank}.jsonl").read_text().splitlines()]
            for rank in range(len(hosts.addresses))
        ]
    records = []
    for of_step in zip(*ranks, strict=True):
        per_layer = list(zip(*(record["expert_s"] for record in of_step), strict=True))
        records.append({**of_step[0], "expert_s": [list(layer) for layer in per_layer]})
    return records
