"""Decides, before anything runs, which operators of a graph can be captured.

blockers    the nodes that can't be captured, each with its reason and the user's line
cpu_values  values on the CPU that are moved to the device
partition   cuts a graph around its blockers
analyse     all of it: one decision, for `explain` and for the backend
"""
