"""`gpumux top`: the jobs as they run. Start reading at `command.py`, which chooses how to show them.

rates       two answers of the daemon -> rates and shares
columns     which columns at which width, their cells, order and filter     drawing   bars, charts, cut text
panels      what stands above the table: verdicts, meters, charts           state     what is known and wanted now
feed        the thread that asks the daemon                                 app, dialogs   the screen, with Textual

All but feed, app, dialogs and command are pure. Only app and dialogs import Textual, which is an extra.
"""
