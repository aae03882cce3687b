#!/usr/bin/env bash
# Runs pytest, with the arguments given, on the oldest torch that pyproject.toml admits, in a virtual environment of its own.
# No step of .ci/run: that release's wheel for Linux brings the CUDA libraries, some 3 GB to download.
# The environment stays in $VENV (default: a new folder in /tmp), so that a second run installs regard alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH PYTHONHOME

oldest=$(sed -n 's/^dependencies = \["torch>=\([0-9.]*\)"\]$/\1/p' pyproject.toml)
venv=${VENV:-$(mktemp -d)}
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
echo "torch $oldest in $venv"
"$venv/bin/pip" install --quiet "torch==$oldest.*" '.[test]'
"$venv/bin/python" -m pytest "$@"
