# scheduler: on this machine
# 3 agents, started by:
hdfs dfs -mkdir -p kvstore-xxxxxx
hdfs dfs -chmod 700 kvstore-xxxxxx
yarn jar '(the distributed shell)' org.apache.hadoop.yarn.applications.distributedshell.Client -jar '(the distributed shell)' -appname kvstore-xxxxxx -num_containers 3 -shell_script '(a private file)' -timeout 2147483647
hdfs dfs -rm -r -f -skipTrash kvstore-xxxxxx
#   server 0: DMLC_JOB_CLUSTER=yarn DMLC_NODE_HOST='(the host)' DMLC_NUM_SERVER=1 DMLC_NUM_WORKER=2 DMLC_PS_ROOT_PORT=0 DMLC_PS_ROOT_URI='(this machine)' DMLC_ROLE=server DMLC_TASK_ID=0 KVSTORE_JOB='(the job)' /usr/bin/python3 (the clone)/kvstore/job/our_module.py servers
#   worker 0: DMLC_JOB_CLUSTER=yarn DMLC_NODE_HOST='(the host)' DMLC_NUM_SERVER=1 DMLC_NUM_WORKER=2 DMLC_PS_ROOT_PORT=0 DMLC_PS_ROOT_URI='(this machine)' DMLC_ROLE=worker DMLC_TASK_ID=0 KVSTORE_JOB='(the job)' W=... /usr/bin/python3 train.py
#   worker 1: DMLC_JOB_CLUSTER=yarn DMLC_NODE_HOST='(the host)' DMLC_NUM_SERVER=1 DMLC_NUM_WORKER=2 DMLC_PS_ROOT_PORT=0 DMLC_PS_ROOT_URI='(this machine)' DMLC_ROLE=worker DMLC_TASK_ID=1 KVSTORE_JOB='(the job)' W=... /usr/bin/python3 train.py
#   an aggregator on each host with two workers or more, if the hosts are several
