"""A Hugging Face causal LM as several pipelines over the same devices, each in an order of its own."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..hf.stage import CausalLMStage
from ..schedules import directions
from ..state.named import REPLICATED
from .module import CausalLMPipeline, cut_of


class MultiDirectionPipeline(CausalLMPipeline):
    """As :class:`CausalLMPipeline`; each of the d ranks of a pipeline holds P stages, one a direction.

    In direction 0 rank i has stage i, so that what looks at one stage only (evaluation, export) sees a plain pipeline.
    ``current`` is the direction that computes; :attr:`stage` is the stage of it.

    Args:
        num_directions: P; None: half as many as stages where that has an order, otherwise two.

    The other arguments are those of :class:`CausalLMPipeline`.

    Raises:
        ValueError: there is no such order of directions for so many stages.
    """

    def __init__(self, source: Any, *, num_stages: int, num_directions: int | None = None, **kwargs: Any) -> None:
        self.routes = directions.routes(num_stages, num_directions)
        self.current = 0
        super().__init__(source, num_stages=num_stages, **kwargs)

    @property
    def num_directions(self) -> int:
        return len(self.routes)

    @property
    def held(self) -> tuple[int, ...]:
        """The stage that this rank holds in each direction."""
        return directions.stages_of(self.stage_id, self.routes)

    @property
    def stage(self) -> CausalLMStage:  # type: ignore[override]
        """The stage of the direction that computes."""
        return self.stages[self.current]  # type: ignore[return-value]

    @property
    def models(self) -> list[PreTrainedModel]:
        return [stage.model for stage in self.stages]

    def _build(self) -> None:
        with self.control.together(f"loading the stages of rank {self.global_rank}"):
            source = self._source.pop()
            self.stages = nn.ModuleList(
                self._load(cut_of(self.parts, stage), self._own_copy(source, is_last=number == len(self.held) - 1))
                for number, stage in enumerate(self.held)
            )
            self._share_tied_weight()
        self.forward_funcs.append(self.stage)
        for parameter in self.parameters():
            setattr(parameter, REPLICATED, False)

    def _own_copy(self, source: Any, *, is_last: bool) -> Any:
        """A model in memory is cut in place: each stage has it to itself."""
        return copy.deepcopy(source) if isinstance(source, PreTrainedModel) and not is_last else source

    def _share_tied_weight(self) -> None:
        """Who has the first stage has the last one too, with two directions or more: one weight serves both."""
        ends = [self.stages[self.held.index(stage)] for stage in (0, self.num_stages - 1) if stage in self.held]
        if not self.is_tied or len(ends) < 2:
            return
        name = f"{self.anatomy.trunk}.{self.anatomy.embedding}.weight"
        shared, own = (end.get_parameter(f"model.{name}") for end in ends)
        for module in ends[1].modules():
            for leaf, parameter in module._parameters.items():
                if parameter is own:
                    module._parameters[leaf] = shared

    def _index_tied_modules(self) -> dict[str, dict[str, Any]]:
        return super()._index_tied_modules() if self.num_directions == 1 else {}

    @staticmethod
    def state_name(name: str) -> str:
        prefix, _, rest = name.partition(".model.")
        return rest if prefix.startswith("stages.") else name

    def describe(self) -> list[str]:
        lines = super().describe()
        if self.num_directions > 1:
            orders = " | ".join(" ".join(map(str, order)) for order in self.routes)
            lines.append(f"{self.num_directions} directions, ranks by stage: {orders}")
        return lines
