"""The command `gpumux`: one module a verb, each imported when its verb is called. Start with `main.py`. May import
everything."""
