#!/bin/sh
# Download what a machine with CUDA, PyTorch and the usual packages of Python 3.12 still lacks for `tools.gpu`.
#     tools/gpu/fetch_wheels.sh FOLDER
#     python -m pip install --no-index --no-deps --target SITE FOLDER/*.whl && export PYTHONPATH=SITE    # there
set -eu
packages="annotated-types braceexpand ftfy open_clip_torch pydantic pydantic_core simplejpeg typing-inspection wcwidth webdataset"
pins=$(for package in $packages; do grep -E "^$package==" "$(dirname "$0")/../../constraints.txt"; done)
python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --dest "${1:?give a folder for the wheels}" $pins
