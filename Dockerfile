# An image for jobs on a cluster: torch, and this package from its wheel. Programs of yours go into an image on top of it.
#
#   make dist
#   docker build -t registry.example/kvstore:cpu .
#   docker build -t registry.example/kvstore:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
#   docker build -t registry.example/kvstore:own --build-arg BASE=an-image-with-torch --build-arg TORCH=torch .
#
# BASE needs Python 3.10 or later with venv. Its own torch is kept if it is what TORCH asks for. For GPUs a base without
# CUDA will do: torch brings CUDA's libraries along, and the nodes have the driver.
ARG BASE=python:3.12-slim
# The argument has the version.
# hadolint ignore=DL3006
FROM ${BASE}

ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

ENV PATH=/opt/kvstore/bin:$PATH PYTHONUNBUFFERED=1
# The version of the wheel is that of the file.
# hadolint ignore=DL3013
RUN --mount=type=bind,source=dist,target=/dist \
    python3 -m venv --system-site-packages /opt/kvstore \
    && pip install --no-cache-dir --index-url "$TORCH_INDEX" "$TORCH" \
    && pip install --no-cache-dir /dist/*.whl \
    && useradd --create-home --uid 10001 worker

# By number, so that Kubernetes can tell that it is not root.
USER 10001
WORKDIR /home/worker
CMD ["launch.py", "--help"]
