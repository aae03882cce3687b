#!/usr/bin/env bash
# tidy.sh: clang-tidy's bug checks (.clang-tidy) of the kernels, as they are compiled for the instruction set with the most code: two
# minutes. Needs clang-tidy, which `pip install -c constraints.txt '.[dev]'` brings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

flags=(-std=c++17 -Inative)
[ "$(uname -m)" != x86_64 ] || flags+=(-march=x86-64-v4 -mavx512bf16 -mamx-tile -mamx-bf16 '-DREGARD_ISA="isa/amx.h"')
find native -name '*.cpp' -print0 | xargs -0 -P 2 -I{} clang-tidy --quiet {} -- "${flags[@]}"
