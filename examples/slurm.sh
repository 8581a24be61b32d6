#!/bin/bash
# Train on 4 nodes of 8 GPUs, with one torchrun per node, and continue after each time limit until the
# run is finished. From the project's folder, with the folder of the run first:
#
#     sbatch examples/slurm.sh runs/web --strategy hsdp --data tokens/web ...
#
# By default Slurm gives a task one core, which its 8 ranks, their loader workers, NCCL and saves would
# share. Set --cpus-per-task to the node's cores, and RANKS_PER_NODE for nodes without 8 GPUs.
#SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=64 --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

out=$1
shift
saved() { ls "$out/checkpoints" 2> /dev/null; }
before=$(saved)

# Since Slurm 22.05 srun does not inherit sbatch's --cpus-per-task.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
first_host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# torchrun passes on only the signals named here, and kills ranks that have not saved when the time for
# their end is over. If a cluster's default for --kill-on-bad-exit is 1, the first node to end would
# terminate the others.
srun --kill-on-bad-exit=0 torchrun --nnodes "$SLURM_NNODES" --nproc_per_node "${RANKS_PER_NODE:-8}" \
    --rdzv-backend c10d --rdzv-endpoint "$first_host:$((20000 + SLURM_JOB_ID % 10000))" \
    --rdzv-id "$SLURM_JOB_ID" --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2 \
    --shutdown-timeout 110 train.py --out "$out" "$@"
status=$?

# torchrun turns the status 75 of a run that stopped and saved into 1. A start that failed without a new
# checkpoint would fail again. --requeue alone only requeues a job that has lost a node.
if [ $status -ne 0 ] && [ "$(saved)" != "$before" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
