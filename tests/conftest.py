"""Environment and fixtures of all tests. Runs before anything imports torch, DeepSpeed or transformers."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib import metadata

import pytest
from hypothesis import HealthCheck, settings

from support.tiers import missing

_OWN_CACHE = "PACELINE_TESTS_HF_HOME"


def _prepare_environment() -> None:
    os.environ.update(HF_DATASETS_OFFLINE="1", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    if not os.path.exists("/dev/nvidiactl"):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if _OWN_CACHE not in os.environ:  # workers of pytest-xdist inherit it
        os.environ[_OWN_CACHE] = tempfile.mkdtemp(prefix="paceline-hf-")
        atexit.register(shutil.rmtree, os.environ[_OWN_CACHE], ignore_errors=True)
    # A process that was killed while it built one of DeepSpeed's extensions leaves a lock that others wait for.
    os.environ["TORCH_EXTENSIONS_DIR"] = os.path.join(os.environ[_OWN_CACHE], "torch_extensions")
    os.environ["HF_HOME"] = os.environ[_OWN_CACHE]
    for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_MODULES_CACHE", "HF_ASSETS_CACHE", "HF_TOKEN"):
        os.environ.pop(name, None)


_prepare_environment()

# Shared cores make single examples slow now and then, which says nothing about the code.
# New examples are for those who can look into what they find; continuous integration draws the same ones every time.
settings.register_profile(
    "paceline", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("paceline")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the files in tests/golden")


def pytest_report_header() -> str:
    return ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "deepspeed", "transformers"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = [os.path.relpath(config.invocation_params.dir / path, config.rootpath) for path in config.args]
    gone = missing((item.nodeid for item in items), asked)
    if gone and not session.testsfailed:  # what does not import has said so itself
        raise pytest.UsageError(f"tests/support/tiers.py names tests that are not there: {', '.join(gone)}")
    _skip_without_gpu(items)


def pytest_collection_finish() -> None:
    gc.set_threshold(50_000, 20, 20)  # the default costs a worker a tenth of its time
    gc.freeze()


def _skip_without_gpu(items: list[pytest.Item]) -> None:
    is_rehearsal = os.environ.get("PACELINE_GPU_TESTS_ON") == "cpu"
    markers = [(item, item.get_closest_marker("gpu")) for item in items]
    marked = [item for item, gpu in markers if gpu and not (is_rehearsal and gpu.kwargs.get("is_rehearsed"))]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device: run `bash tests/run.sh -m gpu` on a machine with one")
    for item in marked:
        item.add_marker(skip)


@pytest.fixture
def no_patches() -> Iterator[None]:
    """None is applied meanwhile: a trainer that another test has made leaves some for the rest of its process."""
    from paceline.patches import registry

    left = [active.patch for active in registry._ACTIVE.values()]
    for patch in reversed(left):
        registry._undo(patch)
    yield
    registry.apply(*left)


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether this run writes the golden files rather than compares with them."""
    return bool(request.config.getoption("--update-golden"))
