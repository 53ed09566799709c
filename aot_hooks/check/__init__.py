"""Gradients of the first step, compared with those without hooks, on the user's own batch: `check=True`.

comparison.py has the errors, causes.py finds the saved tensors that are to blame, first_step.py runs both.
"""
