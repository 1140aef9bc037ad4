"""Which objects of a call go together, for libraries that move many at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from kvtier.remote.backends.contract import Buffers


def by_size(
    names: Sequence[str],
    objects: Sequence[Buffers],
    most_pieces: int,
    most_bytes: int,
    pieces_of: Callable[[Buffers], int] = len,
) -> Iterator[list[int]]:
    """Batches, in order. No name is in one twice: libraries know the objects of a batch by their names.

    An object that is larger than a batch is a batch alone. ``pieces_of``: as how many pieces an object counts.
    """
    part: list[int] = []
    within = set[str]()
    pieces = size = 0
    for k, (name, buffers) in enumerate(zip(names, objects, strict=True)):
        pieces += pieces_of(buffers)
        size += sum(buffer.nbytes for buffer in buffers)
        if part and (pieces > most_pieces or size > most_bytes or name in within):
            yield part
            part, within = [], set()
            pieces, size = pieces_of(buffers), sum(buffer.nbytes for buffer in buffers)
        part.append(k)
        within.add(name)
    if part:
        yield part


def first_alone(parts: Iterable[list[int]]) -> Iterator[list[int]]:
    """Batches, of which the first object is one of its own."""
    for n, part in enumerate(parts):
        if n == 0 and len(part) > 1:
            yield part[:1]
            part = part[1:]
        yield part


def by_number(count: int, most: int) -> list[range]:
    """Batches of ``most`` objects."""
    return [range(begin, min(begin + most, count)) for begin in range(0, count, most)]
