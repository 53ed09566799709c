"""Decides, before anything runs, which operators of a graph can be captured."""
