"""Models fused by hand, as HFTA has its users do it, and by torch.func: what our own fusion is compared with.

B models of one kind become one network whose operators treat each apart (the HFTA paper's table 6 and appendix C).
"""
