"""Autograd's stack of saved-tensor hooks, and the numbers of its operators."""
