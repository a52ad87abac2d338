"""Check that a learning rate's scheduler moves the rates of the engine's own optimizer."""

from __future__ import annotations


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
