"""What of a graph can be captured, found before anything runs.

blockers    the nodes that can't be captured, each with its reason and the user's line
cpu_values  values on the CPU that are moved to the device
partition   cuts a graph around its blockers
analyse     all of it: one decision, for `explain` and for a run alike
"""
