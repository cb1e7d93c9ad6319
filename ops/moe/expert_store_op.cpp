// The open expert stores, and the ops that open and use them.
#include <unistd.h>

#include <shared_mutex>
#include <unordered_map>

#include "moe/expert_store.h"
#include "runtime/tensor_args.h"

namespace armllm {

std::atomic<int64_t> open_expert_stores{0};

namespace {

// A store that keeps the memory of its weights.
struct OpenStore {
  std::vector<Tensor> weights;
  ExpertStore store;
};

struct Place {
  std::shared_ptr<OpenStore> opened;
  int64_t layer;
};

std::shared_mutex stores_mutex;
std::unordered_map<int64_t, std::shared_ptr<OpenStore>>& stores() {
  static auto* all = new std::unordered_map<int64_t, std::shared_ptr<OpenStore>>();
  return *all;
}
std::unordered_map<const void*, Place>& places() {  // by the address of gate_up
  static auto* all = new std::unordered_map<const void*, Place>();
  return *all;
}

StoredExperts stored(const Tensor& weight, int64_t file, int64_t offset, int64_t files) {
  STD_TORCH_CHECK(type_of(weight) == ScalarType::Byte && weight.dim() == 3 && weight.is_cpu() &&
                      weight.stride(2) == 1 && weight.stride(1) == weight.size(2),
                  "experts_open: weights must be uint8 of shape (experts, panels, panel bytes), each expert "
                  "contiguous");
  STD_TORCH_CHECK(file >= 0 && file < files && offset >= 0, "experts_open: there is no byte ", offset,
                  " of file ", file);
  StoredExperts experts;
  experts.address = static_cast<char*>(weight.data_ptr());
  experts.stride = weight.stride(0);
  experts.bytes = weight.size(1) * weight.size(2);
  experts.file = file;
  experts.offset = offset;
  const int64_t page = sysconf(_SC_PAGESIZE);
  STD_TORCH_CHECK(reinterpret_cast<intptr_t>(experts.address) % page == 0 && experts.stride % page == 0 &&
                      experts.stride >= experts.bytes && experts.bytes > 0,
                  "experts_open: each expert must begin on a page");
  return experts;
}

int64_t experts_open(int64_t budget, std::vector<std::string> files, std::vector<Tensor> weights,
                     std::vector<int64_t> positions) {
  static int64_t next = 1;
  STD_TORCH_CHECK(!weights.empty() && weights.size() % 2 == 0 && positions.size() == 2 * weights.size(),
                  "experts_open: it needs gate_up and down of every layer, and a file and an offset of each");
  std::vector<StoredLayer> layers;
  for (size_t i = 0; i < weights.size(); i += 2) {
    const auto part = [&](size_t w) {
      return stored(weights[w], positions[2 * w], positions[2 * w + 1], int64_t(files.size()));
    };
    StoredLayer layer{part(i), part(i + 1), weights[i].size(0)};
    STD_TORCH_CHECK(weights[i + 1].size(0) == layer.experts,
                    "experts_open: gate_up and down must hold the same number of experts");
    STD_TORCH_CHECK(layer.experts * layer.bytes() <= budget, "experts_open: a layer's experts take ",
                    layer.experts * layer.bytes(), " bytes; the budget has ", budget);
    layers.push_back(layer);
  }
  std::shared_ptr<OpenStore> opened(
      new OpenStore{std::move(weights), {budget, std::move(files), std::move(layers)}});
  const std::unique_lock lock(stores_mutex);
  for (size_t layer = 0; layer < opened->store.layers().size(); ++layer)
    places()[opened->store.layers()[layer].gate_up.address] = {opened, int64_t(layer)};
  stores()[next] = std::move(opened);
  open_expert_stores.store(int64_t(stores().size()), std::memory_order_relaxed);
  return next++;
}

std::shared_ptr<OpenStore> store_of(int64_t handle) {
  const std::shared_lock lock(stores_mutex);
  const auto entry = stores().find(handle);
  STD_TORCH_CHECK(entry != stores().end(), "there is no expert store with handle ", handle);
  return entry->second;
}

void experts_require(int64_t handle, int64_t layer, std::vector<int64_t> experts) {
  const std::shared_ptr<OpenStore> opened = store_of(handle);
  const std::vector<StoredLayer>& layers = opened->store.layers();
  STD_TORCH_CHECK(layer >= 0 && layer < int64_t(layers.size()), "there is no layer ", layer);
  for (const int64_t expert : experts)
    STD_TORCH_CHECK(expert >= 0 && expert < layers[layer].experts, "there is no expert ", expert);
  opened->store.require(layer, experts);
}

std::vector<int64_t> experts_counts(int64_t handle) {
  const ExpertStore::Counts c = store_of(handle)->store.counts();
  return {c.hits, c.misses, c.bytes_read, c.waited, c.resident, c.budget};
}

std::vector<int64_t> experts_resident(int64_t handle) { return store_of(handle)->store.resident(); }

void experts_close(int64_t handle) {
  std::shared_ptr<OpenStore> opened;  // ends its threads after the lock is released
  const std::unique_lock lock(stores_mutex);
  const auto entry = stores().find(handle);
  if (entry == stores().end()) return;
  opened = std::move(entry->second);
  stores().erase(entry);
  for (auto place = places().begin(); place != places().end();)
    place = place->second.opened == opened ? places().erase(place) : std::next(place);
  open_expert_stores.store(int64_t(stores().size()), std::memory_order_relaxed);
}

}  // namespace

void require_stored(const void* gate_up, const std::vector<int64_t>& experts) {
  std::shared_ptr<OpenStore> opened;
  int64_t layer = 0;
  {
    const std::shared_lock lock(stores_mutex);
    const auto place = places().find(gate_up);
    if (place == places().end()) return;
    opened = place->second.opened;
    layer = place->second.layer;
  }
  opened->store.require(layer, experts);
}

}  // namespace armllm

// Closes a store without the dispatcher: a model may be collected while a graph is traced, which would record
// the op.
extern "C" __attribute__((visibility("default"))) void armllm_experts_close(int64_t handle) noexcept {
  try {
    armllm::experts_close(handle);
  } catch (...) {  // no memory for a lock
  }
}

STABLE_TORCH_LIBRARY_IMPL(armllm, CompositeExplicitAutograd, m) {
  m.impl("experts_open", TORCH_BOX(&armllm::experts_open));
  m.impl("experts_require", TORCH_BOX(&armllm::experts_require));
  m.impl("experts_counts", TORCH_BOX(&armllm::experts_counts));
  m.impl("experts_resident", TORCH_BOX(&armllm::experts_resident));
}
