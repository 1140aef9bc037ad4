"""The engine of a GPU, on a played driver."""

from __future__ import annotations

from ..mutation import mutation

MUTATIONS = (
    mutation(
        "cuda_neighbours_on_one_side_are_merged",
        "I29",
        "a copy moves bytes that belong to other blocks",
        "core/cpu_offload/engines/cuda/descriptors",
        ("_merge", "dst[k] == d + n and src[k] == s + n", "dst[k] == d + n"),
    ),
    mutation(
        "cuda_a_copy_that_is_refused_is_passed_over",
        "I29",
        "the copies behind it are made, and nobody hears of it",
        "core/cpu_offload/engines/cuda/engine core/cpu_offload/engines/cuda/engine_failures",
        ("_copy_each", "status[0] != 0", "False"),
    ),
    mutation(
        "cuda_a_copy_counts_as_ended_when_it_was_submitted",
        "I17 I13",
        "a request reads what its load has not brought yet",
        "core/cpu_offload/engines/cuda/engine_order core/cpu_offload/engines/cuda/engine_failures "
        "core/cpu_offload/engines/cuda/engine core/cpu_offload/engines/cuda/link",
        ("is_done", "self._api.has_happened(event)", "self._api.has_happened(event) or True"),
    ),
    mutation(
        "cuda_nobody_waits_for_the_checksums",
        "I17 I29",
        "the next writer of a block may be faster than the checksum of its store",
        "core/cpu_offload/engines/cuda/engine_checksums core/cpu_offload/engines/cuda/link",
        ("copy", "self._follow(stream, beside)", "pass"),
    ),
    mutation(
        "cuda_close_does_not_wait_for_copies",
        "I28",
        "memory is unpinned and freed while the device still writes it",
        "core/cpu_offload/engines/cuda/engine_failures core/cpu_offload/engines/cuda/link",
        ("close", "not all(self.is_done(event) for event in last)", "False"),
    ),
    mutation(
        "cuda_host_memory_is_rounded_up",
        "I22",
        "100 GB become 128",
        "core/cpu_offload/engines/cuda/host_memory",
        (
            "HostMemory.__init__",
            "mmap.mmap(file, num_bytes, flags=flags)",
            "mmap.mmap(file, 1 << (num_bytes - 1).bit_length(), flags=flags)",
        ),
    ),
    mutation(
        "cuda_loads_are_submitted_behind_stores",
        "I19",
        "a request waits for the submission of what others evict",
        "core/cpu_offload/engines/cuda/engine_order core/cpu_offload/engines/cuda/engine "
        "core/cpu_offload/engines/cuda/link",
        ("SubmissionThreads.put", "self._queues[direction]", "self._queues[Direction.STORE]"),
    ),
)
