"""AOTAutograd's graphs as they are: `options["inner"] = "aten"`, and the partition of both inner compilers."""
