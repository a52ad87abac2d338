"""The table of families: compare every causal-LM family of the installed transformers, cut and whole.

``python tests/support/family_table.py --write`` writes ``families.json`` and the section of ``hf/README.md``.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers import __version__ as transformers_version

from paceline.hf import check
from paceline.hf.adapters import ADAPTERS, REASONS
from paceline.hf.anatomy import UnsupportedModelError, anatomy_of
from paceline.hf.check import Family, check_stream_identity, verdict
from paceline.hf.family_configs import NUM_LAYERS, causal_lm_configs, tiny_configs
from paceline.hf.parity import ROUNDING, Parity, check_halves, check_slices, check_split
from paceline.hf.quiet_transformers import quiet
from paceline.hf.router import router_loss_of
from paceline.hf.stage import tied_weight
from paceline.hf.weights import skeleton

OLDEST = "5.17.0"
"""The oldest transformers that pyproject.toml allows; tests/parity/test_families.py passes there too."""

MAX_PARAMETERS = 20_000_000
TIME_LIMIT_S = 600
COMMAND = "python tests/support/family_table.py --write"
README = Path("integration", "paceline", "hf", "README.md")
"""In the checkout."""

BEGIN, END = "<!-- families:begin -->", "<!-- families:end -->"


def measure(config_class: type[PretrainedConfig], boundaries: Sequence[tuple[int, ...]] = ()) -> Family:
    """Compare one family on small configs: :func:`check_split`, and the stream with every dropout turned up."""
    model_type = config_class.model_type
    if model_type in REASONS:
        return _refused(REASONS[model_type])
    try:
        with quiet(), _time_limit(TIME_LIMIT_S), torch.random.fork_rng(devices=[]):
            return _measure(config_class, boundaries)
    except UnsupportedModelError as error:
        return _refused(str(error).partition("cannot be a pipeline: ")[2].rstrip(".") or str(error))
    except Exception as error:
        lines = str(error).splitlines() or [""]
        return _refused(f"no small copy of it can be built ({type(error).__name__}: {lines[0]})")


def _measure(config_class: type[PretrainedConfig], boundaries: Sequence[tuple[int, ...]]) -> Family:
    configs = tiny_configs(config_class)
    differences, tied, router_loss = [], False, False
    for config in configs:
        model = skeleton(config)
        try:
            router_loss |= router_loss_of(model) is not None
        except UnsupportedModelError:
            config.output_router_logits = False  # refused only where it is asked for
        size = sum(parameter.numel() for parameter in model.parameters())
        if size > MAX_PARAMETERS:
            raise ValueError(f"the small copy has {size} parameters, more than {MAX_PARAMETERS}")
        tied |= tied_weight(model, anatomy_of(model)) is not None
        check_stream_identity(_with_dropout(config))
        differences.append(check_split(config, NUM_LAYERS, boundaries=boundaries).worst)
    difference = max(differences)
    if not difference <= ROUNDING:
        return _refused(f"cut into stages it differs from the whole model by {difference:.1e}")
    return Family(verdict(difference), difference, tied, router_loss, configs[0].model_type in ADAPTERS, "")


def check_slices_without_router_loss(config: PretrainedConfig, num_layers: int) -> Parity:
    """:func:`~paceline.hf.parity.check_slices` of a head whose loss has no other beside it, which is refused."""
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False
    return check_slices(config, num_layers)


def list_finer(check_cut: Callable[[PretrainedConfig, int], Parity]) -> None:
    """Print which of the families that train as pipelines do so cut more finely, and why the rest do not.

    Args:
        check_cut: such as :func:`~paceline.hf.parity.check_halves`.
    """
    found = []
    cut = {model_type for model_type, row in check.families().items() if row.difference is not None}
    for config_class in causal_lm_configs():
        if config_class.model_type not in cut:
            continue
        try:
            with quiet(), torch.random.fork_rng(devices=[]):
                difference = max(check_cut(config, NUM_LAYERS).worst for config in tiny_configs(config_class))
            found.append(difference)
            print(config_class.model_type, difference, flush=True)
        except Exception as error:
            print(config_class.model_type, (str(error).splitlines() or [type(error).__name__])[0], flush=True)
    exact = sum(difference == 0.0 for difference in found)
    print(f"{exact} of {len(cut)} exact, {sum(0 < each <= ROUNDING for each in found)} up to rounding")


def _refused(reason: str) -> Family:
    return Family("refused", None, tied=False, router_loss=False, adapter=False, reason=reason)


def _with_dropout(config: PretrainedConfig) -> PretrainedConfig:
    """A copy with every dropout turned up but attention's, which is inside the layers."""
    config = deepcopy(config)
    for name, value in vars(config).items():
        if "drop" in name and "att" not in name and isinstance(value, float):
            setattr(config, name, 0.5)
    return config


@contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def to_json(rows: dict[str, Family]) -> str:
    """``families.json`` from the rows by model type."""
    table: dict[str, Any] = {
        "transformers": [OLDEST, transformers_version],
        "torch": _torch_version(),
        "families": {model_type: asdict(rows[model_type]) for model_type in sorted(rows)},
    }
    return json.dumps(table, indent=1) + "\n"


def to_markdown(rows: dict[str, Family], transformers: str, torch_version: str) -> str:
    """The section of ``hf/README.md``, without its markers."""
    cut = {model_type: row for model_type, row in rows.items() if row.verdict != "refused"}
    exact = [model_type for model_type, row in cut.items() if row.verdict == "exact"]
    groups = {
        "exact, as they come": [t for t in exact if not cut[t].adapter],
        "exact, with an adapter": [t for t in exact if cut[t].adapter],
        f"equal but for rounding (below {ROUNDING:g})": [t for t in cut if cut[t].verdict == "rounding"],
        "of these, with the router's auxiliary loss": [t for t in cut if cut[t].router_loss],
    }
    reasons = sorted({row.reason for row in rows.values() if row.reason})
    groups |= {f"refused: {why}": [t for t, row in rows.items() if row.reason == why] for why in reasons}
    lines = [
        f"Of the {len(rows)} causal-LM families of transformers {transformers}, {len(exact)} train as "
        "pipelines with exactly the loss, logits and gradients of the unsplit model (difference 0.0), "
        f"{len(cut) - len(exact)} with a difference in rounding, and {len(rows) - len(cut)} are refused with the "
        f"reason. Measured in float32 on the CPU (torch {torch_version}) on small copies of four layers, cut into "
        f"1 and 3, into 1, 2 and 1, and behind the embedding and before the head, by `{COMMAND}`; the tests repeat it, "
        f"one cut a family and all cuts of those used most, and with transformers {OLDEST}.",
        "",
        "| Families | | |",
        "|---|--:|---|",
    ]
    lines += [f"| {name} | {len(of)} | {', '.join(sorted(of))} |" for name, of in groups.items() if of]
    return "\n".join(lines) + "\n"


def _torch_version() -> str:
    return torch.__version__.partition("+")[0]


def write(rows: dict[str, Family], root: Path) -> None:
    """Write ``families.json`` into the package and its section in the checkout ``root``.

    Raises:
        ValueError: the README has no markers to write between.
    """
    readme = root / README
    text = readme.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{readme} lacks the lines {BEGIN} and {END}: add them where the table is to stand.")
    Path(check.__file__).with_name("families.json").write_text(to_json(rows))
    section = to_markdown(rows, transformers_version, _torch_version())
    readme.write_text(text.partition(BEGIN)[0] + f"{BEGIN}\n{section}{END}" + text.partition(END)[2])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python tests/support/family_table.py", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write families.json and its section")
    parser.add_argument("--half-layers", action="store_true", help="list which families can be cut within layers")
    parser.add_argument("--head-slices", action="store_true", help="list which families can have the head in slices")
    parser.add_argument("--root", type=Path, default=Path(), help="the checkout (default: this one)")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    if arguments.half_layers or arguments.head_slices:
        list_finer(check_halves if arguments.half_layers else check_slices_without_router_loss)
        return 0
    rows = {}
    for config_class in causal_lm_configs():
        row = rows[config_class.model_type] = measure(config_class)
        print(config_class.model_type, row.verdict, row.reason or row.difference, flush=True)
    if arguments.write:
        write(rows, arguments.root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
