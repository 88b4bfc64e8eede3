"""Processes that devices start: the fork server, the zygote that executors are forked from, and the one that checks
Programs."""
