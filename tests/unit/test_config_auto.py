"""``"auto"`` values against Hugging Face's own Trainer configuration."""

import copy
import re
from dataclasses import dataclass, replace

import pytest
from transformers import TrainingArguments
from transformers.integrations import deepspeed as hf

from paceline.config import fill_auto, open_autos

ALL_AUTO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
}


@dataclass
class Args:
    """A command line smaller than Trainer's."""

    per_device_train_batch_size: int | None = 8
    gradient_accumulation_steps: int | None = 1
    max_grad_norm: float = 1.0
    learning_rate: float = 5e-5
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: float = 0
    fp16: bool = False
    bf16: bool = False


def fill(config, args=None, given=(), **more):
    settings = {"data_parallel": 2, "hidden_size": 64, "max_steps": 100} | more
    return fill_auto(config, Args() if args is None else args, given=given, **settings)


@pytest.fixture(autouse=True)
def no_global_left():
    hf.unset_hf_deepspeed_config()
    yield
    assert hf.deepspeed_config() is None
    assert hf._hf_deepspeed_config_weak_ref is None


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "bf16": True, "warmup_steps": 0.25},
        {"learning_rate": 1e-3, "adam_beta2": 0.95, "weight_decay": 0.1, "max_grad_norm": 0.0, "warmup_steps": 7},
        {"bf16_full_eval": True, "adam_epsilon": 1e-6, "save_on_each_node": True},
    ],
)
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_same_as_trainer(tmp_path, flags, zero_stage):
    config = copy.deepcopy(ALL_AUTO)
    config["zero_optimization"]["stage"] = zero_stage
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **flags)
    assert args.world_size == 1
    theirs = hf.HfTrainerDeepSpeedConfig(config)
    theirs.trainer_config_process(args)
    model = type("Model", (), {"config": type("Config", (), {"hidden_size": 64})})
    theirs.trainer_config_finalize(args, model, 100)
    if zero_stage != 3:  # Trainer leaves these two "auto", and DeepSpeed drops them
        assert theirs.config["zero_optimization"].pop("stage3_prefetch_bucket_size") == "auto"
        assert theirs.config["zero_optimization"].pop("stage3_param_persistence_threshold") == "auto"
    wanted = copy.deepcopy(theirs.config)
    # transformers before 5.20 writes 0 here, which DeepSpeed 0.19.6 and later refuse.
    params = wanted["scheduler"]["params"]
    params["warmup_num_steps"] = max(1, params["warmup_num_steps"])
    hf.unset_hf_deepspeed_config()
    assert fill(config, args, data_parallel=1) == wanted


def test_input_is_not_changed_and_nothing_is_left():
    config = copy.deepcopy(ALL_AUTO)
    filled = fill(config)
    assert config == ALL_AUTO
    assert open_autos(filled) == []
    assert len(open_autos(config)) == 17
    assert filled["train_batch_size"] == 16


def test_a_trainers_config_survives():
    owner = hf.HfTrainerDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    fill(ALL_AUTO)
    assert hf.deepspeed_config() is owner.config
    with pytest.raises(ValueError, match="learning_rate"):
        fill({"optimizer": {"params": {"lr": 1}}}, given={"learning_rate"})
    assert hf.deepspeed_config() is owner.config
    hf.unset_hf_deepspeed_config()


def test_absent_optimizer_and_clipping():
    assert fill({}, replace(Args(), learning_rate=1e-3, max_grad_norm=0.5)) == {
        "gradient_clipping": 0.5,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
        },
    }


def test_a_given_flag_fills_an_absent_key():
    args = replace(Args(), per_device_train_batch_size=4, gradient_accumulation_steps=3, bf16=True, warmup_steps=5)
    config = {"optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupLR"}}
    given = {"per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "warmup_steps", "adam_beta2"}
    assert fill(config, args, given) == {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"betas": [0.9, 0.999]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    }
    assert fill({"optimizer": {"type": "SGD"}}, args, {"adam_beta2"})["optimizer"] == {"type": "SGD"}


def test_what_is_written_beats_defaults():
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 5,
        "train_batch_size": "auto",
        "gradient_clipping": 0.1,
        "optimizer": {"type": "Adam", "params": {"lr": 1, "betas": [0.8, 0.95]}},
    }
    assert fill(config) == config | {"train_batch_size": 30}
    # Only the second beta is given, and it agrees.
    args = replace(Args(), adam_beta2=0.95)
    assert fill(config, args, {"adam_beta2"})["optimizer"] == config["optimizer"]


def test_batch_sizes_that_the_command_line_leaves_open():
    args = replace(Args(), per_device_train_batch_size=None, gradient_accumulation_steps=None)
    keys = {"train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"}
    assert not keys & set(fill(ALL_AUTO, args))
    assert not keys & set(fill({}, args))
    assert fill({"train_batch_size": 8}, args)["train_batch_size"] == 8
    args = replace(args, gradient_accumulation_steps=4)
    assert fill(dict.fromkeys(keys, "auto"), args).keys() & keys == {"gradient_accumulation_steps"}


@pytest.mark.parametrize(
    ("config", "flags", "message"),
    [
        (
            {"optimizer": {"type": "Adam", "params": {"lr": 0.001}}},
            {"learning_rate": 0.01},
            "optimizer.params.lr is 0.001 in the JSON and --learning_rate on the command line makes it 0.01; drop one "
            'of them, or write "auto" in the JSON.',
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"betas": [0.9, 0.95]}}},
            {"adam_beta1": 0.8},
            "optimizer.params.betas is [0.9, 0.95] in the JSON and --adam_beta1 on the command line makes it "
            '[0.8, 0.95]; drop one of them, or write "auto" in the JSON.',
        ),
        (
            {"train_batch_size": 64},
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
            "train_batch_size is 64 in the JSON and --per_device_train_batch_size and --gradient_accumulation_steps "
            'on the command line makes it 16; drop one of them, or write "auto" in the JSON.',
        ),
        (
            {"bf16": {"enabled": False}},
            {"bf16": True},
            "bf16.enabled is false in the JSON and --bf16 on the command line makes it true; drop one of them, or "
            'write "auto" in the JSON.',
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}},
            {"warmup_steps": 0.5},
            "scheduler.params.warmup_num_steps is 10 in the JSON and --warmup_steps on the command line makes it 50; "
            'drop one of them, or write "auto" in the JSON.',
        ),
    ],
)
def test_contradictions(config, flags, message):
    args = replace(Args(), **flags)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fill(config, args, flags)
    fill(config, args)  # as defaults they contradict nothing


@pytest.mark.parametrize(
    ("config", "more", "message"),
    [
        (
            {"scheduler": {"params": {"total_num_steps": "auto"}}},
            {"max_steps": None},
            'scheduler.params.total_num_steps is "auto" and the number of steps is unknown; give --max_steps or write '
            "a number.",
        ),
        (
            {"zero_optimization": {"reduce_bucket_size": "auto"}},
            {"hidden_size": None},
            'zero_optimization.reduce_bucket_size is "auto" and the hidden size of the model is unknown; write a '
            "number.",
        ),
        (
            {"wandb": {"tags": ["a", "auto"]}},
            {},
            'wandb.tags[1] is "auto" and no command-line flag fills it; write a value or leave the key out.',
        ),
        ({"scheduler": None}, {}, "scheduler is null: it must be an object; write {} or leave it out."),
        ({"optimizer": {"params": 1}}, {}, "optimizer.params is 1: it must be an object; write {} or leave it out."),
        ({"bf16": True}, {}, "bf16 is true: it must be an object; write {} or leave it out."),
        ({"optimizer": "Adam"}, {}, 'optimizer is "Adam": it must be an object; write {} or leave it out.'),
        (
            {"bf16": {"enabled": "false"}},
            {},
            'bf16.enabled is "false": it must be true or false; write it without quotes.',
        ),
        ({"dump_state": "True"}, {}, 'dump_state is "True": it must be true or false; write it without quotes.'),
    ],
)
def test_refusals(config, more, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fill(config, **more)


def test_warmup_in_steps_needs_no_length():
    config = {"scheduler": {"params": {"warmup_num_steps": "auto"}}}
    assert fill(config, replace(Args(), warmup_steps=7), max_steps=None)["scheduler"]["params"] == {
        "warmup_num_steps": 7
    }
    with pytest.raises(ValueError, match=r"^scheduler\.params\.warmup_num_steps is"):
        fill(config, replace(Args(), warmup_steps=0.1), max_steps=None)


def test_deepspeeds_own_autos_stay():
    config = {
        "pipeline": {"stages": "auto"},
        "data_types": {"keep_in_fp32_modules": "auto"},
        "expert_parallel": {"top_k": "auto"},
    }
    assert fill(config) | config == fill(config)
    assert fill_auto(config, None, data_parallel=1) == config


def test_without_a_command_line():
    assert fill_auto({"zero_optimization": True}, None, data_parallel=1) == {"zero_optimization": {"stage": 1}}
    with pytest.raises(ValueError, match=r".") as error:
        fill_auto(ALL_AUTO, None, data_parallel=1)
    assert str(error.value) == (
        'train_micro_batch_size_per_gpu is "auto" and there is no command line to fill it from; write a value or '
        "leave the key out."
    )
