"""What only a GPU can tell: ``python -m benchmarks.gpu``, or ``make gpu``."""

import os

# Tests have numba check the bounds of arrays, in machine code of its own. From here on, also in processes that are
# started, one machine code serves all: compiling it twice takes a minute of the GPU's time.
os.environ.setdefault("NUMBA_BOUNDSCHECK", "0")
