"""Data under a Trainer whose readers are pipelines, not ranks: all stages of one read the same."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard, IterableDatasetShard, prepare_data_loader
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from transformers.trainer_utils import seed_worker

from .micro_batches import count_label_tokens

Data = TypeVar("Data")

_NO_EPOCH = 1_000_000
"""Added to the seed where no epoch is begun, but one is gone on with in the middle."""


class ReplicaShares:
    """Shares data out among pipelines, and gathers what they found in theirs.

    Args:
        replicas: pipelines side by side.
        own: number of this rank's.
        group: ranks of the same stage, one a pipeline.
    """

    def __init__(self, replicas: int, own: int, group: dist.ProcessGroup | None) -> None:
        self.replicas, self.own, self._group = replicas, own, group
        self.rows_at_end = 0
        """Rows of an evaluation's last batch that do not only fill it up; 0 in any other batch, or if all count."""

    def take(self, dataset: object, description: str, batch_size: int, *, trains: bool) -> object:
        """This pipeline's rows of a stream; other data are shared out by :meth:`prepare`.

        Raises:
            ValueError: a stream is to be evaluated by several pipelines.
        """
        if not isinstance(dataset, IterableDataset) or self.replicas == 1:
            return dataset
        if not trains:
            raise ValueError(
                f"the data for {description.lower()} are a stream and there are {self.replicas} pipelines side by "
                "side: rows that fill the last batch up would count twice; give data with a length, or as many stages "
                "as ranks."
            )
        # Batch by batch: accelerate would give each pipeline files of its own, and not equally many batches.
        return IterableDatasetShard(dataset, batch_size, num_processes=self.replicas, process_index=self.own)

    def prepare(
        self, accelerator: Accelerator, loader: DataLoader[Data], num_workers: int, *, trains: bool, seed: int | None
    ) -> DataLoader[Data]:
        """As accelerate's, for as many readers as there are pipelines. Batches stay on the CPU, for the engine.

        Args:
            seed: of what data draw in workers, which all stages are to draw alike; None: torch's generator has it.
        """
        if getattr(loader, "_is_accelerate_prepared", False):  # a script's own loader may be given twice
            return loader
        own_seed = seed if num_workers and loader.generator is None else None
        if own_seed is not None:
            loader.generator = torch.Generator()  # dropout draws from torch's, on each stage its own
        if loader.worker_init_fn is not None:  # Trainer's: ranks of a pipeline are to read the same
            loader.worker_init_fn = partial(seed_worker, num_workers=num_workers, rank=self.own)
        is_shared_out = isinstance(loader.dataset, IterableDatasetShard)
        rng_types = list(accelerator.rng_types)
        is_seeded = isinstance(loader.sampler, RandomSampler) and accelerator.use_seedable_sampler
        if trains and not is_seeded and "torch" not in rng_types:
            rng_types.append("torch")  # the order is drawn from it, and dropout has drawn something else on each stage
        prepared: DataLoader[Data] = prepare_data_loader(
            loader,
            num_processes=1 if is_shared_out else self.replicas,
            process_index=0 if is_shared_out else self.own,
            split_batches=accelerator.split_batches,
            put_on_device=False,
            rng_types=rng_types,
            dispatch_batches=False,
            even_batches=accelerator.even_batches,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=accelerator.dataloader_config.data_seed,
            use_stateful_dataloader=accelerator.use_stateful_dataloader,
        )
        if own_seed is not None:
            _seed_by_epoch(prepared, own_seed)
        accelerator._dataloaders.append(prepared)
        return prepared

    def gather(self, data: Data) -> Data:
        """Tensors of all pipelines, one after another; their stages have the same."""
        if self.replicas == 1:
            return data

        def gather(tensor: Tensor) -> Tensor:
            own = (tensor if tensor.dim() else tensor[None]).contiguous()
            found = [torch.empty_like(own) for _ in range(self.replicas)]
            dist.all_gather(found, own, group=self._group)
            return torch.cat(found)

        gathered: Data = recursively_apply(gather, data, error_on_other_type=True)
        return gathered

    def gather_for_metrics(self, data: Data, use_gather_object: bool = False) -> Data:
        """And without what only fills the last batch up."""
        data = self.gather(data)
        if not self.rows_at_end:
            return data
        # What a script has made a single number of has no rows.
        counting: Data = recursively_apply(lambda found: found[: self.rows_at_end] if found.dim() else found, data)
        return counting

    def share_of_loss(self, loss: Tensor, labels: Tensor, device: torch.device) -> Tensor:
        """Weigh a batch's loss, so that the mean over pipelines is that of all label tokens, as Trainer has it."""
        if self.replicas == 1:
            return loss
        tokens = count_label_tokens(labels)
        counted = self.gather(torch.tensor([tokens], device=device)).sum().cpu()
        own = loss if tokens else torch.zeros_like(loss)  # the mean of none; any other NaN is the model's
        share: Tensor = own * tokens * self.replicas / counted
        return share


def _seed_by_epoch(prepared: DataLoader[Data], seed: int) -> None:
    """Have workers draw in each epoch from a seed of its own, also in a run that goes on from a checkpoint."""
    assert isinstance(prepared, DataLoaderShard)
    # A run that goes on in the middle of an epoch has another loader, which draws what no whole epoch does.
    generator, set_epoch = prepared.generator.manual_seed(seed + _NO_EPOCH), prepared.set_epoch

    def seeded(epoch: int) -> None:  # called whenever it is iterated over
        generator.manual_seed(seed + epoch)
        set_epoch(epoch)

    vars(prepared)["set_epoch"] = seeded
