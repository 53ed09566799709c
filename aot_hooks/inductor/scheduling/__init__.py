"""What is fused, in which blocks and which order."""
