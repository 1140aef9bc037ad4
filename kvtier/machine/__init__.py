"""The machine under a cache: errors, checked arguments, counts, the journal, devices, memory."""
