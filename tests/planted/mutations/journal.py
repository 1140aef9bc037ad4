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
        "explanations_are_of_others",
        "I25",
        "a request is told the preemptions of all",
        "core/explanation",
        ("explain_all", "tellers.get(event.request_id)", "next(iter(tellers.values()))"),
    ),
)
