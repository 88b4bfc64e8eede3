"""How torch's compiler is set up in tests."""

from __future__ import annotations

# The compiler tries no instruction sets and prepares no headers: that takes longer than compiling a step.
COMPILER = {"TORCHINDUCTOR_VEC_ISA_OK": "1", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
