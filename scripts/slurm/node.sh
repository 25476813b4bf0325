#!/usr/bin/env bash
# Start the workers of one node. train.sbatch runs this on every node; arguments are those of mxtrain.train.
#
# MXTRAIN_HEAD is host:port of the first node.
set -euo pipefail

# Slurm's warning reaches torchrun, too, which it would end, and with it the workers. Workers handle it themselves.
trap '' USR1
exec torchrun --nnodes="$SLURM_NNODES" --nproc_per_node="${NGPU:-gpu}" --rdzv_backend=c10d \
    --rdzv_endpoint="$MXTRAIN_HEAD" --rdzv_id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" -m mxtrain.train "$@"
