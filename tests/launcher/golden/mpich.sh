# scheduler: on this machine
# MPICH, with KVSTORE_ENLIST=... in the environment:
mpirun -n 3 -bind-to none -genvlist KVSTORE_ENLIST /usr/bin/python3 -c 'import os, sys; user = [os.path.abspath(p) for p in os.getenv("PYTHONPATH", "").split(":") if p]; sys.path[:] = [p for p in sys.path if p and p not in user] + user; from launcher.agents.main import main; sys.exit(main())'
#   server 0: DMLC_JOB_CLUSTER=mpi DMLC_NODE_HOST='(the host)' DMLC_NUM_SERVER=1 DMLC_NUM_WORKER=2 DMLC_PS_ROOT_PORT=0 DMLC_PS_ROOT_URI='(this machine)' DMLC_ROLE=server DMLC_TASK_ID=0 HOME=... KVSTORE_JOB='(the job)' /usr/bin/python3 (the clone)/kvstore/job/our_module.py servers
#   worker 0: DMLC_JOB_CLUSTER=mpi DMLC_NODE_HOST='(the host)' DMLC_NUM_SERVER=1 DMLC_NUM_WORKER=2 DMLC_PS_ROOT_PORT=0 DMLC_PS_ROOT_URI='(this machine)' DMLC_ROLE=worker DMLC_TASK_ID=0 HOME=... KVSTORE_JOB='(the job)' W=... /usr/bin/python3 train.py
#   worker 1: DMLC_JOB_CLUSTER=mpi DMLC_NODE_HOST='(the host)' DMLC_NUM_SERVER=1 DMLC_NUM_WORKER=2 DMLC_PS_ROOT_PORT=0 DMLC_PS_ROOT_URI='(this machine)' DMLC_ROLE=worker DMLC_TASK_ID=1 HOME=... KVSTORE_JOB='(the job)' W=... /usr/bin/python3 train.py
#   an aggregator on each host with two workers or more, if the hosts are several
# scheduler: on this machine
# MPICH, with KVSTORE_ENLIST=... in the environment:
# hosts:
#   node1:4
#   node2
#   10.0.0.3:2
mpirun -n 3 -bind-to none -genvlist KVSTORE_ENLIST -f '(hosts)' --mca btl tcp,self '/opt/a python' -c 'import os, sys; user = [os.path.abspath(p) for p in os.getenv("PYTHONPATH", "").split(":") if p]; sys.path[:] = [p for p in sys.path if p and p not in user] + user; from launcher.agents.main import main; sys.exit(main())'
#   server 0: DMLC_JOB_CLUSTER=mpi DMLC_NODE_HOST='(the host)' DMLC_NUM_SERVER=1 DMLC_NUM_WORKER=2 DMLC_PS_ROOT_PORT=0 DMLC_PS_ROOT_URI='(this machine)' DMLC_ROLE=server DMLC_TASK_ID=0 HOME=... KVSTORE_JOB='(the job)' '/opt/a python' (the clone)/kvstore/job/our_module.py servers
#   worker 0: DMLC_JOB_CLUSTER=mpi DMLC_NODE_HOST='(the host)' DMLC_NUM_SERVER=1 DMLC_NUM_WORKER=2 DMLC_PS_ROOT_PORT=0 DMLC_PS_ROOT_URI='(this machine)' DMLC_ROLE=worker DMLC_TASK_ID=0 HOME=... KVSTORE_JOB='(the job)' W=... '/opt/a python' train.py
#   worker 1: DMLC_JOB_CLUSTER=mpi DMLC_NODE_HOST='(the host)' DMLC_NUM_SERVER=1 DMLC_NUM_WORKER=2 DMLC_PS_ROOT_PORT=0 DMLC_PS_ROOT_URI='(this machine)' DMLC_ROLE=worker DMLC_TASK_ID=1 HOME=... KVSTORE_JOB='(the job)' W=... '/opt/a python' train.py
#   an aggregator on each host with two workers or more, if the hosts are several
