"""Jobs with equal Programs that run as one: `jobs.py` carries out in the daemon what `gpumux/scheduler/fusion` decides.
The loop imports it; it may import what the rest of the daemon may."""
