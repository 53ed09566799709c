"""AOTAutograd and Inductor: what they are given, and what of it comes out of torch's caches."""
