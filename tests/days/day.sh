# What the first days share; each begins with `source .../day.sh`. `gangway` is on PATH, and the day works in a new folder that is gone
# at its end. DAY_STEPS is how far its runs train. A comment `# PAGE: COMMAND` stands above each command, with the text of that page.
set -euo pipefail
shopt -s inherit_errexit

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
STEPS=${DAY_STEPS:-400}
mkdir -p "$ROOT/build/days"
FOLDER=$(mktemp -d -p "$ROOT/build/days" "$(basename "$0" .sh)-XXXX")  # not in /tmp: what SLURM starts would not see it
cd "$FOLDER"

fail() {
  echo "the day ends here: $*" >&2
  exit 1
}

# ends STATUS TEXT COMMAND ...: the command ends with this status, and prints this regular expression.
ends() {
  local wanted=$1 text=$2 status=0 said
  shift 2
  echo "\$ $*"
  said=$(mktemp -p "$FOLDER" said.XXXX)
  "$@" > "$said" 2>&1 || status=$?
  cat "$said"
  [ "$status" = "$wanted" ] || fail "exit status $status, expected $wanted: $*"
  grep --quiet --extended-regexp -- "$text" "$said" || fail "'$text' is not printed: $*"
}

shows() { ends 0 "$@"; }

# behind LOG COMMAND ...: starts a command in the background, whose process is $BEHIND.
behind() {
  local log=$1
  shift
  echo "\$ $* > $log &"
  : > "$log"
  "$@" > "$log" 2>&1 &
  BEHIND=$!
}

# seen LOG TEXT [TIMES]: waits until the command in the background has printed this regular expression so often. It must not have ended.
seen() {
  local alive times=${3:-1}
  while true; do
    alive=$(kill -0 "$BEHIND" 2> /dev/null && echo yes || true)
    if [ "$(grep --count --extended-regexp -- "$2" "$1")" -ge "$times" ]; then
      grep --extended-regexp -- "$2" "$1" | tail -n 1
      return
    fi
    [ "$alive" ] || { cat "$1" >&2; fail "the command has ended, and has not printed '$2'"; }
    sleep 0.2
  done
}

# ended STATUS LOG TEXT: waits for the command in the background.
ended() {
  local status=0
  wait "$BEHIND" || status=$?
  BEHIND=
  tail -n 12 "$2"
  [ "$status" = "$1" ] || { cat "$2" >&2; fail "exit status $status, expected $1"; }
  grep --quiet --extended-regexp -- "$3" "$2" || fail "'$3' is not printed"
}

# process LOG HOST: the newest process id that the run has printed for this host.
process() { grep --only-matching --extended-regexp "[0-9]+ \(host $2\)" "$1" | tail -n 1 | cut -d " " -f 1; }

BEHIND=
leave() {
  local status=$?
  if [ "$BEHIND" ]; then kill "$BEHIND" 2> /dev/null || true; wait "$BEHIND" || true; fi
  rm -rf "$FOLDER"
  exit "$status"
}
trap leave EXIT
trap 'exit 143' TERM
trap 'exit 130' INT
