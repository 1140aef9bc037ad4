"""A bad link around a real link: the copies are really made, and some are damaged or reported as failed.

Owns       the fate of a copy, seeded, and the transfers under way.
Promises   a store's bytes in the host tier are damaged only after all its copies have ended, and before its end is
           reported. So it works around every engine, also a GPU's, whose memory it does not touch.
Does not   delay copies, lose them, or know orders: the simulated engine and device do.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.cpu_offload.engines import CopyEngine, EngineFactory, Outcome
from kvtier.cpu_offload.engines.around import EngineAround
from kvtier.cpu_offload.engines.by_name import MakesEngine, as_factory, build_engine
from kvtier.cpu_offload.engines.simulated import Faults
from kvtier.cpu_offload.tier_memory import TierMemory
from kvtier.cpu_offload.transfer import Direction, Transfer
from kvtier.geometry.layout import Seams

_FATES = ("fail", "tear", "corrupt")


class FaultyLink(EngineFactory):
    """Pass it as ``copy_engine``: makes the engine that ``link`` makes, with copies that go wrong by chance.

    ``link``: a copy engine's factory; ``engines.by_name.engine_factory(None, device, True)`` finds a device's own.
    ``faults``: its chances, 0..1 per transfer; the other numbers are not read:

    - ``fail``: the transfer is reported as failed;
    - ``tear``: likewise, and of a store half of the blocks are damaged in the host tier;
    - ``corrupt``: all numbers of a block just stored become NaN or infinite in the host tier, unreported; only
      ``verify="full"`` sees it, at the block's next load.
    """

    def __init__(self, link: MakesEngine, faults: Faults, seed: int = 0) -> None:
        self._link = as_factory(link)
        self._faults = faults
        self._seed = seed

    def __call__(self, memory: TierMemory) -> FaultyEngine:
        return FaultyEngine(build_engine(self._link, memory), memory, self._faults, random.Random(self._seed))

    def host_memory(self, num_bytes: int, setting: str, seams: Seams) -> npt.NDArray[np.uint8] | None:
        return self._link.host_memory(num_bytes, setting, seams)

    def give_back(self) -> bool:
        return self._link.give_back()


class FaultyEngine(EngineAround):
    """The copy engine that a ``FaultyLink`` makes: ``engine``, with some copies that go wrong."""

    def __init__(self, engine: CopyEngine, memory: TierMemory, faults: Faults, rnd: random.Random) -> None:
        super().__init__(engine, memory)
        self._random = rnd
        self._chances = [getattr(faults, fate) for fate in _FATES]
        self._under_way: dict[int, Transfer] = {}

    def submit(self, transfer: Transfer) -> None:
        super().submit(transfer)
        self._under_way[transfer.ticket] = transfer

    def poll(self) -> Sequence[Outcome]:
        return [self._spoiled(outcome) for outcome in super().poll()]

    def _spoiled(self, outcome: Outcome) -> Outcome:
        transfer = self._under_way.pop(outcome.ticket, None)
        fate = self._random.choices([*_FATES, "ok"], [*self._chances, max(0.0, 1.0 - sum(self._chances))])[0]
        if transfer is None or outcome.error or fate == "ok":
            return outcome
        count = len(transfer.groups)
        if transfer.direction is Direction.STORE:
            if fate == "corrupt":
                self.memory.blow_up_host(transfer, np.array([self._random.randrange(count)]))
            elif fate == "tear":
                self.memory.damage_host(transfer, np.arange((count + 1) // 2), bits=0xFF)
        return outcome if fate == "corrupt" else Outcome(transfer.ticket, f"planted fault: {fate}")
