#!/usr/bin/env bash
# Fine-tune on the GPUs of this machine:
#   bash one_node.sh --deepspeed ds_configs/pp4.json --model_name_or_path <model> --dataset_name <dataset>
# All arguments go to paceline.launch.finetune.
#   NUM_GPUS               the first so many GPUs; by default all
#   CUDA_VISIBLE_DEVICES   these GPUs, such as 2,3; NUM_GPUS must not be set then
#   MASTER_PORT            another one for each job on the machine; by default 29500
#   DRY_RUN=1              print the command and do not run it
set -euo pipefail

exec ${DRY_RUN:+echo} deepspeed ${NUM_GPUS:+--num_gpus "$NUM_GPUS"} --master_port "${MASTER_PORT:-29500}" \
  --module paceline.launch.finetune "$@"
