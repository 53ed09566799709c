"""Saved tensors in host memory: the hook, its four operators and streams, pinned memory, and when copies start.

hook.offload      the hook: pack sends a tensor to the host, unpack fetches it; and the same in eager mode
schedule          a pure function from bytes and milliseconds to the start and end of each copy: no graphs, no tensors
placement         moves the operators in the graphs to where the schedule has them
transfers         the operators at run time
pinned_pool       the host memory that they use
"""
