"""Keys of a long text are read as they are needed, and nothing is decided otherwise for it."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier import Fragment, FullAttention, HostPlan, HostTierScheduler, InvalidRequest, OutsideGroup, SlidingWindow
from kvtier.host_tier.keys import TextKeys
from kvtier.host_tier.orders import End, Report
from kvtier.machine.arguments import NO_KEYS

TOKENS = 4
KINDS = FullAttention(), SlidingWindow(16)
MANY = np.random.default_rng(0).integers(0, 2**63, (4000, 2), np.uint64)


def source(keys):
    """``Reads`` of these keys, and what was read."""
    read = list[range]()

    def give(first, end):
        read.append(range(first, end))
        return keys[first:end]

    return give, read


def test_keys_are_read_once_and_in_order_and_arrays_that_were_given_out_do_not_change():
    give, read = source(MANY)
    keys = TextKeys(True)
    keys.announce(100, give)
    arrays = [keys.first(n) for n in (0, 10, 5, 60)]
    keys.announce(1000, give)
    arrays += [keys.first(n) for n in (90, 700, 5000)]
    assert read == [range(10), range(10, 60), range(60, 90), range(90, 700), range(700, 1000)]
    assert [len(array) for array in arrays] == [0, 10, 10, 60, 90, 700, 1000]
    assert all(np.array_equal(array, MANY[: len(array)]) for array in arrays)
    keys.add(MANY[1000:1003])
    assert np.array_equal(keys.first(keys.count), MANY[:1003])


def test_there_is_room_for_the_keys_that_were_read_alone():
    """For 32 GiB of others that were announced there may be none."""
    keys, many = TextKeys(True), 2**40
    keys.announce(many, source(MANY)[0])
    assert np.array_equal(keys.first(64), MANY[:64])
    assert np.array_equal(keys.first(65), MANY[:65])
    with pytest.raises(InvalidRequest, match=r"uint64 \[1099511627711, 2\], got uint64 \[3935, 2\]"):
        keys.first(many)


class Books:
    """Books over two groups, whose copies all go well at once."""

    def __init__(self, kinds=KINDS, host_memory="512KiB"):
        fragments = [(Fragment(n * 640_000, 64, 64),) for n in range(len(kinds))]
        groups = [OutsideGroup(f"g{n}", kind, TOKENS, 10_000, fragments[n]) for n, kind in enumerate(kinds)]
        self.books = HostTierScheduler(HostPlan(groups, 1_280_000, host_memory, "off"))

    def text(self, keys, is_read: bool):
        if not is_read:
            return self.books.text(keys), []
        text, (give, read) = self.books.text(NO_KEYS, are_distinct=True), source(keys)
        text.announce(len(keys), give)
        return text, read

    def compute(self, text, ends):
        for end in ends:
            text.computed([np.arange(10_000, dtype=np.int32)] * len(self.books.spec.groups), end, end == ends[-1])
            self.books.poll()
            report = Report()
            for copy in self.books.take_orders().copies:
                report.add(copy.ticket, End())
            self.books.report(report)
            self.books.poll()


def test_a_new_text_reads_its_first_keys_and_then_those_of_each_step():
    books, keys = Books(), MANY[:1000]
    text, read = books.text(keys, True)
    assert text.match(0, 4000).num_tokens == 0
    assert read == [range(64)]
    books.compute(text, (800, 1600, 4000))
    assert read[1:] == [range(64, 200), range(200, 400), range(400, 1000)]
    text.close()


@pytest.mark.parametrize("changed", [0, 3, 63, 64, 500, 998, 1000], ids="parts at {}".format)
@pytest.mark.parametrize("kinds", [KINDS, KINDS[1:]], ids=["full", "window"])
def test_hits_are_those_of_a_text_whose_keys_are_all_there(kinds, changed):
    """Of what the tier has, and of what it remembers alone."""
    other = np.concatenate([MANY[:changed], MANY[2000 : 3000 - changed]])
    found = []
    for is_read in (False, True):
        books = Books(kinds)
        for keys in (MANY[:1000], other, other):
            text, _ = books.text(keys, is_read)
            hit = text.match(0, 4000)
            found.append((is_read, hit.num_tokens, hit.hosts.tolist(), text.next_parting))
            books.compute(text, (2000, 4000))
            text.close()
    assert [(n, hosts, part) for is_read, n, hosts, part in found if is_read] == [
        (n, hosts, part) for is_read, n, hosts, part in found if not is_read
    ]
    assert found[2][1] > 3900


@pytest.mark.parametrize("is_read", [True, False], ids=["read", "given"])
def test_a_text_that_has_gone_is_remembered_by_the_one_that_parts_from_it(is_read):
    books = Books(host_memory="24KiB")
    for first in (0, 200, 400, 600):
        text, _ = books.text(MANY[first : first + 200], is_read)
        text.match(0, 800)
        books.compute(text, (800,))
        text.close()
    text, _ = books.text(np.concatenate([MANY[:100], MANY[3000:3100]]), is_read)
    assert text.match(0, 800).num_tokens == 0, "it has gone"
    assert text.next_parting == 400
    text.part(600)
    books.compute(text, (800,))
    text.part(600)
    assert text.next_parting == 0, "it has passed"


def test_a_text_that_has_not_ended_is_found():
    books = Books()
    running, _ = books.text(MANY[:200], True)
    running.match(0, 800)
    books.compute(running, (800,))
    text, _ = books.text(MANY[:200], True)
    assert text.match(0, 800).num_tokens == 796
