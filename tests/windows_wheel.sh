#!/usr/bin/env bash
# windows_wheel.sh FOLDER: cross-compiles the wheel for Windows on x86-64 into FOLDER, on Linux: with Clang ($CLANG, clang++) and the
# headers and libraries of MinGW-w64 (in Debian g++-mingw-w64-x86-64-posix). Needs an environment with pip ($PYTHON, python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$(realpath -m "${1:?expected a folder}")
target="-DCMAKE_SYSTEM_NAME=Windows -DCMAKE_SYSTEM_PROCESSOR=x86_64"
compiler="-DCMAKE_CXX_COMPILER=${CLANG:-clang++} -DCMAKE_CXX_COMPILER_TARGET=x86_64-w64-mingw32"
CXXFLAGS=-Werror CMAKE_ARGS="$target $compiler" _PYTHON_HOST_PLATFORM=win-amd64 \
  "${PYTHON:-python3}" -m pip wheel --quiet --no-deps --wheel-dir "$folder" .
inside=$("${PYTHON:-python3}" -m zipfile --list "$folder"/*-win_amd64.whl)
for object in libregard_{base,avx2,avx512,avx512bf16} regard_python; do
  [[ $inside = *$object.dll* ]] || { echo "the wheel for Windows has no $object.dll"; exit 1; }
done
