#!/usr/bin/env bash
# Supervised training, then tandem GRPO from its last checkpoint:
#   bash examples/scripts/sft_then_grpo.sh [dotted.key=value ...]
# The overrides go to both runs, which are in runs/sft_then_grpo. What is done is not done again, and
# a run that was interrupted goes on.
set -euo pipefail
case ${1:-} in
  -*) sed -n '2,5s/^# //p' "${BASH_SOURCE[0]}"; exit ;;
esac
recipes=$(dirname "${BASH_SOURCE[0]}")/../recipes
runs=runs/sft_then_grpo

tandem sft "$recipes/sft.yaml" "$@" \
  run_dir=$runs/sft cluster.directory=$runs/sft-cluster --resume auto

# No KL: its reference would be the base model, not the one that the first run trained.
tandem train "$recipes/grpo.yaml" "$@" start_from=$runs/sft objective.kl_coefficient=0 \
  run_dir=$runs/grpo cluster.directory=$runs/grpo-cluster --resume auto
