"""The adapters that are loaded into a model's slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_armllm.lora.adapter import Adapter, expert_layer, read_adapter
from torch_armllm.lora.request import LoRARequest
from torch_armllm.lora.slot_set import Factors, Share, SlotSet
from torch_armllm.system.host import free_memory

if TYPE_CHECKING:  # imports modules that an engine from the plan cache does not need
    from torch_armllm.lora.expert_slots import ExpertFactors

_FIRST_PREFIX = -2
"""Number in front of the prefixes of the first adapter; 0 and −1 have other meanings in the prefix cache."""


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter in a slot.

    Attributes:
        request: that loaded it.
        slot: its number in all layers.
        prefix: number in front of its prefixes in the prefix cache; never used again.
        users: unfinished requests that use it.
    """

    request: LoRARequest
    slot: int
    prefix: int
    users: int = 0


@dataclass(frozen=True)
class PreparedAdapter:
    """An adapter that was read and fits the model.

    Attributes:
        factors: of the modules that it adapts, as their slots hold them; see `LoraSlots.prepare`.
    """

    factors: Factors


class AdapterTable:
    """Loads adapters into the slots of a model's layers, and unloads the ones that were not used for longest.

    Args:
        slots: of the model's layers.
        max_rank: highest rank of an adapter.
    """

    def __init__(self, slots: SlotSet, max_rank: int) -> None:
        self.slots = slots
        self._layers = slots.layers
        self._max_rank = max_rank
        self._share: Share = lambda slot, factors: None
        self._free = list(range(slots.count))[::-1]
        self._loaded: dict[int, LoadedAdapter] = {}  # the one that was not used for longest is the first
        self._prefixes = count(_FIRST_PREFIX, -1)
        self._grown: set[int] = set()  # slots whose memory for experts is in use

    def share_by(self, share: Share) -> None:
        """Sets what writes adapters to the slots of other processes that compute the model."""
        self._share = share

    @property
    def loaded(self) -> list[LoRARequest]:
        """The adapters in slots."""
        return [adapter.request for adapter in self._loaded.values()]

    def holds(self, request: LoRARequest) -> bool:
        """True if an adapter of a request's id is in a slot; any thread may ask."""
        return request.lora_int_id in self._loaded

    def prepare(self, request: LoRARequest) -> PreparedAdapter:
        """Reads and checks an adapter, in any thread: nothing changes, and steps may run meanwhile.

        Raises:
            ValueError: the adapter cannot be read, or does not fit the model.
        """
        adapter = read_adapter(request.lora_path)
        self._refuse_experts_of_ranks(request, adapter)
        experts, rest = self._experts_and_rest(request, adapter)
        self._check(request, adapter, rest)
        prepared: dict[str, tuple[Tensor, ...]] = {}
        for name, layer in self._layers.items():
            if layer.kind == "experts":
                if name in experts:
                    prepared[name] = layer.prepare(*experts[name])
            elif name in rest:
                prepared[name] = layer.prepare(*rest[name])
        for name, factors in prepared.items():
            if not all(bool(torch.isfinite(factor).all()) for factor in factors):
                raise ValueError(f"{_adapts(request, name)} with values that {factors[0].dtype} cannot hold")
        return PreparedAdapter(prepared)

    def acquire(self, request: LoRARequest, prepared: PreparedAdapter | None = None) -> LoadedAdapter:
        """Returns an adapter for a request, loaded if need be; see `load` and `release`."""
        adapter = self.load(request, prepared)
        adapter.users += 1
        return adapter

    def release(self, adapter: LoadedAdapter) -> None:
        """Ends a request's use of an adapter."""
        adapter.users -= 1
        assert adapter.users >= 0

    def load(self, request: LoRARequest, prepared: PreparedAdapter | None = None) -> LoadedAdapter:
        """Loads an adapter, unless it is loaded; between two steps.

        Args:
            request: names the adapter.
            prepared: what `prepare` returned for it; None: it is read now.

        Raises:
            ValueError: the adapter cannot be read, or does not fit the model; or all slots are in use; or
                another adapter has its id.
        """
        known = self._loaded.pop(request.lora_int_id, None)
        if known is not None:
            self._loaded[request.lora_int_id] = known
            if known.request.lora_path != request.lora_path:
                raise ValueError(
                    f"lora_int_id {request.lora_int_id} is that of {known.request.lora_path}; give "
                    f"{request.lora_path} another id, or unload the first"
                )
            return known
        factors = (prepared or self.prepare(request)).factors
        slot = self._take_slot(request)
        self._grow(request, slot, factors)
        self._share(slot, factors)
        self.slots.clear(slot)
        for name, given in factors.items():
            self.slots.write(slot, name, given)
        loaded = self._loaded[request.lora_int_id] = LoadedAdapter(request, slot, next(self._prefixes))
        return loaded

    def unload(self, lora_int_id: int) -> None:
        """Unloads an adapter.

        Raises:
            ValueError: it is not loaded, or unfinished requests use it.
        """
        adapter = self._loaded.get(lora_int_id)
        if adapter is None:
            raise ValueError(f"no adapter has the id {lora_int_id}")
        if adapter.users:
            raise ValueError(
                f"{adapter.users} unfinished requests use the adapter {adapter.request.lora_name!r}; unload "
                "it when they have ended"
            )
        del self._loaded[lora_int_id]
        self._free.append(adapter.slot)

    def _take_slot(self, request: LoRARequest) -> int:
        if not self._free:
            idle = next((number for number, each in self._loaded.items() if not each.users), None)
            if idle is None:
                raise ValueError(
                    f"all {len(self._loaded)} adapters that fit are in use; raise max_loras to run "
                    f"{request.lora_name!r} beside them"
                )
            self.unload(idle)
        return self._free.pop()

    def _grow(self, request: LoRARequest, slot: int, factors: Factors) -> None:
        """Notes that a slot takes memory for experts; gives it back if there is no room for them."""
        experts = [given for name, given in factors.items() if self._layers[name].kind == "experts"]
        needed = sum(factor.nbytes for given in experts for factor in given)
        if not needed or slot in self._grown:
            return
        if needed > (free := free_memory()):
            self._free.append(slot)
            raise ValueError(
                f"the adapter {request.lora_name!r} ({request.lora_path}) adapts experts, which takes "
                f"{needed / 1e6:.0f} MB; {free / 1e6:.0f} MB are free: lower kv_cache_memory"
            )
        self._grown.add(slot)

    def _refuse_experts_of_ranks(self, request: LoRARequest, adapter: Adapter) -> None:
        """Raises ValueError if an adapter adapts experts that tensor parallel ranks shard."""
        single = {name for name in adapter.factors if expert_layer(name) and name not in self._layers}
        if self.slots.ranks > 1 and (names := sorted(adapter.stacked.keys() | single)):
            raise ValueError(
                f"{_adapts(request, names[0])}: tensor parallel ranks share out experts without adapters; "
                "set tensor_parallel_size=1, or pipeline_parallel_size in place of it"
            )

    def _experts_and_rest(
        self, request: LoRARequest, adapter: Adapter
    ) -> tuple[dict[str, ExpertFactors], dict[str, tuple[Tensor, Tensor]]]:
        """Returns the factors of experts by the names of their layers, and those of other modules.

        Raises:
            ValueError: those of experts do not fit the model.
        """
        rest = dict(adapter.factors)
        single: dict[str, dict[tuple[int, int], tuple[Tensor, Tensor]]] = {}
        for name in adapter.factors.keys() - self._layers.keys():
            place = expert_layer(name)
            if place is not None and getattr(self._layers.get(place[0]), "kind", "") == "experts":
                single.setdefault(place[0], {})[place[1:]] = rest.pop(name)
        found: dict[str, ExpertFactors] = {}
        for name in adapter.stacked.keys() | single.keys():
            layer, where = self._layers.get(name), _adapts(request, name)
            if layer is None or layer.kind != "experts":
                raise ValueError(
                    f"{where}, which has no quantized experts in this model's plan: it is an adapter of "
                    "another model, or one of experts that all see every token, which are not supported"
                )
            try:
                if name in single:
                    found[name] = layer.single(single[name])
                else:
                    found[name] = layer.stacked(name, adapter.stacked[name], adapter)
            except ValueError as error:
                raise ValueError(f"{where} {error}") from error
            if found[name].rank > self._max_rank:
                raise ValueError(
                    f"{where} with rank {found[name].rank}, where gate and up with factors of their own "
                    f"count twice; max_lora_rank is {self._max_rank}: raise it"
                )
        return found, rest

    def _check(
        self, request: LoRARequest, adapter: Adapter, factors: Mapping[str, tuple[Tensor, Tensor]]
    ) -> None:
        """Raises ValueError if factors of an adapter do not fit the model."""
        for name, (a, b) in factors.items():
            layer = self._layers.get(name)
            where = _adapts(request, name)
            if layer is None or layer.kind != ("embedding" if name in adapter.embeddings else "linear"):
                kind = "embedding of tokens" if name in adapter.embeddings else "quantized linear layer"
                raise ValueError(
                    f"{where}, which is no {kind} of this model's plan: it is an adapter of another model, "
                    "or one of expanded latents, routers or other embeddings, which are not supported"
                )
            sizes, own = (a.shape[1], b.shape[1]), (layer.in_features, layer.out_features)
            if sizes != own:
                raise ValueError(
                    f"{where} with {sizes[0]} inputs and {sizes[1]} outputs; this model's layer has {own[0]} "
                    f"and {own[1]}: it is an adapter of another model"
                )
            copy = adapter.copies.get(name)
            if copy is not None and not layer.can_compare:
                raise ValueError(
                    f"{where} and brings a weight for it, which ranks and stages do not compare with the "
                    "model's: save it without (save_embedding_layers=False)"
                )
            if copy is not None and not layer.is_of(copy):
                raise ValueError(
                    f"{where} and brings a weight for it that is not this model's: it is an adapter of "
                    "another model, or of one with other tokens"
                )
            if len(a) > self._max_rank:
                raise ValueError(f"{where} with rank {len(a)}; max_lora_rank is {self._max_rank}: raise it")


def _adapts(request: LoRARequest, name: str) -> str:
    """Returns the beginning of an error about a module of an adapter."""
    return f"the adapter {request.lora_name!r} ({request.lora_path}) adapts {name}"
