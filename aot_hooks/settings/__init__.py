"""What the user asked for: a hook or policy with its scope, names given by `checkpoint_name`, operators by name.

`setting.Setting` is the unit that everything else takes. `recompiles` warns of a setting that changes in each step.
"""
