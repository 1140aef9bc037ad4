"""KV events on the wire: what routers are told."""

from __future__ import annotations

from ..mutation import mutation

MUTATIONS = (
    mutation(
        "claims_without_windows",
        "I25",
        "full blocks are told that no hit can use, since their windows are gone",
        "core/kv_events/claims",
        ("Claims._go_up", "live &= run.runs[k] >= needs.of(run.start, run.start + len(run))", "pass"),
    ),
    mutation(
        "claims_forget_followers",
        "I25",
        "a block is told as long as a hit ends in its own run",
        "core/kv_events/claims",
        ("Claims._go_up", "live[follower.at] = True", "pass"),
    ),
    mutation(
        "claims_windows_end_at_a_run",
        "I25",
        "the window of a hit may reach into the run before",
        "core/kv_events/claims",
        ("Claims._go_down", "0 if after is None else int(after.runs[k, at])", "0"),
    ),
    mutation(
        "claims_on_device_behind_the_host",
        "I25",
        "a device block is told whose predecessor is in the host tier: routers drop it",
        "core/kv_events/claims",
        (
            "Claims._go_down",
            "complete, on_device = np.logical_and.accumulate(complete), np.logical_and.accumulate(on_device)",
            "complete = np.logical_and.accumulate(complete)",
        ),
    ),
    mutation(
        "texts_forgotten_and_still_told",
        "I25",
        "what is known no more is never taken back",
        "core/kv_events/claims",
        ("Claims._forget", "self._gone += self._removed(run, np.zeros(len(run), np.uint8))", "pass"),
    ),
    mutation(
        "a_replay_older_than_the_buffer_is_cut",
        "I25",
        "who has missed more than is kept believes the rest of what it knew",
        "core/kv_events/publisher",
        ("Worker._answer", "self._tell_everything()", "pass"),
    ),
    mutation(
        "stored_claims_without_ends",
        "I25",
        "tiles alone are told as a hit, though the windows at its end are in no tier",
        "core/kv_events/stored_claims",
        ("RemoteRule.go_down", "hit &= self._has(run, END) | ~by_end", "pass"),
    ),
    mutation(
        "stored_claims_forget_tiles_of_the_run_before",
        "I25",
        "a hit is told whose first tiles are gone",
        "core/kv_events/stored_claims",
        ("RemoteRule.go_down", "(before is None or bool(before.reach[run.at]))", "True"),
    ),
    mutation(
        "stored_claims_without_windows_of_their_own",
        "I25",
        "a hit is told whose window, stored block by block, has a hole",
        "core/kv_events/stored_claims",
        ("RemoteRule.go_down", "hit &= (big_runs[k] >= need) & ((first & own) | by_end | (need == 0))", "pass"),
    ),
    mutation(
        "stored_claims_of_windows_whose_first_block_is_here_alone",
        "I25",
        "a hit is told that a question finds lacking: it names the window's first block, too",
        "core/kv_events/stored_claims",
        ("RemoteRule.go_down", "(first & own)", "own"),
    ),
    mutation(
        "stored_claims_of_followers_stay_as_they_were",
        "I25",
        "a block that a window needs has gone from the store, and the text that goes on from there is told as before",
        "core/kv_events/rule_and_seek",
        ("RemoteRule.go_down", "differs |= np.logical_or.accumulate(new != old)[-n:]", "pass"),
    ),
    mutation(
        "a_store_left_alone_is_told",
        "I25",
        "routers send turns to a store that nobody asks, after a reset or while its breaker is open",
        "core/kv_events/stored_claims",
        ("Claims._go_up", "self._remote_is_used", "self._rule is not None"),
    ),
    mutation(
        "a_disowned_spill_is_told",
        "I25",
        "an object is told that is about to be deleted",
        "core/kv_events/stored_claims",
        ("Known.confirm", "self._names.get(name) is False", "not self._names.get(name)"),
    ),
    mutation(
        "what_the_store_has_lost_is_still_told",
        "I25",
        "a router credits for ever what a question has found absent",
        "core/kv_events/stored_claims",
        ("Known._drop", "self._tell(name, False)", "pass"),
    ),
    mutation(
        "store_news_are_lost_in_a_full_queue",
        "I25",
        "what the store has is never told if the publisher's thread was behind once",
        "core/kv_events/publisher",
        (
            "KVEventPublisher._look_at_remote",
            "self._worker.hand_of_remote(RemoteNews(changes, is_used))",
            "self._worker.takes_more and self._worker.hand_of_remote(RemoteNews(changes, is_used))",
        ),
    ),
)
