#!/usr/bin/env bash
# wheels.sh WHEEL FOLDER: checks what a release publishes, as far as one x86-64 Linux machine can. WHEEL, built on it, and
# the one for aarch64, cross-compiled here, become wheels for glibc 2.28 in FOLDER (auditwheel fails where a library or a
# symbol is newer), beside the one for Windows, which windows_wheel.sh makes; each below 8 MB, as is the source distribution.
# The first is installed where no compiler and no cmake is: its kernels run, and so does the demo. Needs aarch64-linux-gnu-g++,
# what windows_wheel.sh needs, and an environment with the packages of regard's release extra ($PYTHON, python3).
# $AARCH64_WHEEL: one that is there already.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH PYTHONHOME
wheel=${1:?expected a wheel} folder=$(realpath -m "${2:?expected a folder}")
python=${PYTHON:-python3}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$folder"

"$python" -m auditwheel repair --plat manylinux_2_28_x86_64 --wheel-dir "$folder" "$wheel"

arm=${AARCH64_WHEEL:-}
if [ -z "$arm" ]; then
  cross="-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++"
  CXXFLAGS=-Werror CMAKE_ARGS="$cross" _PYTHON_HOST_PLATFORM=linux-aarch64 \
    "$python" -m pip wheel --quiet --no-deps --wheel-dir "$scratch" .
  arm=$(echo "$scratch"/*_aarch64.whl)
fi
# Of another processor's wheels auditwheel takes no name of a platform: it finds the oldest by itself.
"$python" -m auditwheel repair --plat auto --wheel-dir "$folder" "$arm"
[[ $(echo "$folder"/*_aarch64.whl) =~ manylinux_2_(1[0-9]|2[0-8])_aarch64 ]] || { echo "newer than glibc 2.28"; exit 1; }
inside=$("$python" -m zipfile --list "$folder"/*_aarch64.whl)
for isa in base neon neonbf16 sme sve256; do
  [[ $inside = *libregard_$isa.so* ]] || { echo "the wheel for aarch64 has no kernels of $isa"; exit 1; }
done

PYTHON=$python tests/windows_wheel.sh "$folder"

"$python" -m build --sdist --outdir "$folder" >/dev/null

for made in "$folder"/regard-*; do
  bytes=$(stat --format %s "$made")
  printf '%s: %d kB\n' "$(basename "$made")" $((bytes / 1000))
  [ "$bytes" -lt 8000000 ] || { echo "8 MB are too many"; exit 1; }
done

"$python" -m venv "$scratch/venv"
(
  export PATH="$scratch/venv/bin" # no compiler, no cmake
  SECONDS=0
  pip install --quiet -c constraints.txt "$(echo "$folder"/*_x86_64.whl)[demo]"
  cd "$scratch/venv" # not the source tree
  regard demo
  echo "from pip install to the first picture: $SECONDS seconds"
  python -c 'from regard.backends.native.ffi import runnable; assert runnable(), "no kernels"'
  regard doctor
)
