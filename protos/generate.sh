#!/bin/sh
# Writes the generated code of protos/advisor/v1/*.proto into FOLDER (default: the repository root),
# below advisor/v1/. Usage: protos/generate.sh [FOLDER]
#
# The generator is old on purpose: generated code demands the protobuf and grpcio it was made for,
# or newer, at import. 1.66.2 asks for protobuf >= 5.27.2, so that no training environment is forced
# to a new one. It lives in its own environment, .venv-protos, made here when it is missing.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
out=${1:-$root}
venv=${PROTOS_VENV:-$root/.venv-protos}

if [ ! -x "$venv/bin/protoc-gen-mypy_grpc" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    # setuptools below 81: grpc_tools 1.66.2 still imports pkg_resources.
    "$venv/bin/pip" install --quiet --disable-pip-version-check \
        'grpcio-tools==1.66.2' 'mypy-protobuf==3.6.0' 'setuptools<81'
fi

mkdir -p "$out"
cd "$root/protos"
PATH="$venv/bin:$PATH" "$venv/bin/python" -m grpc_tools.protoc \
    --proto_path=. \
    --python_out="$out" \
    --grpc_python_out="$out" \
    --mypy_out="quiet:$out" \
    --mypy_grpc_out="quiet:$out" \
    advisor/v1/advisor.proto
