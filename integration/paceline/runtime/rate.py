"""Check that a learning rate's scheduler moves the rates of the engine's own optimizer, by the number of steps."""

from __future__ import annotations

from torch.optim.lr_scheduler import ReduceLROnPlateau


def check_scheduler_object(scheduler: object, optimizer: object) -> None:
    """Raise ValueError if ``scheduler`` is an object over another optimizer: its steps would change nothing.

    Args:
        scheduler: as given to ``initialize``; functions, and objects that name no optimizer, pass.
        optimizer: what the engine steps; None, or a function that makes it, if it is not there yet.
    """
    moved = getattr(scheduler, "optimizer", None)
    if moved is None or callable(scheduler):
        return
    wrapped = getattr(moved, "optimizer", moved)  # accelerate's
    if optimizer is not None and (moved is optimizer or wrapped is optimizer):
        return
    kind = type(scheduler).__name__
    raise ValueError(
        f"lr_scheduler is a {kind} over another optimizer ({type(moved).__name__}) than the one that trains: it would "
        f"never act; pass a function, lr_scheduler=lambda optimizer: {kind}(optimizer, ...), or that optimizer too."
    )


def check_follows_steps(scheduler: object) -> None:
    """Raise ValueError for a scheduler that follows a metric: DeepSpeed would give it the batch size for that."""
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(
            "the learning-rate scheduler is a ReduceLROnPlateau, which follows a metric, and the engine steps it after "
            "each update, without one: take one that follows the steps, or leave it out and step one of your own, "
            "ReduceLROnPlateau(engine.optimizer.optimizer), with your metric."
        )
