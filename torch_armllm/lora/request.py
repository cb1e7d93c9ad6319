"""The adapter that a request asks for."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch_armllm.system.foreign_arguments import refusing


@refusing(
    {
        "tensorizer_config_dict": (None, "adapters are read from lora_path; leave it out"),
        "load_inplace": (False, "the adapter of an id may be in use; give another id"),
    }
)
@dataclass(frozen=True)
class LoRARequest:
    """An adapter; names are vLLM's.

    Attributes:
        lora_name: shown in messages and by the server.
        lora_int_id: above 0; requests with the same id use the same adapter.
        lora_path: folder with ``adapter_config.json`` and ``adapter_model.safetensors``.
        base_model_name: of the model that it adapts; has no effect.

    Raises:
        ValueError: the id is not above 0, or the name or the path is empty.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ValueError(f"lora_int_id is {self.lora_int_id}; give an id above 0")
        if not self.lora_name or not self.lora_path:
            raise ValueError("an adapter needs a lora_name and a lora_path")
