"""The adapter that a request asks for."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class LoRARequest:
    """An adapter; names are vLLM's.

    Attributes:
        lora_name: shown in messages and by the server.
        lora_int_id: above 0; requests with the same id use the same adapter.
        lora_path: folder with ``adapter_config.json`` and ``adapter_model.safetensors``.
        base_model_name: of the model that it adapts; has no effect.
        tensorizer_config_dict: refused.
        load_inplace: True is refused.

    Raises:
        ValueError: the id is not above 0, the name or the path is empty, or an argument is refused.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = field(default=None, compare=False, repr=False)
    tensorizer_config_dict: None = field(default=None, compare=False, repr=False)
    load_inplace: bool = field(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ValueError(f"lora_int_id is {self.lora_int_id}; give an id above 0")
        if not self.lora_name or not self.lora_path:
            raise ValueError("an adapter needs a lora_name and a lora_path")
        if self.tensorizer_config_dict is not None:
            raise ValueError(
                "tensorizer_config_dict is refused: adapters are read from lora_path; leave it out"
            )
        if self.load_inplace:
            raise ValueError(
                f"load_inplace=True is refused: the adapter {self.lora_int_id} may be in use; give another id"
            )
