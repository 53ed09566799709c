"""What would be saved and packed, told without doing it: of a function (dry_run.py), of a script (script.py)."""
