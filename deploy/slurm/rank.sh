#!/usr/bin/env bash
# Runs one rank of a server as a task of `srun`: sets the variables that torchrun would.
#   rank.sh PROGRAM [ARGUMENT…]
# Environment: MASTER_PORT, GRPC_PORT, and ADDRESS_FILE, into which rank 0 writes HOST:PORT and the number
# of the job step.
set -euo pipefail

# The first node of the step runs task 0.
read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_STEP_NODELIST")
export MASTER_ADDR
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_STEP_NUM_TASKS LOCAL_RANK=$SLURM_LOCALID
# Tasks on each node as Slurm writes them: "2(x3),1" is 2, 2, 2 and 1.
tasks=()
IFS=, read -ra groups <<<"$SLURM_STEP_TASKS_PER_NODE"
for group in "${groups[@]}"; do
  count=1
  [[ $group =~ ^[0-9]+\(x([0-9]+)\)$ ]] && count=${BASH_REMATCH[1]}
  for ((i = 0; i < count; i++)); do tasks+=("${group%%(*}"); done
done
export LOCAL_WORLD_SIZE=${tasks[$SLURM_NODEID]}

if [ "$RANK" -eq 0 ]; then
  export TANDEM__SERVER__ADVERTISED_ADDRESS=$MASTER_ADDR:$GRPC_PORT
  echo "$MASTER_ADDR:$GRPC_PORT $SLURM_STEP_ID" >"$ADDRESS_FILE.new"
  mv "$ADDRESS_FILE.new" "$ADDRESS_FILE"
fi
exec "$@"
