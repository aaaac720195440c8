#!/usr/bin/env bash
# Prints how many compilers and tests to run at a time: one per core, but no more than one per 2 GB
# of available memory, which a compiler needs for libtorch's headers.
# The cores and the memory of a container are those of its control group.
set -euo pipefail

cores=$(nproc)
read -r quota period 2>/dev/null </sys/fs/cgroup/cpu.max || quota=max
if [ "$quota" != max ] && [ $((quota / period)) -lt "$cores" ]; then cores=$((quota / period)); fi
memory=$(awk '/^MemAvailable:/ { printf "%.0f", $2 * 1024 }' /proc/meminfo)
limit=$(cat /sys/fs/cgroup/memory.max 2>/dev/null || echo max)
if [ "$limit" != max ] && [ "$limit" -lt "$memory" ]; then memory=$limit; fi
jobs=$((memory / 2000000000 < cores ? memory / 2000000000 : cores))
echo $((jobs > 1 ? jobs : 1))
