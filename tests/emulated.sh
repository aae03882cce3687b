#!/usr/bin/env bash
# emulated.sh: builds the kernels for a matrix unit that plain code emulates (native/isa/amx_emulated.h), then runs tests/kernels and
# $CALLS (300) random calls of tests/fuzz on them: five minutes, on any x86-64 processor with AVX2. Needs a C++ compiler and an
# environment with regard's test extras ($PYTHON, python3). The build stays in $BUILD where that is set. $PYTEST: more arguments of pytest.
# $WHEEL: one of this source and machine, whose plain kernels and call module are taken, not compiled again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH PYTHONHOME REGARD_ISA
. tests/package_kernels.sh

if [ "$(uname -m)" != x86_64 ] || ! grep -q '^flags.*\bavx2\b' /proc/cpuinfo; then
  echo "not tested: this processor does not run AVX2, for which the emulation is compiled"
  exit 0
fi
python=${PYTHON:-python3}
build=${BUILD:-$(mktemp -d)}
[ -n "${BUILD:-}" ] || trap 'rm -rf "$build"' EXIT
# The unit's vectors have 64 bytes: those of AVX-512 where it is there, since shorter ones take the compiler three times as long.
march=x86-64-v4
for feature in f bw cd dq vl; do
  grep -q "^flags.*\bavx512$feature\b" /proc/cpuinfo || march=x86-64-v3
done
cmake -S native -B "$build/objects" -DCMAKE_BUILD_TYPE=Release -DREGARD_EMULATED=$march -DOUTPUT="$build/kernels" >/dev/null
targets=(python base amx_emulated)
if [ -n "${WHEEL:-}" ]; then
  targets=(amx_emulated)
  "$python" -m zipfile --extract "$WHEEL" "$build/wheel"
  mkdir -p "$build/kernels"
  cp "$build"/wheel/regard/backends/kernels/{regard_python,libregard_base}.so "$build/kernels"
fi
for target in "${targets[@]}"; do
  cmake --build "$build/objects" --target "regard_$target" --parallel "${CMAKE_BUILD_PARALLEL_LEVEL:-2}" >/dev/null
done
package_kernels "$build/package" "$build/kernels" amx_emulated
emulated=(env PYTHONPATH="$build/package" REGARD_ISA=amx_emulated "$python")
packaged "$build/package" "${emulated[@]}"
"${emulated[@]}" -m pytest -p no:cacheprovider tests/kernels ${PYTEST:-}
"${emulated[@]}" -m tests.fuzz --calls "${CALLS:-300}" --minutes 60
