# First command on a lent GPU (docs/GPU-RUNBOOK.md): installs what was carried, says what is there, tests copies and kernels.
T=/dev/shm/t; mkdir -p $T/site $T/stub; tar xJf .carry/fi.tar.xz -C $T/site
python3 -m pip install -q --no-index --no-deps --no-compile --target $T/site .carry/*.whl
ln -sf $(ldconfig -p | awk '/libcuda.so.1/{print $NF; exit}') $T/stub/libcuda.so
cat > $T/e <<'E'
T=/dev/shm/t
export PYTHONPATH=$T/site:$PWD CUDA_HOME=$(ls -d /usr/local/cuda-13* | head -1) LIBRARY_PATH=$T/stub
export FLASHINFER_WORKSPACE_BASE=$T/fi PYTHONUNBUFFERED=1 NUMBA_BOUNDSCHECK=0 KVTIER_COMMIT=$(cat .carry/commit)
E
. $T/e; set -x
nvidia-smi; nvidia-smi -q | grep -iA8 'pcie gen\|link width'; nproc; free -g; ulimit -l; ls /sys/devices/system/node
which gcc ninja nvcc; ls $CUDA_HOME $CUDA_HOME/lib64 | head -40
python3 -c "import numpy, numba, torch, triton, cupy, transformers
for m in (numpy, numba, torch, triton, cupy, transformers): print(m.__name__, m.__version__)"
python3 -c "import flashinfer; print(flashinfer.__version__)"
python3 -m pytest -q -W default -p no:cacheprovider -x --timeout=60 tests/gpu/test_{copies,kernels,memory}.py
