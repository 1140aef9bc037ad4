"""What happens to requests, as it is told."""

from __future__ import annotations

from ..mutation import mutation

MUTATIONS = (
    mutation(
        "journal_overlooks_evictions_of_the_host",
        "I25",
        "what stores push out of the host tier is told of nobody",
        "core/explanation model/machine",
        ("EvictionWatch.__init__", "host is None", "True"),
    ),
    mutation(
        "journal_calls_all_of_a_hit_the_devices",
        "I25",
        "an explanation says that nothing came from the host",
        "core/explanation model/machine",
        ("Sources.admitted", "TIERS[by_unit[end - 1]]", "TIERS[0]"),
    ),
    mutation(
        "failed_copies_keep_their_reason_to_themselves",
        "I25",
        "the log does not say why stores fail",
        "core/explanation",
        ("CopyNews.failed", "now < self._silent_until[t.direction]", "True"),
    ),
    mutation(
        "explanations_take_what_was_pushed_out_for_new",
        "I25",
        "a prompt whose text was pushed out is told that nobody has sent it",
        "core/coordinator/trail core/explanation",
        ("Trail._beyond", "units, found = at, (at * self._unit, mark)", "found = at * self._unit, mark"),
    ),
    mutation(
        "explanations_forget_ends_that_texts_pass",
        "I25",
        "what was kept and pushed out is told as never kept",
        "core/coordinator/trail",
        ("Trail._remember", "not mark.end or before.is_kept > mark.is_kept", "before.is_kept > mark.is_kept"),
    ),
    mutation(
        "explanations_blame_who_came_later",
        "I25",
        "requests are named that took no block of what was not found",
        "core/explanation",
        ("_Teller._missed", "event.number < gap.since", "False"),
    ),
    mutation(
        "explanations_are_of_others",
        "I25",
        "a request is told the preemptions of all",
        "core/explanation",
        ("explain_all", "tellers.get(event.request_id)", "next(iter(tellers.values()))"),
    ),
)
