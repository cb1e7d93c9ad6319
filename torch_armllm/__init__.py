"""Fast language models on Arm CPUs: one call quantises a transformers model and rewrites it to fused ops."""

from __future__ import annotations

from pathlib import Path as _Path

__version__ = "0.1.0"

# In a checkout, `ops` and `passes` lie beside this package; an installed package holds them itself.
_checkout = _Path(__file__).resolve().parent.parent
if (_checkout / "ops" / "library.cpp").exists():
    __path__.append(str(_checkout))
