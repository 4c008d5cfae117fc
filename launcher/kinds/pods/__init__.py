"""A job's processes as pods of Kubernetes."""
