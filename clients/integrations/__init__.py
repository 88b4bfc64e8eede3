"""The same small programs without gpumux and with it: what changes is at most five lines (docs/integrations.md). Each
writes its losses for TensorBoard: python -m clients.integrations.loop_gpumux DIRECTORY
"""
