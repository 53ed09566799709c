"""Makes captured functions of compiled graphs, and stores what is needed for that in torch's caches.

compilation      the compilers of one graph of Dynamo, for AOTAutograd and Inductor
pieces           an fx graph: its parts, captured
inductor         Inductor's code: whole or its pieces, captured
inductor_policy  the same for Inductor's own users
entry            what is stored beside an entry of torch's AOTAutograd cache
"""
