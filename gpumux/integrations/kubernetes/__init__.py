"""A pod asks for a share of the node's device: `gpumux.dev/share: 25` in its limits.

shares      pure: which grants are made, and which are released
api         the kubelet's messages, as its two gRPC services define them
plugin      the process: registers with the kubelet, answers it, follows restarts

Start reading in `plugin.py`. `python -m gpumux.integrations.kubernetes` runs it; deploy/kubernetes has the DaemonSet.
"""
