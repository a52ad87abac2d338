"""Support of Hugging Face causal LMs in the engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import nn

from ..checkpoint.format import MODEL
from ..comm.control import ControlPlane
from ..comm.shapes import Shapes
from ..config.optimizers import ELEMENTWISE, class_name, is_elementwise
from ..hf import hub_files
from ..hf.peft import save_adapter_config
from ..hf.sliced_head import WHOLE_HEAD
from ..hf.sliced_layers import KEY
from ..patches import transformers_masking_utils
from ..patches.registry import apply
from .causal_lm_layers import CausalLMLayers
from .causal_lm_runner import CausalLMRunner, StepBook, StreamShapes
from .causal_lm_steps import CausalLMSteps, Readers, Replicas
from .model_support import Around, ModelSupport, Reader
from .module import CausalLMPipeline
from .ties import Tie


class CausalLMSupport(ModelSupport):
    """A :class:`~paceline.runtime.module.CausalLMPipeline`.

    A step's loss is that of the unsplit model over all its tokens: micro-batches and replicas weigh by their label
    tokens.
    """

    can_cut = sums_tokens = True
    module: CausalLMPipeline

    def __init__(self, module: CausalLMPipeline) -> None:
        super().__init__(module)
        self.book = StepBook()
        apply(*transformers_masking_utils.PATCHES)  # for the rest of the process: they act where facts are told only

    @property
    def routes(self) -> tuple[tuple[int, ...], ...]:
        return self.module.routes

    @property
    def stages(self) -> list[tuple[int, nn.Module]]:
        return list(zip(self.module.held, self.module.stages, strict=True))

    @property
    def ties(self) -> list[Tie]:
        return self.module.ties

    def require_logits(self, who: str) -> None:
        self.module.require_logits(who)

    def check_optimizer(self, basic: torch.optim.Optimizer) -> None:
        if self.module.has_slices and not is_elementwise(basic):
            raise ValueError(
                f"optimizer {class_name(basic)} looks at a parameter as a whole, and stages have parts of a head in "
                f"slices: choose one of {', '.join(sorted(ELEMENTWISE))}, or {WHOLE_HEAD}."
            )
        if self.module.tensor_parallel > 1 and not is_elementwise(basic):
            raise ValueError(
                f"optimizer {class_name(basic)} looks at a parameter as a whole, and ranks have slices of the layers' "
                f"({KEY} is {self.module.tensor_parallel}): choose one of {', '.join(sorted(ELEMENTWISE))}, or leave "
                f"{KEY} out."
            )

    def keep_masks(self) -> None:
        self.book.keeps_masks = True

    def make_layers(self) -> CausalLMLayers:
        return CausalLMLayers(self.module)

    def make_steps(
        self,
        reader: Reader,
        control: ControlPlane,
        device: torch.device,
        raises: Callable[[], AbstractContextManager[None]],
        num_sharing: int,
    ) -> CausalLMSteps:
        grid = self.module._grid
        return CausalLMSteps(
            reader,
            self.book,
            self.module.stage,
            control,
            device,
            readers=Readers.of(self.routes, self.module.stage_id),
            is_pipe_parallel=self.module.num_stages > 1,
            replicas=Replicas(
                grid.data_parallel_id,
                grid.data_parallel_size,
                num_sharing,
                grid.get_slice_parallel_rank(),
                grid.get_slice_parallel_world_size(),
            ),
            raises=raises,
        )

    def make_runner(self, chunk: int, around: Around) -> CausalLMRunner:
        return CausalLMRunner(
            self.module.held[chunk],
            self.module.num_virtual_stages,
            reach=around.reach,
            around=around.surroundings,
            module=self.module,
            chunk=chunk,
            device=around.device,
            book=self.book,
            losses=around.losses,
            num_replicas=self.module._grid.data_parallel_size,
            wants_logits=lambda: around.wants()[1],
        )

    def activation_shapes(self) -> Shapes:
        router_loss = self.module.stage.router_loss
        return StreamShapes(None if router_loss is None else router_loss.size, has_slices=self.module.has_slices)

    def gradient_divisor(self, *, averages: bool) -> float:
        if not averages:
            raise ValueError(
                'gradient_allreduce_op is "sum": the loss of this pipeline is the mean over all tokens of a step; '
                "leave the key out."
            )
        return 1.0  # each loss is already its share of the step's, over all replicas

    def sum_of_losses(self, num_rows: int, num_micro_batches: int) -> float:
        return float(max(self.book.backward_label_tokens, 1))

    def write_model(self, draft: Path) -> None:
        """The model's config, so that a checkpoint can become a model of its own (``paceline export``)."""
        folder = draft / MODEL
        folder.mkdir(exist_ok=True)
        hub_files.save_config(self.module.stage.model, folder)
        if self.module.adapters is not None:
            save_adapter_config(self.module.stage.model, self.module.adapters, folder)
