#!/usr/bin/env bash
# sanitized.sh [ISA...]: builds the kernels with AddressSanitizer and UndefinedBehaviorSanitizer, then runs tests/kernels and $CALLS
# (5000) random calls of tests/fuzz on them, for each instruction set: those named, or base, avx2 and avx512 where this machine runs
# them. The first error ends a run with its stack; the script then fails. Needs GCC and an environment with regard's test extras
# ($PYTHON, python3).
# The builds stay in $BUILD where that is set, so that a second run compiles what has changed alone. A build takes some ten minutes,
# the tests of an instruction set half an hour. $PYTEST: more arguments of pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH PYTHONHOME REGARD_ISA
. tests/package_kernels.sh

python=${PYTHON:-python3}
build=${BUILD:-$(mktemp -d)}
[ -n "${BUILD:-}" ] || trap 'rm -rf "$build"' EXIT
cmake -S native -B "$build/objects" -DCMAKE_CXX_COMPILER=g++ -DCMAKE_BUILD_TYPE= -DOUTPUT="$build/kernels" \
  -DCMAKE_CXX_FLAGS="-fsanitize=address,undefined -fno-omit-frame-pointer -g1"
sets=("$@")
if [ $# = 0 ]; then
  sets=(base)
  for isa in avx2 avx512; do
    grep -qE "^flags.*\b${isa/avx512/avx512bw}\b" /proc/cpuinfo && sets+=("$isa")
  done
fi
for target in python base "${sets[@]}"; do
  cmake --build "$build/objects" --target "regard_$target" --parallel "${CMAKE_BUILD_PARALLEL_LEVEL:-2}"
done

# Not run: what ASan's own memory makes impossible, as said beside each.
left_out=()

for isa in "${sets[@]}"; do
  echo "== $isa"
  package=$build/$isa
  package_kernels "$package" "$build/kernels" "$isa"
  sanitized=(env LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)" REGARD_ISA="$isa"
    ASAN_OPTIONS="detect_leaks=0:${ASAN_OPTIONS:-}" UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1:${UBSAN_OPTIONS:-}"
    PYTHONPATH="$package" "$python")
  packaged "$package" "${sanitized[@]}"
  "${sanitized[@]}" -m pytest -p no:cacheprovider -o timeout=3600 tests/kernels "${left_out[@]}" ${PYTEST:-}
  "${sanitized[@]}" -m tests.fuzz --calls "${CALLS:-5000}" --minutes 600
done
