#!/usr/bin/env bash
# Under SLURM, on nodes that share a disk: sbatch extras/launch/slurm.sh step07_moe_ep.py --tp 8 --save-every 500 --out /shared/run
# Five minutes before its time is over, the run saves, ends and is queued again (a training step and its save must
# fit into these five minutes); so it does after `scancel --signal=USR1
# --batch JOB`. If a node has several networks, first: export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=eth0
# Tried on 27 November 2026 under a real SLURM (its version was not noted), two nodes in one machine, without GPUs: a job
# that got the signal saved, was queued again, and had the losses of one process. srun's two flags were added a day later.
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --time=24:00:00
#SBATCH --requeue --signal=B:USR1@300 --open-mode=append
again() { scancel --signal=USR1 "$SLURM_JOB_ID"; wait; scontrol requeue "$SLURM_JOB_ID"; }
trap again USR1
srun --kill-on-bad-exit=1 --cpu-bind=none torchrun --nnodes="$SLURM_NNODES" --nproc_per_node="${SLURM_GPUS_ON_NODE:-1}" --rdzv_id="$SLURM_JOB_ID" \
    --rdzv_backend=c10d --rdzv_endpoint="$(hostname):29500" --signals-to-handle=SIGTERM,SIGINT,SIGUSR1 --shutdown-timeout=240 \
    "$@" --resume auto &
wait $!
