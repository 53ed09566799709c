"""At run time: which recorded graph comes next, what it needs, and the memory pool that all of them share.

dispatch    a thread's trees; the call of a captured function
tree        recorded steps as paths of nodes
node        one recorded graph: inputs, outputs, replay
steps       when a step begins: one function, one table
"""
