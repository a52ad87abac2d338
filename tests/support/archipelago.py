"""Several islands on one machine, each a world of ranks of its own, and the lighthouse where they meet."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from support.jobs import BATCH, LENGTH, MICRO_BATCHES, ds_config
from support.ranks import RANK_ENVIRONMENT, run_ranks

TOKENS = MICRO_BATCHES * BATCH * LENGTH
"""Of a step."""


class Island(NamedTuple):
    """``act(*args)`` on so many ranks."""

    act: Callable[..., Any]
    num_ranks: int
    args: tuple[Any, ...] = ()
    number: int | None = None
    """None: its place in the list."""


@contextmanager
def lighthouse(*flags: str) -> Iterator[str]:
    """Its host:port."""
    command = [sys.executable, "-m", "paceline.launch.cli", "lighthouse", "--host", "127.0.0.1", "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@contextmanager
def lighthouses(count: int) -> Iterator[list[str]]:
    """Addresses of several, in this process: for islands that do one job after another."""
    from paceline.averaging.presence import coordination

    waits = {"min_replicas": 1, "join_timeout_ms": 600_000, "heartbeat_timeout_ms": 5_000}
    servers = [coordination().LighthouseServer(bind="127.0.0.1:0", **waits) for _ in range(count)]
    try:
        yield [f"127.0.0.1:{server.address().rpartition(':')[2]}" for server in servers]
    finally:
        for server in servers:
            server.shutdown()


def run_islands(islands: Sequence[Island]) -> list[list[Any]]:
    """Results of each island's ranks. What an island raises is raised when all have ended, the first of it."""
    with ThreadPoolExecutor(len(islands)) as pool:
        futures = []
        for place, island in enumerate(islands):
            number = place if island.number is None else island.number
            environment = {**RANK_ENVIRONMENT, "PACELINE_ISLAND": str(number)}
            futures.append(pool.submit(run_ranks, island.act, island.num_ranks, *island.args, env=environment))
        for future in as_completed(futures):
            future.result()
    return [future.result() for future in futures]


def config_of(light: str, stages: int | None, averaging: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    config = ds_config(stages, **changes)
    section = config.setdefault("paceline", {})
    if averaging is not None:
        section["averaging"] = {"lighthouse": light, "islands": 4, **averaging}
    return config


def weights_of(engine: Any) -> dict[str, Tensor]:
    """Of this rank's stage, by the names of the whole model."""
    from paceline.state.named import names_of

    return {name: p.detach().float().clone() for p, name in names_of(engine.module).items()}


def mean_of(models: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    assert all(model.keys() == models[0].keys() for model in models)
    return {name: sum(model[name].double() for model in models) / len(models) for name in models[0]}


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name].double(), tensor.double(), rtol=tolerance, atol=tolerance, msg=name)
