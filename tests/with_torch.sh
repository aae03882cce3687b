#!/usr/bin/env bash
# with_torch.sh oldest|newest|VERSION [pytest's arguments]: runs pytest on another torch than that of constraints.txt, in a
# virtual environment of its own: the oldest that pyproject.toml admits, the newest of the package index, or one by name.
# Everything else is installed as constraints.txt has it.
# The environment stays in $VENV where that is set, so that a second run installs regard alone. A wheel of torch for Linux
# brings the CUDA libraries, some 3 GB. Exits with 75 where that torch cannot be downloaded: no test was run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH PYTHONHOME

wanted=${1:?expected oldest, newest or a version of torch}
shift
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
venv=${VENV:-$scratch/venv}
case $wanted in
  oldest) torch="torch==$(sed -n 's/^dependencies = \["torch>=\([0-9.]*\)"\]$/\1/p' pyproject.toml).*" ;;
  newest) torch=torch ;;
  *) torch="torch==$wanted" ;;
esac
grep -v '^torch==' constraints.txt >"$scratch/constraints.txt"

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
echo "$wanted: $torch"
"$venv/bin/pip" install --quiet --upgrade -c "$scratch/constraints.txt" "$torch" || exit 75
"$venv/bin/pip" freeze | grep '^torch==' >>"$scratch/constraints.txt"
"$venv/bin/pip" install --quiet -c "$scratch/constraints.txt" "${WHEEL:-.}[test]"
"$venv/bin/python" -c 'import torch; print("torch", torch.__version__)'
"$venv/bin/python" -m pytest "$@"
