"""Names of the dtypes of a KV cache, and of the states of recurrent layers; this imports no torch."""

from __future__ import annotations

from typing import Literal

KvCacheDtype = Literal["auto", "bfloat16", "float16", "float32", "int8", "int4"]
"""Values of the setting ``kv_cache_dtype``; ``auto`` is the model's own dtype."""

StateDtype = Literal["float32", "bfloat16"]
"""Values of the setting ``state_dtype``."""
