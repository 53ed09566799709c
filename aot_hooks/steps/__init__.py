"""Training steps.

recorder.py notes which calls run and hold saved tensors, plan.py plans copies for them, follow.py runs the plan.
simulated.py is a step in which the calls of one graph are compiled in another way.
"""
