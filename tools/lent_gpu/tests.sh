# Second command on a lent GPU (docs/GPU-RUNBOOK.md): the device tests, side by side. Its log is $OUT/tests.log.
# If kernels were not built ahead: FLASHINFER_DISABLE_JIT=1 lets their tests fail instead of compiling.
. /dev/shm/t/e; export OMP_NUM_THREADS=2
tests() { log=$T/$1.log; shift; timeout 120 python3 -m pytest -q -W default -p no:cacheprovider -m gpu --timeout=100 \
  --timeout-method=thread "$@" > $log 2>&1; echo "status $?" >> $log; cat $log >> $OUT/tests.log; tail -2 $log; }
tests words tests/kernels/test_words.py & tests host tests/gpu/test_host_tier.py &
tests graphs tests/served/test_graphs.py & tests states tests/served/test_pooled.py & tests flash tests/attention/test_flashinfer_gpu.py &
tests half tests/families/test_half_precision.py tests/attention/test_reference.py &
tests copies tests/gpu/test_copies.py & tests order -n 3 tests/gpu/test_order.py & wait
tests memory tests/gpu/test_memory.py
