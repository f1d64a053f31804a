# The image of every Dataflow worker, with a GPU or without. Build from the root of the checkout:
#   docker build -f docker/gpu-worker.Dockerfile -t REGION-docker.pkg.dev/PROJECT/ops6k/gpu-worker:1 .
# The launcher must run the same minor Python (3.12) and the same Beam as this image: functions are
# pickled there and unpickled here.
ARG BEAM=2.77.0
ARG CUDA=13.0.1

FROM apache/beam_python3.12_sdk:${BEAM} AS beam

# devel, not runtime: workers compile solutions, so nvcc and the CUDA headers must be there.
FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04

# g++ for solutions and for nvcc's host side; python3-dev because torch.compile builds C++ with Python's
# headers; no recommended packages, which would pull in a second compiler.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# A venv, because Ubuntu's own Python refuses pip; first on PATH, because Beam's boot runs `python`.
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:${PATH}

# The lock file alone first: the layer with torch is rebuilt only when a version changes.
# gcsfs lets the store and the sink reach gs://; it is released together with fsspec, in equal versions.
COPY requirements.lock /opt/ops6k/requirements.lock
RUN pip install --no-cache-dir -r /opt/ops6k/requirements.lock \
    && pip install --no-cache-dir "gcsfs==$(python -c 'import fsspec; print(fsspec.__version__)')"

# The packages are run from the checkout, as everywhere else; workers import them by PYTHONPATH.
COPY . /opt/ops6k
ENV PYTHONPATH=/opt/ops6k
WORKDIR /opt/ops6k

# Beam's entry point. Without the variable it would make another venv at every start, without torch.
COPY --from=beam /opt/apache/beam /opt/apache/beam
ENV RUN_PYTHON_SDK_IN_DEFAULT_ENVIRONMENT=1
ENTRYPOINT ["/opt/apache/beam/boot"]
