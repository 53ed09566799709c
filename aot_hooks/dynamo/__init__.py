"""The function that Dynamo traces, and who asked for it."""
