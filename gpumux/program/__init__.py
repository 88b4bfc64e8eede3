"""The data: one captured step as operators over storages. Most of it is read without torch.

Start with `ir.py` (the form), then `codec.py` (its encoding) and `validate.py`. May only import `types` and `errors`.
"""
