"""What is there to notice mistakes, and would not: the audit, the simulated device, the canary."""

from __future__ import annotations

from .base import STREAM_TESTS, Mutation, core

AUDIT = "kvtier/audit/run.py"
LATE, CANARY = "kvtier/testing/late.py", "kvtier/testing/canary.py"

MUTATIONS = (
    Mutation(
        "audit_of_counts_overlooks_requests_that_wait",
        AUDIT,
        "if (running or waiting or under_way or unreported or scheduler.step) and not scheduler.has_work():",
        "if (running or under_way or unreported or scheduler.step) and not scheduler.has_work():",
        "an engine that asks has_work() leaves waiting requests for ever, and no audit of counters says so",
        "I30",
        core("audit"),
    ),
    Mutation(
        "late_copies_know_what_the_host_has_learned_since",
        LATE,
        "                with self._device.knowing(late.known):\n                    late.job()\n",
        "                late.job()\n",
        "a submission thread that gives a stream its copy unordered is taken for one that the host has ordered",
        "I17",
        STREAM_TESTS,
    ),
    Mutation(
        "canary_does_not_poison_behind_a_text",
        CANARY,
        "            if self._poison:\n                poison_tails(words, work.tables[g], work.ends, work.poison)\n",
        "",
        "what a block held before stays behind a text, and may be the very tokens that somebody reads too early",
        "I15",
        ("tests/model/test_what_checks_must_see.py",),
    ),
    Mutation(
        "canary_does_not_poison_the_host",
        CANARY,
        "        self._poison_host(poison)\n",
        "",
        "what a host block held before stays there, and may be the very content that somebody loads too late",
        "I12",
        ("tests/model/test_what_checks_must_see.py",),
    ),
)
