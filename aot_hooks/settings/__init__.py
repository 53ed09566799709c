"""The user's settings: a hook or policy with its scope, names set by `checkpoint_name`, operators by name.

Every other room takes a `setting.Setting`. `recompiles` warns of a setting that changes in each step.
"""
