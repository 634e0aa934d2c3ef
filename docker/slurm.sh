#!/bin/bash
# sbatch docker/slurm.sh: a Ray cluster of ours on the nodes of one allocation. See docs/guides/slurm.md.
#SBATCH --job-name=gemm-tuner
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@60

set -euo pipefail

: "${GEMM_TUNER_BIN:?folder of gemm-tuner, such as /path/to/.venv/bin, on a file system that every node sees}"
: "${GEMM_TUNER_DATABASE_URL:?the PostgreSQL that API and tuners share}"
: "${GEMM_TUNER_HOME:?a folder that the API sees too: it hands out the bundles}"
PORT="${GEMM_TUNER_RAY_PORT:-6379}"
COMPILES="${GEMM_TUNER_COMPILE_PROCESSES:-$((SLURM_CPUS_PER_TASK - 16))}"  # 16 cores stay for the GPU processes
export GEMM_TUNER_DATABASE_URL GEMM_TUNER_HOME RAY_USAGE_STATS_ENABLED=0

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head="${hosts[0]}"
address="$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}'):$PORT"

# Node-local folders: a node's modules are a cache, and sockets do not live on network file systems.
local_home="${SLURM_TMPDIR:-/tmp}/gemm-tuner-$SLURM_JOB_ID"

srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" --gpus=0 --cpus-per-task=2 \
    env GEMM_TUNER_HOME="$local_home-head" "$GEMM_TUNER_BIN/gemm-tuner" node --head --port "$PORT" \
    --node-ip "${address%:*}" &

srun --overlap --nodes="${#hosts[@]}" --ntasks-per-node=1 --gpus-per-node="${SLURM_GPUS_PER_NODE:-8}" \
    env GEMM_TUNER_HOME="$local_home" "$GEMM_TUNER_BIN/gemm-tuner" node --address "$address" \
    --compile-processes "$COMPILES" &

srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" --gpus=0 --cpus-per-task=4 \
    "$GEMM_TUNER_BIN/gemm-tuner" tuner --engine ray --ray-address "$address" &

# Whichever ends first ends the job; the studies go on with the next job, after their last trial.
wait -n
