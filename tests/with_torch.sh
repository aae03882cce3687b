#!/usr/bin/env bash
# with_torch.sh oldest|newest|VERSION [pytest's arguments]: runs pytest on another torch than that of constraints.txt, in a
# virtual environment of its own: the oldest that pyproject.toml admits, the newest of the package index, or one by name.
# The newest torch runs on the newest Python that is found here of those that regard admits; the oldest on Python 3.12, or the one
# nearest to it (transformers has no release for 3.10); another version on python3. $PYTHON overrides. Everything else is installed
# as constraints.txt has it.
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
# The first of these minor versions of Python 3 that can make an environment here, else python3. What pyenv has stands on
# PATH too, and runs where $PYENV_VERSION names it.
python_of() {
  local minor
  for minor; do
    PYENV_VERSION=3.$minor "python3.$minor" -c 'import ensurepip, ssl, sys; print(sys.executable)' 2>/dev/null && return
    echo "$wanted: no python3.$minor is found" >&2
  done
  echo python3
}

case $wanted in
  oldest) torch="torch==$(sed -n 's/^dependencies = \["torch>=\([0-9.]*\)"\]$/\1/p' pyproject.toml).*" ;;
  newest) torch=torch ;;
  *) torch="torch==$wanted" ;;
esac
case $wanted in
  oldest) python=${PYTHON:-$(python_of 12 11 13 14 10)} ;;
  newest) python=${PYTHON:-$(python_of 14 13 12 11 10)} ;;
  *) python=${PYTHON:-python3} ;;
esac
grep -v '^torch==' constraints.txt >"$scratch/constraints.txt"

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
echo "$wanted: $torch on $("$venv/bin/python" --version)"
"$venv/bin/pip" install --quiet --upgrade -c "$scratch/constraints.txt" "$torch" || exit 75
"$venv/bin/pip" freeze | grep '^torch==' >>"$scratch/constraints.txt"
"$venv/bin/pip" install --quiet -c "$scratch/constraints.txt" "${WHEEL:-.}[test]"
"$venv/bin/python" -c 'import platform, torch; print("Python", platform.python_version(), "torch", torch.__version__)'
"$venv/bin/python" -m pytest "$@"
