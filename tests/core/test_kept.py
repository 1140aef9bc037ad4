"""What is never given back."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
from kvtier.machine.kept import KEPT

class Dies:
    def __del__(self):
        print("it died")

KEPT.append(Dies())
"""


def test_what_is_kept_outlives_the_interpreter():
    """What its destructor does may be what must not be done: on a lost device it would end the process as a crash."""
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=True)
    assert (ran.stdout, ran.stderr) == ("", "")
