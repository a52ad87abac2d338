#!/usr/bin/env bash
# Fine-tune on several machines, started from one of them:
#   bash several_nodes.sh <hostfile> --deepspeed ds_configs/pp4.json --model_name_or_path <model> ...
# The other arguments go to paceline.launch.finetune. Here: pdsh, and ssh to every host without a password. On every
# host: this directory, the Python environment and the model under the same paths.
#   MASTER_ADDR   address of the first host as the others see it; by default asked of that host
#   MASTER_PORT   by default 29500
#   DRY_RUN=1     print the command and do not run it
set -euo pipefail

if [[ ! -f ${1:-} ]]; then
  echo "usage: $0 <hostfile> [arguments of paceline.launch.finetune]; hostfile.example shows a hostfile" >&2
  exit 2
fi
hostfile=$1
shift

exec ${DRY_RUN:+echo} deepspeed --hostfile "$hostfile" ${MASTER_ADDR:+--master_addr "$MASTER_ADDR"} \
  --master_port "${MASTER_PORT:-29500}" --module paceline.launch.finetune "$@"
