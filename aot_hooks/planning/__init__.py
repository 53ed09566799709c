"""A step and a budget in, a choice for each saved tensor out.

    graphs --step_of--> Step, data only --solve--> an option for each value --apply--> policy, and nodes to recompute

`budget.py` is what users say, `assignment.py` what a graph gets of it, `step.py` the data, `solver.py` the linear
program. `options.py` reads the data off two graphs, `trials.py` puts choices into the graphs and checks them,
`within.py` says which are tried. `simulated.py` is a step in which the calls of one graph are compiled in another way.
"""
