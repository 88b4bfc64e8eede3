"""How a Program's operators are run, shared by devices: the interpreter, its operands, schemas and random streams.
Imports torch."""
