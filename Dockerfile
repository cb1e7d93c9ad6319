# A server without compilers, as a user of its own, for x86-64 and Arm.
#
#   docker build --tag torch_armllm .                     from this checkout
#   docker buildx build --platform linux/amd64,linux/arm64 --tag torch_armllm .
#   docker run --publish 127.0.0.1:8000:8000 --volume /srv/models:/models:ro torch_armllm serve /models/smollm2-int4

FROM python:3.13-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH=2.13.0
RUN python -m venv /opt/armllm \
    && /opt/armllm/bin/pip install --no-cache-dir --index-url "${TORCH_INDEX}" "torch==${TORCH}"
WORKDIR /src
COPY pyproject.toml README.md LICENSE THIRD_PARTY_NOTICES.md ./
COPY ops ops
COPY passes passes
COPY torch_armllm torch_armllm
# hadolint ignore=DL3013
RUN python -m venv /opt/tools \
    && /opt/tools/bin/pip install --no-cache-dir "scikit-build-core>=0.10" "hatch-fancy-pypi-readme>=25.1" cmake ninja \
    && include=$(/opt/armllm/bin/python -c "import importlib.util as u, pathlib as p; print(p.Path(u.find_spec('torch').origin).parent / 'include')") \
    && /opt/tools/bin/pip wheel --no-build-isolation --no-deps --wheel-dir /dist \
        --config-settings "cmake.define.ARMLLM_TORCH_INCLUDE=${include}" . \
    && wheel=$(echo /dist/*.whl) \
    && /opt/armllm/bin/pip install --no-cache-dir "${wheel}[serve,structured,gguf]" "torch==${TORCH}"

FROM python:3.13-slim-bookworm
RUN useradd --create-home --uid 10001 armllm
COPY --from=build /opt/armllm /opt/armllm
ENV PATH=/opt/armllm/bin:$PATH HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /home/armllm
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=10s --start-period=10m \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["torch-armllm"]
CMD ["serve", "/models", "--host", "0.0.0.0"]
