# Sourced by up, test and gpu_check, from the repository's root: one environment, made once, renewed when what it is made of changes.

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.13 python3.12 python3.11 python3; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
      echo "$candidate"
      return 0
    fi
  done
  echo "antiphon: no Python from 3.11 to 3.13 found; install one, or name it: PYTHON=/path/to/python ./scripts/up" >&2
  return 2
}

# Whether nvidia-smi lists a card. All of its output is read: cut short, it would fail where there are many.
has_gpu() {
  command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep "^GPU " >/dev/null
}

# set_up_environment "extra,extra": makes .venv with the pinned versions and these extras on top of those it has.
set_up_environment() {
  local wanted="$1" had="" python stamp
  [ -f .venv/extras ] && had=$(cat .venv/extras)
  wanted=$(printf '%s\n' ${had//,/ } ${wanted//,/ } | sort -u | paste -sd, -)
  stamp=$(cat pyproject.toml constraints.txt | cksum; echo "$wanted")
  if [ -f .venv/stamp ] && [ "$(cat .venv/stamp)" = "$stamp" ]; then return 0; fi
  python=$(find_python)
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  echo "Setting up .venv (once; later starts skip this) …" >&2
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".${wanted:+[$wanted]}"
  echo "$wanted" >.venv/extras
  echo "$stamp" >.venv/stamp
}
