"""Joins what the commands on a lent GPU have measured: ``python tools/lent_gpu/join.py link.json reload.json ...``.

Prints one result, as ``make gpu`` writes it: benchmarks/results/gpu.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

runs = [json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:]]
joined = {key: [part for run in runs for part in run[key]] for key in ("sections", "figures")}
print(json.dumps(runs[0] | joined | {"whole": all(run["whole"] for run in runs)}, indent=1))
