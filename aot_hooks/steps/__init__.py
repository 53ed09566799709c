"""Training steps.

recorder.py notes which calls run and hold saved tensors, plan.py plans copies for them, follow.py runs the plan.
"""
