#!/usr/bin/env bash
# Everything that is run on a card before a commit may claim it: GPU tests, compute-sanitizer, demo, benchmark.
#
#   bench/results.sh [-o FOLDER] [-b SECONDS] [-t] [FAMILY...]
#
#   -o FOLDER    where the results go (bench/results/<gpu>)
#   -b SECONDS   the benchmark's budget, all families together (360)
#   -t           tests only            -n   no tests, only the benchmark
#   FAMILY       what to compile and to measure (all)
#
# Writes tests.md and, per family, <family>.csv, .md and pictures into FOLDER, and all of it once more
# into build/results.tar.gz, after every step anew. Each step has a time limit and a failed step does
# not stop the others; build/results.log has their whole output. FUSEDCUDA_COMMIT names the commit
# where there is no git.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out='' budget=360 tests=yes bench=yes
while getopts 'o:b:tn' option; do
  case $option in
    o) out=$OPTARG ;;
    b) budget=$OPTARG ;;
    t) bench=no ;;
    n) tests=no ;;
    *) exit 2 ;;
  esac
done
shift $((OPTIND - 1))
families=("$@")
if ((${#families[@]} == 0)); then
  read -r -a families <<< "$("$python" -c "from fusedcuda._build import FAMILIES; print(*FAMILIES)")"
fi
if [[ -z $out ]]; then
  out=bench/results/$("$python" -c "
import torch
from bench.device import short_name
print(short_name(torch.cuda.get_device_name()))") || exit 2
fi
mkdir -p "$out" build
: > build/results.log
commit=${FUSEDCUDA_COMMIT:-$(git describe --always --dirty 2>/dev/null || echo unknown)}
export FUSEDCUDA_COMMIT=$commit
report=$out/tests.md
failed=0

pack() {  # one file of everything so far, for a card on another machine
  tar -czf build/results.tar.gz -C "$(dirname "$out")" "$(basename "$out")" -C "$PWD/build" results.log
}

step() {  # step LIMIT NAME COMMAND...: one row of the report, its last line of output as the result
  local limit=$1 name=$2 log started result
  shift 2
  log=$(mktemp)
  started=$SECONDS
  echo "== $name"
  if timeout "$limit" "$@" > "$log" 2>&1; then result=passed; else result="FAILED ($?)"; failed=1; fi
  tail -n 15 "$log"
  echo "| $name | $result: $(grep -E 'passed|failed|PASS|FAIL' "$log" | tail -n 1 | tr -d '=|') | $((SECONDS - started)) |" >> "$report"
  { echo "== $name"; cat "$log"; } >> build/results.log
  rm -f "$log"
  pack
}

if [[ $tests == yes ]]; then
  "$python" - > "$report" <<PYTHON
import datetime, platform, torch
print(f"""# Tests on this card

{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {platform.python_version()}, commit $commit,
{datetime.date.today()}. Written by bench/results.sh.

| what | result | seconds |
|---|---|---:|""")
PYTHON
  # shellcheck disable=SC2016  (expanded by the inner shell)
  step 120 "compile ${families[*]}" bash -c '
    python=$1; shift
    printf "%s\n" "$@" | xargs -P 8 -I {} "$python" -c "import fusedcuda; fusedcuda.load(\"{}\")" && echo passed
  ' compile "$python" "${families[@]}"
  workers=$("$python" -c "import xdist" 2>/dev/null && echo "-n 10")
  # shellcheck disable=SC2086  (no workers, no argument)
  step 420 "GPU tests" "$python" -m pytest tests -m "gpu or gpus" $workers -q -p no:cacheprovider --tb=short
  # Races are looked for in our kernels alone: there are false ones in cuBLAS's, which store by TMA.
  # Not so for initcheck, which takes what a kernel writes that it does not watch as never written.
  ours=(--kernel-name kns=fusedcuda)  # part of the mangled name; --kernel-regex until 2023.2
  [[ $(compute-sanitizer --help 2>&1) == *--kernel-name* ]] || ours[0]=--kernel-regex
  for tool in memcheck racecheck initcheck; do
    watched=() tests=gpu
    if [[ $tool == racecheck ]]; then watched=("${ours[@]}") tests="gpu and not cublas"; fi
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 step 240 "$tool" \
      compute-sanitizer --tool "$tool" "${watched[@]}" --error-exitcode 1 \
      "$python" -m pytest tests/test_sanitize*.py -m "$tests" -q -p no:cacheprovider --tb=short
  done
  step 60 "demo" "$python" -m fusedcuda demo
  cat "$report"
fi
if [[ $bench == yes ]]; then
  "$python" -m bench "${families[@]}" --at-once --out "$out" --rounds 3 --budget "$budget" 2>&1 | tee -a build/results.log || failed=1
  pack
fi
exit $failed
