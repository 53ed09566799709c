"""At run time: which recording replays next, what it needs, and the memory pool that all recordings share.

dispatch       a thread's trees; the call of a captured function
tree           one call: replay, warm up, record, or run uncaptured; what happens when a step ends
steps          when a step begins: one function, one table
record         captures a function after a node of the path
node           one recording: how it is replayed
liveness       whether somebody still holds an output
driver, pool   what allocates, captures and replays; the pool of one tree
warmup, uncaptured, stable_inputs, reclaim, snapshot, capture, function: one concern each
"""
