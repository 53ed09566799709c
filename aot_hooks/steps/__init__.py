"""Steps: one recorder of what runs and what is saved meanwhile, one plan of a step, and what follows a plan."""
