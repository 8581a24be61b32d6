#!/bin/bash
# Train on 4 nodes of 8 GPUs, one task per GPU, and continue after each time limit until the run is
# finished. From the project's folder:
#
#     sbatch examples/slurm.sh --strategy hsdp --data tokens/web ...
#
# By default Slurm gives each task one core, for the run's threads, loader workers, NCCL and saves.
# Set --cpus-per-task to a task's share of the node's cores.
#SBATCH --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=8 --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

# Since Slurm 22.05 srun does not inherit sbatch's --cpus-per-task.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# If a cluster's default is 1, the first rank that exits would terminate the other ranks, and srun
# would exit with 143.
srun --kill-on-bad-exit=0 python train.py "$@"
status=$?
# Status 75: stopped and saved. --requeue alone only requeues a job that has lost a node.
[ $status = 75 ] && scontrol requeue $SLURM_JOB_ID
exit $status
