# FlashInfer's kernels, built ahead for the wheel of carry.sh and packed with it (docs/GPU-RUNBOOK.md).
# Run from the repository's root, with the T of carry.sh: T=... bash tools/lent_gpu/kernels.sh
# May be run again: what is there is not built again.
set -eu
mkdir -p "$T/stub"
gcc -shared -x c /dev/null -o "$T/stub/libcuda.so" -Wl,-soname,libcuda.so.1
export PYTHONPATH=$T/slim:$PWD FLASHINFER_WORKSPACE_BASE=$T/fi FLASHINFER_CUDA_ARCH_LIST=9.0a LIBRARY_PATH=$T/stub
export CUDA_HOME=${CUDA_HOME:-/usr/local/cuda-13.0}
for section in "main job" decode "time to" "device tests" states; do
  nice python -m benchmarks.gpu --kernels --only "$section"
done
for built in "$T"/fi/.cache/flashinfer/*/90a/cached_ops/*/*.so; do
  to=$T/slim/flashinfer/data/aot/$(basename "$built" .so)
  mkdir -p "$to"
  strip -o "$to/$(basename "$built")" "$built"
done
tar -C "$T/slim" -cJf .carry/fi.tar.xz .
git ls-files -z | du -cb --files0-from=- | tail -1
du -sb .carry # together less than 67,108,864
