"""What happened, as data and then as text: plans as tables, dry runs without memory, scripts, plots, gradients."""
