"""A step and a budget in, a choice for each saved tensor out.

    graphs --step_of--> Step, data only --solve--> an option for each value --apply--> policy, and nodes to recompute

`budget.py` is what users say, `step.py` the data, `solver.py` the linear program. `options.py` reads the data off two
graphs, `within.py` partitions the joint graph by the result and checks it.
"""
