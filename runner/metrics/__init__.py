"""What a served model counts: Prometheus, timings, spans."""
