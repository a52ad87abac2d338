"""``paceline extract MODEL DIR``: the language model of a multimodal one, as a model of its own, and back.

A pipeline trains language models. Where the one that is to be trained comes with towers for images or sound, this takes
it out, and afterwards puts the trained one back between the towers, which stay as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_WEIGHTS = ("*.safetensors*", "*.bin*", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.gguf", "*.onnx*", "original/*")
"""Files that hold weights, by their names."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument(
        "model", metavar="NAME_OR_DIR", help="a multimodal model; with --into, the trained language model"
    )
    parser.add_argument("directory", metavar="DIR", help="where to write: a new directory")
    parser.add_argument(
        "--into", metavar="NAME_OR_DIR", help="the multimodal model that it was taken from: write that, with it in it"
    )


def run(args: argparse.Namespace) -> int:
    """Write the language model, or the multimodal one with it; the exit status.

    Raises:
        ValueError: no such models, or a directory that holds something.
    """
    from paceline.hf.language_part import put_back, take_out
    from paceline.hf.quiet_transformers import quiet

    target = Path(args.directory)
    if not args.directory or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise ValueError(f"{args.directory!r} is there, and not empty: give a new directory for the model.")
    source = args.into or args.model
    whole = _multimodal(source)
    with quiet():
        if args.into is None:
            written = take_out(whole)
        else:
            put_back(_language_model(args.model), whole)
            written = whole
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        with quiet():
            written.save_pretrained(part)
        _copy_the_rest(source, part, only_text=args.into is None)
        if target.is_dir():
            target.rmdir()
        os.replace(part, target)
    except Exception as error:  # safetensors has errors of its own for a full disk
        shutil.rmtree(part, ignore_errors=True)
        raise ValueError(f"{target} cannot be written ({error}): give a directory where there is room.") from error
    told = {"directory": str(target), "class": type(written).__name__, "parameters": written.num_parameters()}
    if args.json:
        print(json.dumps(told, indent=2))
    else:
        print(f"{target} is a {told['class']} of {written.num_parameters() / 1e6:.1f} M parameters.")
    return 0


def _multimodal(source: str) -> PreTrainedModel:
    from paceline.hf.language_part import language_part, multimodal_class
    from paceline.hf.quiet_transformers import quiet
    from paceline.hf.sources import config_at

    config = config_at(source)
    model_class = multimodal_class(config)
    if language_part(config) is None or model_class is None:
        raise ValueError(
            f"{source!r} is of model type {config.model_type!r}, in which there is no language model that can be a "
            "pipeline by itself: `paceline check-model` says whether it can be one as it is."
        )
    with quiet():
        return _loaded(source, model_class, config)


def _language_model(source: str) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    from paceline.hf.sources import config_at

    return _loaded(source, AutoModelForCausalLM, config_at(source))


def _loaded(source: str, auto: Any, config: PretrainedConfig) -> PreTrainedModel:
    from paceline.hf.quantised import quantisation_of

    try:
        loaded = auto.from_pretrained(
            source, config=config, dtype="auto", output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (ImportError, OSError) as error:  # the first: of the package that has quantised them
        raise ValueError(f"{source!r} has no weights that can be read: {str(error).splitlines()[0]}") from error
    model: PreTrainedModel = loaded[0]
    if method := quantisation_of(model.config):  # others transformers has dequantised
        raise ValueError(f"the weights of {source!r} are quantised ({method}): give a model whose weights are not.")
    if missing := sorted(loaded[1]["missing_keys"]):  # transformers draws them at random
        raise ValueError(f"the files of {source!r} lack {missing[0]!r}: give a model with all its weights.")
    if others := sorted(loaded[1]["mismatched_keys"]):  # these, too
        name, there, wanted = others[0]
        raise ValueError(
            f"the files of {source!r} have {name!r} of shape {list(there)}, and its config says {list(wanted)}: give a "
            "model whose config fits."
        )
    return model


def _copy_the_rest(source: str, target: Path, *, only_text: bool) -> None:
    """Tokenizer, chat template and, for the whole model, what prepares images and sound."""
    if os.path.isdir(source):
        folder = Path(source)
    else:
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(source, ignore_patterns=list(_WEIGHTS)))
    for file in folder.iterdir():
        is_wanted = not any(file.match(pattern) for pattern in (*_WEIGHTS, ".*", *(["*processor*"] * only_text)))
        if file.is_file() and is_wanted and not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)
