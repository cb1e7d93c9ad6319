// Layers of the caches among a step's inputs.
#pragma once

#include "attention/check_args.h"
#include "plan/plan.h"

namespace armllm {

// Address of a layer of latents, or of an indexer's keys.
inline char* layer_of(const Tensor& all, int64_t layer) {
  return static_cast<char*>(all.data_ptr()) + layer * all.stride(0) * size_of(latent_type_of(all));
}

// The keys and values of all layers are two tensors (layers, blocks, kv heads, …); an int8 cache has two more
// for its scales.  A layer's caches are slices of them.
struct LayerCache {
  int64_t k, v, layer, k_scales, v_scales;  // indices of inputs, and the layer's index; −1: no scales

  template <class Fields>
  explicit LayerCache(const Fields& op)
      : k(op.k_cache), v(op.v_cache), layer(op.layer), k_scales(op.k_scales), v_scales(op.v_scales) {}

  static char* slice(const Tensor& all, int64_t layer, int64_t size) {
    return static_cast<char*>(all.data_ptr()) + layer * all.stride(0) * size;
  }
  template <class Args>
  void bind(const Frame& frame, Args& a) const {
    const Tensor &keys = frame.input(k), &values = frame.input(v);
    a.cache_type = cache_type_of(keys);
    a.nibbles = has_nibbles(keys);
    a.k_cache = slice(keys, layer, size_of(a.cache_type));
    a.v_cache = slice(values, layer, size_of(a.cache_type));
    if (k_scales >= 0) {
      a.k_scales = reinterpret_cast<float*>(slice(frame.input(k_scales), layer, sizeof(float)));
      a.v_scales = reinterpret_cast<float*>(slice(frame.input(v_scales), layer, sizeof(float)));
    }
    a.kv_heads = keys.size(2);
    a.block_size = keys.size(4);
    a.value_size = a.nibbles ? values.size(3) * kNibbleGroup : values.size(4);
  }
};

}  // namespace armllm
