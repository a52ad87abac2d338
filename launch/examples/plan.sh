#!/usr/bin/env bash
# Find the fastest parallelism for a model on two devices of this machine, and train with it.
#
# bash launch/examples/plan.sh
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
cat >"$work/config.json" <<'JSON'
{
  "model_type": "llama", "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
  "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64
}
JSON

# Layers and links are measured first. Each strategy that can run gets a DeepSpeed JSON, and its command in plans.txt.
paceline plan "$work/config.json" --devices 2 --measure --train-batch-size 16 --seq-length 32 --dtype float32 \
  --write "$work/plan"
best=$(sed -n 's/.*paceline.launch.finetune --deepspeed \([^ ]*\.json\).*/\1/p' "$work/plan/plans.txt" | head -n 1)

deepspeed --num_gpus 2 --master_port "${MASTER_PORT:-29500}" --module paceline.launch.finetune --deepspeed "$best" \
  --output_dir "$work/model" --config_name "$work/config.json" --block_size 32 --max_steps 4 --learning_rate 1e-3
