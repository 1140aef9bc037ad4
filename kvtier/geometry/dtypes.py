"""The dtypes that are stored, by torch's names.

Owns       their sizes, their short names, and the reading of one.
"""

from __future__ import annotations

from kvtier.machine.errors import ConfigError
from kvtier.machine.integers import shown

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
DTYPE_ALIASES = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
}
"""Short names for dtypes."""


def dtype_name(dtype: object, where: str) -> str:
    """torch's name of a dtype, given as a name or a torch.dtype; ``ConfigError`` for a dtype that kvtier does not
    store."""
    name = (dtype if isinstance(dtype, str) else shown(dtype)).removeprefix("torch.")
    name = DTYPE_ALIASES.get(name, name)
    if name not in DTYPE_BYTES:
        raise ConfigError(
            f"{where}: unknown dtype {shown(dtype)}; kvtier stores {', '.join(DTYPE_BYTES)}, and fp8 for e4m3"
        )
    return name
