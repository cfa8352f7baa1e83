#!/usr/bin/env bash
# Makes .venv with the pinned packages, and does nothing when it holds these pins already.
#
#   tools/setup_venv.sh [EXTRA ...]    EXTRA: a further file of requirements/ by its name, such as smollm2
#
#   DEVICE=cpu|cuda      which pins; by default cuda where `nvidia-smi -L` succeeds, else cpu
#   PYTHON=python3.11    the interpreter; by default the first of python3.11 and python3.12 that the pins fit
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# pip must write bytecode: without it every later import of vLLM takes 20 to 30 seconds.
unset PYTHONDONTWRITEBYTECODE

die() { printf 'setup: %s\n' "$@" >&2; exit 1; }

choose_device() {
  case "${DEVICE:-}" in
    cpu|cuda) echo "$DEVICE" ;;
    "") if nvidia-smi -L >/dev/null 2>&1; then echo cuda; else echo cpu; fi ;;
    *) die "DEVICE=$DEVICE is not known: use DEVICE=cpu or DEVICE=cuda" ;;
  esac
}

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || echo unusable; }

choose_python() {  # arguments: the versions that the pins fit
  local wanted="$*" candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
    if [[ " $wanted " == *" $(version_of "$candidate") "* ]]; then echo "$candidate"; return; fi
  done
  candidate=${PYTHON:-python3}
  die "the $device pins need Python ${wanted// / or }, and $candidate is $(version_of "$candidate")" \
    "install one, or name it: make PYTHON=/path/to/python$1 ..."
}

stage() {  # arguments: what to say, then the command; its output goes to the log and is shown only when it fails
  local what=$1 start=$SECONDS
  shift
  if ! "$@" >>"$log" 2>&1; then
    tail -n 15 "$log" >&2
    die "failed: $what" "the whole output is in $log; the same command tries again from the beginning"
  fi
  echo "setup: $what ($((SECONDS - start)) s)"
}

install() { .venv/bin/python -m pip install --quiet --no-input --disable-pip-version-check --no-deps "$@"; }

install_cpu_torch() {  # argument: the pin
  install "$1" || install --index-url https://download.pytorch.org/whl/cpu "$1"
}

fingerprint() {  # arguments: requirement files. The folder counts: a virtual environment does not survive a move.
  { pwd; echo "$device"; cat "$@"; } | sha256sum | cut -d ' ' -f 1
}

fresh() { [ -x .venv/bin/python ] && [ "$(cat "$1" 2>/dev/null)" = "$2" ]; }

build_environment() {
  local python print
  print=$(fingerprint "$pins" requirements/dev.txt)
  if fresh .venv/.stamp "$print"; then return; fi
  if [ "$(uname -sm)" != "Linux x86_64" ]; then die "the pins are for Linux x86_64, not for $(uname -sm)"; fi
  if [ "$device" = cuda ]; then python=$(choose_python 3.12); else python=$(choose_python 3.11 3.12); fi
  rm -f .venv/.stamp*
  echo "setup: making .venv for $device with Python $(version_of "$python") (once, and again when the pins change)"
  "$python" -m venv --clear .venv || die "$python cannot make virtual environments (on Debian: install $python-venv)"
  local torch_pin=""
  if [ "$device" = cpu ]; then torch_pin=$(grep '^torch==' "$pins" || true); fi
  if [ -n "$torch_pin" ]; then stage "$torch_pin" install_cpu_torch "$torch_pin"; fi
  stage "$pins" install -r "$pins"
  stage "requirements/dev.txt" install -r requirements/dev.txt
  echo "$print" > .venv/.stamp
}

add_extra() {  # argument: a name in requirements/
  local file=requirements/$1.txt print
  [ -f "$file" ] || die "there is no $file"
  print=$(fingerprint "$file")
  if fresh ".venv/.stamp-$1" "$print"; then return; fi
  stage "$file" install -r "$file"
  echo "$print" > ".venv/.stamp-$1"
}

device=$(choose_device)
pins=requirements/$device.txt
log=.venv/setup.log
build_environment
for extra in "$@"; do add_extra "$extra"; done
