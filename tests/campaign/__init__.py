"""The long campaign: random work on every store and call until a goal or a time is reached. `run.py` starts it."""
