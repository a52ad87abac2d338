# shellcheck shell=bash
# Source this file, then call `prepare_environment run` (to run paceline) or `prepare_environment test` (to test it).
# Afterwards $PYTHON is a Python with paceline installed from this repository, and its environment is active.
#
# An active virtual environment that has torch is used as it is; otherwise .venv in the repository is, and is made when
# it is missing. A torch that the Python underneath has is used, never replaced; nor is a paceline of another origin in
# the environment: this repository's is found before it through PYTHONPATH then, as long as this shell lives.
#   PACELINE_VENV           use, or make, this virtual environment and no other
#   PACELINE_TRANSFORMERS   test with this version of transformers

TORCH_TO_INSTALL=2.13.0
TRANSFORMERS_TO_TEST=5.24.0
REPOSITORY=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

prepare_environment() { # run|test
  local venv stamp other transformers="" requirement=$REPOSITORY
  if [[ -n ${PACELINE_VENV:-} ]]; then
    venv=$PACELINE_VENV
  elif [[ -n ${VIRTUAL_ENV:-} ]] && _has_usable_torch "$VIRTUAL_ENV/bin/python"; then
    venv=$VIRTUAL_ENV
  else
    venv=$REPOSITORY/.venv
  fi
  # An environment for tests serves those who only run paceline: their stamp is the beginning of its stamp.
  stamp="$REPOSITORY $(cksum <"$REPOSITORY/pyproject.toml")"
  if [[ $1 == test ]]; then
    transformers=transformers==${PACELINE_TRANSFORMERS:-$TRANSFORMERS_TO_TEST}
    stamp+=" test $transformers"
    requirement+="[test]"
  fi

  other=$(_other_paceline "$venv/bin/python")
  if [[ -n $other ]]; then
    if [[ $1 == test && $(_stamp "$venv") != *" ${stamp#"$REPOSITORY "}"* ]]; then
      _fail "$venv has paceline of $other, and not what the tests of $REPOSITORY need: deactivate it" \
        "(or set PACELINE_VENV=$REPOSITORY/.venv)"
      return
    fi
    printf 'paceline: %s has paceline of %s, which stays; this run takes that of %s\n' "$venv" "$other" "$REPOSITORY" >&2
    export PYTHONPATH=$REPOSITORY/integration${PYTHONPATH:+:$PYTHONPATH}
  elif [[ $(_stamp "$venv") != "$stamp"* ]]; then
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
      _make_venv "$venv" "$1" || return
    fi
    if ! _has_usable_torch "$venv/bin/python"; then
      step "installing torch $TORCH_TO_INSTALL" pip_install "$venv" "torch==$TORCH_TO_INSTALL" || return
    fi
    "$venv/bin/python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' \
      >"$venv/paceline-constraints.txt" || return
    step "installing what it takes to $1 paceline" pip_install "$venv" \
      --constraint "$venv/paceline-constraints.txt" --editable "$requirement" ${transformers:+"$transformers"} || return
    printf '%s' "$stamp" >"$venv/paceline-stamp"
  fi

  export PYTHON=$venv/bin/python VIRTUAL_ENV=$venv PATH="$venv/bin:$PATH"
  unset PYTHONHOME
}

_stamp() { # venv
  if [[ -x $1/bin/python && -f $1/paceline-stamp ]]; then printf '%s' "$(<"$1/paceline-stamp")"; fi
}

# Where the paceline that is installed there comes from, if not from this repository.
_other_paceline() { # python
  "$1" -I - "$REPOSITORY" 2>/dev/null <<'EOF' || :
import json
import sys
from importlib.metadata import distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

found = distribution("paceline")  # an error if there is none
source = urlsplit(json.loads(found.read_text("direct_url.json") or "{}").get("url", ""))
place = Path(unquote(source.path) if source.scheme == "file" else found.locate_file(""))
if place.exists() and place.resolve() != Path(sys.argv[1]).resolve():
    print(place)
EOF
}

_make_venv() { # venv run|test
  local python="" candidate options=() least=10
  if [[ $2 == test ]]; then least=11; fi # TRL and newer transformers ask for it
  for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
    # A virtual environment cannot stand on another one: what counts is the Python underneath.
    python=$("$candidate" -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))' 2>/dev/null) &&
      "$python" -c 'import sys; sys.exit(sys.version_info < (3, int(sys.argv[1])))' "$least" && break
    python=""
  done
  if [[ -z $python ]]; then
    _fail "no Python 3.$least or newer found as python3: install one"
  elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    _fail "$python has no ensurepip or venv: install them (Debian, Ubuntu: apt install python3-venv)"
  else
    if _has_usable_torch "$python"; then options=(--system-site-packages); fi
    step "making a virtual environment in $1" "$python" -m venv --clear ${options[@]+"${options[@]}"} "$1"
  fi
}

_has_usable_torch() { # python
  "$1" - 2>/dev/null <<'EOF'
import re
import sys
from importlib.metadata import version

sys.exit(tuple(int(part) for part in re.findall(r"\d+", version("torch"))[:2]) < (2, 11))
EOF
}

pip_install() { # venv arguments...
  "$1/bin/python" -m pip install -qq --disable-pip-version-check --no-input "${@:2}"
}

# Runs a command, and says what it is for and how long it took.
step() { # description command...
  local start=$SECONDS
  printf 'paceline: %s ... ' "$1" >&2
  if "${@:2}" >&2; then
    printf '%d s\n' "$((SECONDS - start))" >&2
  else
    printf '\n' >&2
    _fail "$1: failed after $((SECONDS - start)) s"
  fi
}

_fail() { # message...
  printf 'paceline: error: %s\n' "$*" >&2
  return 1
}
