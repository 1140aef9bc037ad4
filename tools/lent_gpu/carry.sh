# What travels to a lent GPU (docs/GPU-RUNBOOK.md): the commit, and FlashInfer's wheel, stripped to 12 MB.
# Run from the repository's root: T=$(mktemp -d) bash tools/lent_gpu/carry.sh
set -eu
mkdir -p .carry "$T/slim"
grep -qx '/.carry/' .git/info/exclude || echo '/.carry/' >> .git/info/exclude
git rev-parse HEAD > .carry/commit
pip download --no-deps -d "$T" flashinfer-python==0.7.2.post1
pip download --no-deps -d .carry --only-binary=:all: --python-version 3.12 --implementation cp \
  --platform manylinux_2_28_x86_64 apache-tvm-ffi==0.1.15.post2
cd "$T/slim"
python3 -m zipfile -e "$T"/flashinfer_python-*.whl .
rm -rf b12x
find flashinfer/experimental -type f ! -name '*.py' -delete
find flashinfer/data/csrc -mindepth 2 -delete
find flashinfer/data/cutlass -type f ! -path '*/cutlass/include/*' ! -path '*/cutlass/tools/util/include/*' -delete
