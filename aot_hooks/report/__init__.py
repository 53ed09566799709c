"""Reports, as data and as text: plans as tables, dry runs without memory, scripts, plots, gradients."""
