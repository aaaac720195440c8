#!/bin/bash
# Runs the ranks of a server that share a pod: each sees the pod's GPUs and its /dev/shm.
#   ranks.sh RANKS_PER_POD RANKS MASTER_ADDR MASTER_PORT PROGRAM [ARGUMENT…]
# POD_INDEX is the number of the pod among those of the server. The exit code is that of the first
# rank that ends, which ends the others; a signal reaches all of them.
set -u
count=$1
export WORLD_SIZE=$2 MASTER_ADDR=$3 MASTER_PORT=$4 LOCAL_WORLD_SIZE=$1
shift 4

ranks=() asked=false
stop() { kill -TERM "${ranks[@]}" 2>/dev/null; }
trap 'asked=true; stop' TERM INT
for ((local = 0; local < count; local++)); do
  RANK=$((POD_INDEX * count + local)) LOCAL_RANK=$local "$@" &
  ranks+=($!)
done

code=0 left=$count
while [ "$left" -gt 0 ]; do
  wait -n -p ended
  result=$?
  if [ -z "${ended:-}" ]; then # a signal ended the wait, or no rank is left
    [ "$result" -ne 127 ] || break
    continue
  fi
  left=$((left - 1))
  [ "$code" -ne 0 ] || code=$result
  # Ranks drain together. One that ends by itself takes the others with it.
  $asked || stop
  asked=true
done
exit "$code"
