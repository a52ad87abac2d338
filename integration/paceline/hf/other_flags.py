"""Flags and values of other programs, the Trainer's first of all, and what to do instead."""

from __future__ import annotations

ELSEWHERE = {
    "dtype": "set bf16 or fp16, here or in the DeepSpeed JSON",
    "torch_dtype": "set bf16 or fp16, here or in the DeepSpeed JSON",
    "do_train": "leave it out, training is what this program does",
    "do_eval": "leave it out and use --eval_strategy",
    "do_predict": "leave it out and use --sample_prompt",
    "dataset_text_field": "use --text_column",
    "assistant_only_loss": "leave it out, --completion_only_loss is the same for messages",
    "packing_strategy": "leave it out, --packing goes by best fit decreasing",
    "max_length": "use --block_size",
    "max_seq_length": "use --block_size",
    "use_fast_tokenizer": "leave it out, the fast tokenizer is taken where there is one",
    "optim": "set the optimizer in the DeepSpeed JSON",
    "optim_args": "set the optimizer in the DeepSpeed JSON",
    "optim_target_modules": "set the optimizer in the DeepSpeed JSON",
    "optimizer": "set the optimizer in the DeepSpeed JSON",
    "lr_scheduler_kwargs": "set the scheduler in the DeepSpeed JSON",
    "model": "use --model_name_or_path",
    "dataset": "use --dataset_name or --train_file",
    "lr": "use --learning_rate",
    "epochs": "use --num_train_epochs",
    "batch_size": "use --per_device_train_batch_size",
    "train_batch_size": "use --per_device_train_batch_size",
    "per_device_batch_size": "use --per_device_train_batch_size",
    "auto_find_batch_size": "leave it out, choose --per_device_train_batch_size",
    "load_best_model_at_end": "leave it out, the last model is written; `paceline export` takes any checkpoint",
    "metric_for_best_model": "leave it out, the last model is written; `paceline export` takes any checkpoint",
    "greater_is_better": "leave it out, the last model is written; `paceline export` takes any checkpoint",
    "push_to_hub": "leave it out, upload --output_dir afterwards with `hf upload`",
    "logging_dir": "set TENSORBOARD_LOGGING_DIR in the environment",
    "logging_strategy": "leave it out and use --logging_steps",
    "logging_first_step": "leave it out and use --logging_steps",
    "log_level": "leave it out",
    "eval_on_start": "leave it out, --eval_strategy evaluates before the first step too",
    "eval_accumulation_steps": "leave it out, evaluation keeps no outputs",
    "prediction_loss_only": "leave it out, evaluation computes the loss only",
    "save_safetensors": "leave it out, safetensors is what is written",
    "save_only_model": "leave it out, `paceline export` makes a model of a checkpoint",
    "save_on_each_node": "leave it out, --output_dir is one directory for all nodes",
    "ignore_data_skip": "leave it out, a resumed run goes on in the data at no cost",
    "data_seed": "leave it out, --seed is the data's too",
    "group_by_length": "leave it out, --packing wastes less",
    "train_sampling_strategy": "leave it out, --packing wastes less",
    "remove_unused_columns": "leave it out, only the columns of a sample are kept",
    "label_smoothing_factor": "leave it out, the loss is the model's own",
    "neftune_noise_alpha": "leave it out, embeddings get no noise",
    "use_liger_kernel": "leave it out, layers run as transformers has them",
    "tf32": "leave it out, torch's own setting holds",
    "use_cache": "leave it out, training keeps no cache",
    "gradient_checkpointing_kwargs": "leave it out, --gradient_checkpointing has no options",
    "activation_checkpointing": "use --gradient_checkpointing",
    "low_cpu_mem_usage": "leave it out, a rank loads its own stage only",
    "no_cuda": "set DS_ACCELERATOR=cpu in the environment",
    "use_cpu": "set DS_ACCELERATOR=cpu in the environment",
    "lora_task_type": "leave it out, models are causal language models",
    "lora_bias": "leave it out, adapters have none; give get_peft_model's result to paceline.initialize for others",
    "bnb_4bit_compute_dtype": "leave it out, weights compute in the dtype of the training (bf16 or fp16)",
    "bnb_4bit_quant_storage": "leave it out",
}
"""Flags of other programs -> what to do here."""

ELSEWHERE_BY_PREFIX = {
    "hub_": "leave it out, upload --output_dir afterwards with `hf upload`",
    "fsdp": "leave it out, a pipeline's layers are divided by paceline.pipeline in the DeepSpeed JSON",
    "ddp_": "leave it out, replicas are what the stages leave of the ranks",
    "dataloader_": "leave it out, rows are tokenized before training, or with --streaming as they are read",
    "torch_compile": 'leave it out, "compile": true in "paceline"."pipeline" of the DeepSpeed JSON compiles layers',
    "lora_": "see --help, or give get_peft_model's result to paceline.initialize in a loop of your own",
    "trackio_": "set what trackio reads from the environment, and use --report_to trackio",
}

WHOLE_STEPS = "a whole number of steps; a share of the training is not taken"

VALUE_REMEDIES = {
    "save_strategy": "steps with --save_steps; `paceline export` takes the checkpoint that you find best",
    "eval_strategy": "steps with --eval_steps",
    "save_steps": WHOLE_STEPS,
    "eval_steps": WHOLE_STEPS,
    "logging_steps": WHOLE_STEPS,
    "resume_from_checkpoint": "true for the last checkpoint in --output_dir, auto for that or a beginning, or its "
    "directory",
}
"""Remedies for values that do not parse."""
