"""OpenAI's API over HTTP."""

from __future__ import annotations

from ..mutation import mutation

MUTATIONS = (
    mutation(
        "server_takes_any_key_of_the_right_scheme",
        "",
        "whoever sends any key is let in",
        "server/access",
        ("_knows", 'scheme.lower() == "bearer" and any(same)', 'scheme.lower() == "bearer" or any(same)'),
    ),
    mutation(
        "server_forgets_the_salt",
        "",
        "a tenant sees by cached_tokens, and by time, what another has asked",
        "server/completions",
        ("_outputs", "body.cache_salt", "None"),
    ),
    mutation(
        "server_goes_on_for_clients_that_have_gone",
        "",
        "answers are computed to their end that nobody reads",
        "server/errors",
        (
            "while_connected",
            "asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)",
            "asyncio.wait({task})",
        ),
    ),
    mutation(
        "server_answers_in_the_middle_as_if_whole",
        "",
        "an answer that was cut off or outgrew the pools has a status of 200",
        "server/errors server/lifecycle",
        ("outputs", "raise failed", "del failed"),
    ),
    mutation(
        "server_quotes_libraries",
        "",
        "clients read what torch said of the machine",
        "server/errors",
        ("as_api_error", "isinstance(problem, ForwardFailed)", "False"),
    ),
    mutation(
        "server_reads_bodies_of_any_size",
        "",
        "a body that does not say how long it is fills the memory",
        "server/abuse",
        ("receive", "size > most", "size > 100 * most"),
    ),
    mutation(
        "page_shows_data_to_anybody",
        "",
        "whoever has no key watches the requests of those who have one",
        "server/watch",
        ("_is_open", "path.startswith(OPEN_FOLDER)", 'path.startswith((OPEN_FOLDER, "/watch"))'),
    ),
    mutation(
        "page_keeps_snapshots_for_slow_readers",
        "",
        "a phone in a pocket makes the server's memory grow",
        "server/watch",
        ("put", "self._newest = snapshot", 'self._newest = (self._newest or b"") + snapshot'),
    ),
    mutation(
        "page_looks_for_each_listener",
        "",
        "fifty pages cost fifty times as much as one",
        "server/watch",
        ("events", "while (event := await listener.next()) is not None: yield event",
         "while await listener.next() is not None:\n            self.sample()\n            yield self._newest"),
    ),
    mutation(
        "page_never_lets_go",
        "",
        "a server that is to end waits for pages that never leave, and cuts them off",
        "server/watch",
        ("shutdown", "sampler.close()", "pass"),
    ),
    mutation(
        "server_compiles_for_clients_that_have_gone",
        "",
        "two grammars whose clients have left keep all others waiting",
        "server/abuse",
        ("is_wanted", "not all(caller.cancelled() for caller in self.callers)", "bool(self.callers)"),
    ),
    mutation(
        "server_never_comes_to_its_deadline",
        "",
        "a thread that is stuck keeps the process after SIGTERM",
        "server/deadline",
        ("_run", "left <= 0", "left <= -1e9"),
        hangs=True,
    ),
)
