# For scripts that test kernels of their own build: a copy of the package with them.

# package_kernels FOLDER KERNELS ISA: FOLDER/regard has the sources and, of KERNELS, the objects of ISA and those that are always there.
# No others, so that tests of every instruction set that runs have these two.
package_kernels() {
  rm -rf "$1" && mkdir -p "$1"
  cp -r src/regard "$1/regard"
  rm -rf "$1/regard/backends/kernels" && mkdir "$1/regard/backends/kernels"
  for name in regard_python libregard_base "libregard_$3"; do
    cp "$2/$name.so" "$1/regard/backends/kernels"
  done
  # The finder of an editable install (pip install -e) comes before PYTHONPATH: other kernels would be tested.
  echo 'import sys; sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith("_editable_")]' >"$1/sitecustomize.py"
}

# packaged FOLDER PYTHON...: fails unless that command imports the package of FOLDER.
packaged() {
  local package=$1
  shift
  "$@" -c 'import os, sys, regard; assert os.path.samefile(regard.__path__[0], sys.argv[1]), regard' "$package/regard"
}
