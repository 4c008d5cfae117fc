"""A job's processes as pods of Kubernetes.

crew         runs tasks as pods: a crew
manifests    the objects of a job
watch        what becomes of the pods. No I/O
log          the output of one pod
kubectl      runs kubectl
yaml         writes YAML, for `--dry-run`
entry        the first program in a container
observed     what tells observers in the scheduler's pod where it is
"""
