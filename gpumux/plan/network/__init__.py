"""The network among ranks, measured: `gpumux plan network` writes a file, and the planner takes it for a preset.

Start with `measured.py` (the file, and the lines through its points; imports no torch), then `ranks.py` (measuring, and
the processes that do). `cli` and microbench import it; it imports what `plan` may."""
