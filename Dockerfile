# Builds the package for gfx950 and runs the tests that need no GPU. No GPU is needed to build.
#   docker build -t rotquant_hip .
#   docker run --rm rotquant_hip
#   docker run --rm --device /dev/kfd --device /dev/dri --group-add video rotquant_hip -m gpu
#
# ROCm 7.2.4 and not the ROCm 10 images: those carry the runtime only, without hipcc and headers.
FROM rocm/pytorch:rocm7.2.4_ubuntu24.04_py3.12_pytorch_release_2.12.0

ARG PYTORCH_ROCM_ARCH=gfx950
ARG MAX_JOBS=8
ENV PYTORCH_ROCM_ARCH=${PYTORCH_ROCM_ARCH} PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /opt/rotquant_hip
# Torch is the image's: none of these files names one.
COPY requirements/build.txt requirements/test.txt requirements/
RUN python3 -m pip install -r requirements/test.txt

COPY . .
RUN MAX_JOBS=${MAX_JOBS} python3 -m pip install --no-build-isolation --no-deps . \
    && cmake -S . -B build/gfx950 -G Ninja \
    && cmake --build build/gfx950 --target gfx950

# Not `python3 -m pytest`: that would import the source folder in place of the installed wheel.
ENTRYPOINT ["pytest"]
CMD ["-m", "not gpu"]
