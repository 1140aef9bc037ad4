# Further commands on a lent GPU (docs/GPU-RUNBOOK.md): sections of the benchmark, each to a JSON of its own in $OUT.
#   bash tools/lent_gpu/figures.sh SECONDS SECTION ...
. /dev/shm/t/e; export FLASHINFER_DISABLE_JIT=1
seconds=$1; shift
for section in "$@"; do
  timeout $((seconds + 35)) python3 -m benchmarks.gpu --only "$section" --seconds $seconds \
    --json "$OUT/${section%% *}.json" 2>&1 | tee -a "$OUT/figures.log"
done
