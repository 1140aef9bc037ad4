"""The engine: schedule, forward, sample, commit; requests in, answers out."""
