"""Around AOTAutograd and Inductor: their compiled graphs become captured functions, and entries of torch's caches."""
