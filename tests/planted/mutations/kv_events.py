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
)
