#!/usr/bin/env bash
# Style, types and tests, whose summary comes last. Fails if any of these fails.
#   bash tests/run.sh               the fast tier: tests/unit, and every capability once (tests/support/tiers.py)
#   bash tests/run.sh --all         every test, and part of them with the lowest transformers that is supported
#   bash tests/run.sh [--all] ...   the tests that these arguments of pytest select, paths from the repository's root
# shellcheck source-path=SCRIPTDIR
set -uo pipefail

LOWEST_TRANSFORMERS=5.17.0
SIDE_BY_SIDE=(-n 3 --dist worksteal) # some wait, for ranks or limits of time, and nothing but hanging ends a test
LOWEST_TESTS=(
  tests/parity
  tests/unit/hf
  "tests/distributed/test_ds_configs.py::test_config_runs[pp2]"
  "tests/distributed/test_ds_configs.py::test_config_runs[pp2_ep2]"
  "tests/distributed/test_ds_configs.py::test_config_runs[pp4_multidirection]"
  tests/distributed/test_weights.py::test_export_loads_as_anybody_loads_it
  tests/distributed/test_weights.py::test_fine_tune_a_checkpoint_by_name_and_from_memory
)

source "$(dirname -- "${BASH_SOURCE[0]}")/../launch/environment.sh"
prepare_environment test || exit
cd -- "$REPOSITORY" || exit
export OMP_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE # or every process compiles the package again, and every worker rewrites all tests

failed=()

part() { # name command...
  printf '==== %s\n' "$1"
  "${@:2}" || failed+=("$1")
}

# shellcheck disable=SC2317  # called by part
with_lowest_transformers() {
  local packages=$VIRTUAL_ENV/transformers-$LOWEST_TRANSFORMERS
  if [[ ! -d $packages ]]; then
    rm -rf -- "$packages.part"
    # With what it needs: it wants an older huggingface_hub than the newest does.
    step "installing transformers $LOWEST_TRANSFORMERS" \
      pip_install "$VIRTUAL_ENV" --target "$packages.part" "transformers==$LOWEST_TRANSFORMERS" || return
    mv -- "$packages.part" "$packages"
  fi
  PYTHONPATH=$packages${PYTHONPATH:+:$PYTHONPATH} "$PYTHON" -m pytest "${SIDE_BY_SIDE[@]}" "${LOWEST_TESTS[@]}"
}

part style "$PYTHON" -m ruff check .
part format "$PYTHON" -m ruff format --check .
if [[ "$*" == --all ]]; then
  # Checking types is one process, and so is installing, which begins the next part.
  told=$(mktemp)
  trap 'rm -f -- "$told"' EXIT
  "$PYTHON" -m mypy >"$told" 2>&1 &
  checking=$! checked=0
  part "tests with transformers $LOWEST_TRANSFORMERS" with_lowest_transformers
  wait "$checking" || checked=$?
  part types eval 'cat -- "$told"; ((checked == 0))'
  set -- "${SIDE_BY_SIDE[@]}" tests
else
  part types "$PYTHON" -m mypy
  if (($# == 0)); then
    mapfile -t chosen < <("$PYTHON" tests/support/tiers.py)
    set -- "${SIDE_BY_SIDE[@]}" "${chosen[@]}"
  elif [[ $1 == --all ]]; then
    shift
  fi
fi
status=${#failed[@]}
if ((status)); then
  printf '==== FAILED: %s\n' "${failed[@]}"
fi
printf '==== tests\n'
"$PYTHON" -m pytest "$@" || status=$?
exit "$status"
