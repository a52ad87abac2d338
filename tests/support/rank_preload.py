"""What every rank would do first, done once in the server that ranks are forked from (see ``ranks``).

Nothing here may start a thread: a fork copies only the thread that forks, and a lock held by another one stays locked.
``num_threads`` is what the test of the runner looks at.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pkgutil
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

_PRELOAD = (
    "datasets",
    "deepspeed",
    "deepspeed.runtime.bf16_optimizer",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # stock ZeRO imports it, and with it torch._inductor
    "deepspeed.runtime.zero.stage_1_and_2",
    "matplotlib.backends.backend_svg",
    "matplotlib.figure",
    "pytest",
    "support.ranks",
    "torch._dynamo",  # the first step of any torch.optim optimizer imports it
    "torch.distributed",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
)


def num_threads() -> int:
    """Threads of this process, those of C++ libraries included; -1 where the system does not say."""
    tasks = Path("/proc/self/task")
    return len(os.listdir(tasks)) if tasks.exists() else -1


def _run_what_is_slow_once() -> None:
    """Check the models of most tests and the sources of what is patched: both are remembered in a process.

    Transformers compiles a thousand patterns for a process's first model, and matplotlib fills caches with a process's
    first picture: every main job writes a page of them.
    """
    import torch

    from paceline.averaging.presence import coordination
    from paceline.hf.activations import count_items
    from paceline.hf.check import require_supported
    from paceline.patches.registry import all_patches
    from paceline.report.line_chart import Series, line_chart
    from paceline.report.page import template
    from support.jobs import model_config

    for patch in all_patches():
        patch.problem()
    coordination()
    template()
    line_chart([Series("loss", [[(1, 2.0), (2, 1.0)]])], label="loss", unit="nats")
    with torch.random.fork_rng(devices=[]):
        for family in ("llama", "gpt2", "mixtral"):
            require_supported(model_config(family))
        count_items(model_config("llama"), dtype=torch.float32, micro_batch_size=1, sequence_length=8)


def _share_gloo_threads() -> None:
    """Have one thread of a rank carry the messages of all its groups.

    Gloo gives each group a thread that looks a hundred times a second for something to do. Of engines that a process
    has had one after another these were 160, and a third of the time that tests take. Launched jobs have them.
    """
    from torch.distributed import ProcessGroupGloo

    make: Any = ProcessGroupGloo.__init__
    devices: dict[int, Any] = {}

    def made(
        group: ProcessGroupGloo,
        store: Any,
        rank: int,
        size: int,
        timeout: Any = timedelta(minutes=30),
        enable_reconfigure: bool = False,  # of torch 2.14, and off everywhere
    ) -> None:
        options = timeout
        if isinstance(timeout, timedelta):
            process = os.getpid()  # a device has a thread, which does not survive a fork
            if process not in devices:
                devices[process] = ProcessGroupGloo.create_device(interface=os.environ["GLOO_SOCKET_IFNAME"])
            options = ProcessGroupGloo._Options()
            options._devices, options._timeout = [devices[process]], timeout
        make(group, store, rank, size, options)

    ProcessGroupGloo.__init__ = made  # type: ignore[method-assign]


def _preload() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _PRELOAD:
            importlib.import_module(name)
        import deepspeed.ops
        import torch

        import paceline

        # A module that does not import is for the rank that needs it to report.
        for module in pkgutil.walk_packages(paceline.__path__, "paceline.", onerror=lambda name: None):
            with contextlib.suppress(Exception):
                importlib.import_module(module.name)

    torch.set_num_threads(1)
    _share_gloo_threads()
    with contextlib.suppress(Exception):  # the ranks of its tests will report it
        _run_what_is_slow_once()
    # init_distributed compiles this extension where it can: half a minute, for shared-memory collectives.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    gc.collect()
    gc.freeze()  # keeps the collector of a forked rank from copying the server's pages
    sys.stdout.flush()
    sys.stderr.flush()


_preload()
