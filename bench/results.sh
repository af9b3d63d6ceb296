#!/usr/bin/env bash
# Everything that is run on a card before a commit may claim it: GPU tests, compute-sanitizer, demo, benchmark.
#
#   bench/results.sh [FOLDER]        (default bench/results/<gpu>)
#
# Writes tests.md and what the benchmark writes into FOLDER. Takes about 8 minutes on an H200; FUSEDCUDA_COMMIT names the
# commit where there is no git. Each step has a time limit and a failed step does not stop
# the others; build/results.log has their whole output.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
gpu=$("$python" -c "
import torch
from bench.device import short_name
print(short_name(torch.cuda.get_device_name()))")
out=${1:-bench/results/$gpu}
mkdir -p "$out" build
: > build/results.log
commit=${FUSEDCUDA_COMMIT:-$(git describe --always --dirty 2>/dev/null || echo unknown)}
export FUSEDCUDA_COMMIT=$commit
report=$out/tests.md
failed=0

"$python" - > "$report" <<PYTHON
import datetime, platform, torch
print(f"""# Tests on this card

{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {platform.python_version()}, commit $commit,
{datetime.date.today()}. Written by bench/results.sh.

| what | result | seconds |
|---|---|---:|""")
PYTHON

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
}

step 60 "compile" "$python" -c "import fusedcuda; fusedcuda.load('pointwise'); print('passed')"
workers=$("$python" -c "import xdist" 2>/dev/null && echo "-n 8")
# shellcheck disable=SC2086  (no workers, no argument)
step 240 "GPU tests" "$python" -m pytest tests -m "gpu or gpus" $workers -q -p no:cacheprovider --tb=short
for tool in memcheck racecheck initcheck; do
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 step 90 "$tool" \
    compute-sanitizer --tool "$tool" --error-exitcode 1 \
    "$python" -m pytest tests/test_sanitize.py -m gpu -q -p no:cacheprovider --tb=short
done
step 60 "demo" "$python" -m fusedcuda demo
"$python" -m bench.bench_pointwise --out "$out" --budget 200 || failed=1
cat "$report"
exit $failed
