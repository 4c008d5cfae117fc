sbatch --parsable --job-name=mnist --ntasks=3 --chdir=/ --output=//.kvstore-job.out --error=//.kvstore-job.err --open-mode=truncate --no-requeue --partition=gpu --time=2:00:00 --cpus-per-task=4 --mem-per-cpu=1536M --gpus=4 '--account=a b' --exclusive
# with this script on standard input:
#!/bin/sh
exec /usr/bin/python3 -c 'import os, sys; user = [os.path.abspath(p) for p in os.getenv("PYTHONPATH", "").split(":") if p]; sys.path[:] = [p for p in sys.path if p and p not in user] + user; from launcher.kinds.slurm import main; sys.exit(main())' <<'KVSTORE_END_OF_JOB'
(the job, with its variables: ...)
KVSTORE_END_OF_JOB
# in the allocation, with KVSTORE_ENLIST=... in the environment:
srun --ntasks=3 --kill-on-bad-exit=1 --input=none --mpi=none --unbuffered --cpus-per-task=4 '--account=a b' --exclusive /usr/bin/python3 -c 'import os, sys; user = [os.path.abspath(p) for p in os.getenv("PYTHONPATH", "").split(":") if p]; sys.path[:] = [p for p in sys.path if p and p not in user] + user; from launcher.agents.main import main; sys.exit(main())'
#   server 0: DMLC_JOB_CLUSTER=slurm DMLC_NODE_HOST='(the host)' DMLC_NUM_SERVER=1 DMLC_NUM_WORKER=2 DMLC_PS_ROOT_PORT=0 DMLC_PS_ROOT_URI='(this machine)' DMLC_ROLE=server DMLC_TASK_ID=0 KVSTORE_JOB='(the job)' /usr/bin/python3 (the clone)/kvstore/job/our_module.py servers
#   worker 0: DMLC_JOB_CLUSTER=slurm DMLC_NODE_HOST='(the host)' DMLC_NUM_SERVER=1 DMLC_NUM_WORKER=2 DMLC_PS_ROOT_PORT=0 DMLC_PS_ROOT_URI='(this machine)' DMLC_ROLE=worker DMLC_TASK_ID=0 KVSTORE_JOB='(the job)' W=... /usr/bin/python3 train.py
#   worker 1: DMLC_JOB_CLUSTER=slurm DMLC_NODE_HOST='(the host)' DMLC_NUM_SERVER=1 DMLC_NUM_WORKER=2 DMLC_PS_ROOT_PORT=0 DMLC_PS_ROOT_URI='(this machine)' DMLC_ROLE=worker DMLC_TASK_ID=1 KVSTORE_JOB='(the job)' W=... /usr/bin/python3 train.py
#   an aggregator on each host with two workers or more, if the hosts are several
