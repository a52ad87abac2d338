#!/usr/bin/env bash
# From a fresh clone to a fine-tuned model:  bash launch/quickstart.sh [arguments of paceline.launch.finetune]
# Runs on every GPU there is, or on two CPU processes.
# shellcheck source-path=SCRIPTDIR
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment run

found=$("$PYTHON" - <<'EOF'
import os
import socket

import torch

cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    print(torch.cuda.device_count(), cores, probe.getsockname()[1])
EOF
)
read -r num_gpus cores free_port <<<"$found"

options=(--master_port "${MASTER_PORT:-$free_port}")
if ((num_gpus == 0)); then
  options+=(--num_gpus 2)
  export DS_ACCELERATOR=cpu OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > 3 ? cores / 2 : 1))}
elif [[ -z ${CUDA_VISIBLE_DEVICES:-} ]]; then # which the launcher heeds only without --num_gpus
  options+=(--num_gpus "$num_gpus")
fi

# This is the `deepspeed` command. The script of that name may belong to the Python underneath the environment.
exec "$PYTHON" -m deepspeed.launcher.runner "${options[@]}" --module paceline.launch.finetune "$@"
