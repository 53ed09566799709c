"""Run time: which recording replays next, what it needs, and the memory pool that all recordings share.

dispatch       the trees of a thread; the callable of a captured function
tree           one call: replay, warm up, record, or run uncaptured; the end of a step
steps          when a step begins: one function, one table
record         captures a function after a node of the path
node           one recording, and how it is replayed
liveness       whether somebody still holds an output
driver, pool   the device's operations; the memory pool of one tree
warmup, uncaptured, stable_inputs, reclaim, snapshot, capture, function: one concern each
"""
