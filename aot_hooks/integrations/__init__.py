"""Saved-tensor hooks in the trainers of other packages, each through the trainer's own extension point.

A module here needs the package that it is named after; `pip install "aot-hooks[transformers]"` and so on installs it.
All of them switch `aot_hooks.enable` on while the trainer trains, and log what the hooks did.
"""
