"""Turns compiled graphs into captured functions, also when torch's caches loaded them.

compilation      the compilers of one graph of Dynamo, for AOTAutograd and Inductor
pieces           an fx graph: its parts, captured
inductor         Inductor's code: whole or its pieces, captured
inductor_policy  the same for Inductor's own users
entry            the data about captures beside an entry of torch's AOTAutograd cache
"""
