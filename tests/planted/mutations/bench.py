"""The load generator."""

from __future__ import annotations

from ..mutation import mutation

MUTATIONS = (
    mutation(
        "bench_waits_for_answers",
        "",
        "a slow server is asked less, and its latencies look better than they are",
        "bench/drive",
        (
            "Driver._send_all",
            "group.create_task(self._converse(number, session, dialogue, first))",
            "await self._converse(number, session, dialogue, first)",
        ),
        hangs=True,
    ),
    mutation(
        "bench_hides_that_it_was_late",
        "",
        "figures of a closed loop pass for those of an open one",
        "bench/figures",
        ("schedule", "p99 > LATE_MS", "p99 > 100 * LATE_MS"),
    ),
    mutation(
        "bench_thinks_while_it_waits",
        "",
        "a user asks on before the answer to the question before",
        "bench/drive",
        ("Driver._converse", "record.end_s + following.think_s", "record.sent_s + following.think_s"),
    ),
    mutation(
        "bench_mixes_the_ids_of_sessions",
        "",
        "prompts share what the trace says is different, and hits are too many",
        "bench/traces",
        ("prompt_in", 'key_of("trace", conversation.scope)', 'key_of("trace")'),
    ),
    mutation(
        "replay_asks_before_the_answer",
        "",
        "a turn runs beside the one before it, and finds less than it will",
        "plan/trace",
        ("Order.begin", "self._asked[k].session not in self._busy", "k not in self._busy"),
    ),
    mutation(
        "replay_promises_the_last_token",
        "",
        "the bound is more than any cache can find, since a prompt's last token is computed",
        "plan/trace",
        ("measure", "(len(prompt) - 1) // block_tokens", "len(prompt) // block_tokens"),
    ),
    mutation(
        "bench_takes_cut_answers_for_whole",
        "",
        "a server that drops its streams looks fast",
        "bench/drive",
        ("_Reading.finish", "not (self._is_done or record.finish_reason)", "False"),
    ),
)
