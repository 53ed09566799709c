"""Saved tensors in host memory: the hook, its four operators and streams, pinned memory, and when copies start.

hook.offload      a pair that sends a tensor to the host and fetches it
schedule          bytes and milliseconds in, start and end of each copy out: no graphs, no tensors
placement         puts the operators where the schedule wants them
transfers         the operators at run time; pinned_pool is the memory that they use
"""
