# Result table for scripts that run tests on a GPU machine. Sourced; $out is the folder of the
# build.

torch_folder() { python3 -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"; }

# Common setup of the commands.
begin() {
  log=$(mktemp)
  table=()
  failed=0
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || { echo "no GPU here" >&2; exit 1; }
  export VMMGRAPH_TEST_ROOT=$PWD/$out VMMGRAPH_TEST_DRIVER=real VMMGRAPH_DRIVER=cuda
  torch=$(torch_folder)
}

end() {
  echo
  date -u '+%Y-%m-%d %H:%M UTC'
  printf '%s\n' "${table[@]}"
  exit $failed
}

row() { # row NAME COMMAND...
  local name=$1
  shift
  echo "=== $name"
  if "$@" 2>&1 | tee "$log"; then status=passed; else status=FAILED failed=1; fi
  local counts
  counts=$(grep -E '^RESULT (trust|differential)' "$log" | tail -1 | sed 's/^RESULT //' || true)
  [ -n "$counts" ] ||
    counts=$(grep -E '^test result:|wrong or lost$|^passed$|^failed$|tests ran|^\[  PASSED' "$log" | tail -1 || true)
  table+=("$(printf '%-34s %-7s %s' "$name" "$status" "$counts")")
}

libtorch() { # libtorch NAME PROGRAM ARGUMENTS...: a row of a program that needs torch's libraries
  local name=$1 program=$2
  shift 2
  row "$name" env LD_LIBRARY_PATH="$PWD/$out" "$out/run.sh" "$out/$program" "$torch" "$@"
}
