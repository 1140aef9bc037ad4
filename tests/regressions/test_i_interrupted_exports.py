"""Found by raising SIGINT at random bytecodes: a step's tables were laid out by halves, and the next believed them.

``Exports`` noted the new shape before the buffers had it. Interrupted in between, it gave the next step of that shape
views of another one, or blocks of other requests.
"""

from __future__ import annotations

import pytest
from core.driving import check_step, prompt

from kvtier.gpu_pool import exports
from kvtier.gpu_pool.exports import Exports


@pytest.mark.parametrize(("where", "name"), [(Exports, "_lay_out"), (exports, "_fill_tables")])
def test_tables_that_were_interrupted_are_made_anew(make_serving, monkeypatch, where, name):
    serving = make_serving(blocks=48)
    serving.add("A", prompt(0, 9), 3)
    serving.step()
    for i in range(3):
        serving.add(f"{i}", prompt(i, 30), 3)
    step = serving.scheduler.schedule()

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(where, name, interrupted)
        _ = step.group("full").block_table
    check_step(serving.cache, step)
    serving.scheduler.cancel(step)
    serving.run()
