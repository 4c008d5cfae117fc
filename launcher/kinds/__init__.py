"""The launchers: one file for each kind of cluster.

registry      the launchers by name
kind          the interface
local         processes on this machine
ssh           hosts in a hostfile
mpi           mpirun
slurm         srun in an allocation, sbatch outside one
slurm_inside  what sbatch runs in the allocation
sge           qsub
yarn          YARN's distributed shell
kubernetes    pods

managers/     what the cluster managers have in common: their commands, queues and units
pods/         what kubernetes is made of
"""
