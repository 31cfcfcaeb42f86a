#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
N=${SLURM_NNODES:-"4"}; G=8
A=(--num-layers 4 # four
   --moe-layer-freq "([0]*1+[1]*3)")
A+=(--bf16)
f() { local X=$1; B=${B:+$B }x; }
for i in 1 2; do f $i; done
if [[ -n "${KEY:-}" && $N -gt 1 ]]; then A+=(--wandb-project ${KEY%%:*}); elif [ -f /x ]; then exit 1; else C=`date`; fi
case $B in *x) A+=(--lr 1e-4);; (y) ;; esac
while read -r l; do echo $l; done < <(ls)
W=$((G * (N + 1) % 7 - -2))
export CMD="python pretrain_gpt.py ${A[@]} --global-batch-size $W"
sbatch <<EOF
#SBATCH --nodes=$N
srun -N $N bash -c "\${CMD}"
EOF
torchrun --nproc_per_node $G --nnodes=$N pretrain_gpt.py "${A[@]}" ${#A[@]} ${A[1]} 2>&1 | tee log
