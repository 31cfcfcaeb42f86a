# Images of the command: moe-plan without CUDA (the default), and moe-plan-cuda with the engine for GPUs.
#
#     docker build -t moe-plan .
#     docker build -t moe-plan-cuda --target moe-plan-cuda .
#     docker run --rm -v "$PWD:/work" moe-plan search --model DeepSeek-V3 --hardware gb200-nvl72 --gpus 256 --gbs 4096 --seq 4096

FROM debian:12-slim AS build
WORKDIR /source
COPY tools/setup.sh tools/setup.sh
RUN . tools/setup.sh && install_packages $build_packages && rm -rf /var/lib/apt/lists/*
COPY . .
RUN . tools/setup.sh && \
    build build -Dbuildtype=release -Dcuda=disabled -Dpython=disabled -Dtests=false && \
    meson install -C build --no-rebuild --strip --tags runtime --destdir /installed

FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04 AS build-cuda
WORKDIR /source
COPY tools/setup.sh tools/setup.sh
RUN . tools/setup.sh && install_packages $build_packages && rm -rf /var/lib/apt/lists/*
COPY . .
RUN . tools/setup.sh && \
    build build -Dbuildtype=release -Dcuda=enabled -Dpython=disabled -Dtests=false && \
    meson install -C build --no-rebuild --strip --tags runtime,cuda --destdir /installed

FROM nvidia/cuda:13.0.2-cudnn-runtime-ubuntu24.04 AS moe-plan-cuda
COPY --from=build-cuda /installed /
RUN useradd --create-home --uid 10001 planner
USER planner
WORKDIR /work
ENTRYPOINT ["moe-plan"]
CMD ["--help"]

# The last stage is what is built by default.
FROM debian:12-slim AS moe-plan
COPY --from=build /installed /
RUN useradd --create-home --uid 10001 planner
USER planner
WORKDIR /work
ENTRYPOINT ["moe-plan"]
CMD ["--help"]
