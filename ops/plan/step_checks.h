// Checks of a step's inputs, whose sizes a plan cannot know when it is created.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

#include "attention/paged_attention.h"
#include "recurrent/recurrent.h"
#include "runtime/types.h"

namespace armllm {

using torch::stable::Tensor;

// Rows of tokens in an input.
struct RowsNeed {
  int64_t input = 0;
  int64_t first = 0, more = 0;  // elements up to the end of the first row, and of each further one
};

// The caches that an instruction reads or writes, and the rows beside them.  Rooms are the most elements that
// a row can hold.
struct CacheNeed {
  bool latent = false;
  bool or_int8 = false;                                           // latents in int8 fit too
  int64_t k = 0, v = 0, layer = 0, k_scales = -1, v_scales = -1;  // inputs; a latent cache is k
  int64_t head_size = 0;                                          // of a latent cache: rank + rope size
  int64_t q_heads = 0;                                            // 0: kv_write
  HeadGroups groups;
  int64_t k_room = 0, v_room = 0;                          // v_room: of an attention's result
  int64_t slots = -1;                                      // input, of kv_write
  int64_t block_table = 0, query_start = 0, seq_lens = 0;  // inputs, of attention
  int64_t window = 0;
  int64_t span = 0, choosers = 0;  // of block attention: multiple of the block size, divisor of the kv heads
  int64_t rate = 0;                // positions of an entry, if k is a cache of entries
  int64_t block_size = 0;          // of a cache of entries

  // True if the two differ in nothing but layers and rooms.
  bool alike(const CacheNeed& o) const {
    return latent == o.latent && or_int8 == o.or_int8 && k == o.k && v == o.v && k_scales == o.k_scales &&
           v_scales == o.v_scales && head_size == o.head_size && q_heads == o.q_heads && groups == o.groups &&
           slots == o.slots && block_table == o.block_table && query_start == o.query_start &&
           seq_lens == o.seq_lens && window == o.window && span == o.span && choosers == o.choosers &&
           rate == o.rate && block_size == o.block_size;
  }
};

// The states that an instruction reads and writes.
struct StateNeed {
  int64_t state = 0, layer = 0;                                            // input (layers, slots, sizes …)
  int64_t state_slots = 0, save_slots = 0, query_start = 0, seq_lens = 0;  // inputs
  DType type = DType::f32;
  bool or_bf16 = false;        // bfloat16 states fit too
  std::vector<int64_t> sizes;  // of one state

  // True if the two differ in nothing but the layer.
  bool alike(const StateNeed& o) const {
    return state == o.state && state_slots == o.state_slots && save_slots == o.save_slots &&
           query_start == o.query_start && seq_lens == o.seq_lens && type == o.type && or_bf16 == o.or_bf16 &&
           sizes == o.sizes;
  }
};

// Layers of one cache share an entry, so a step has few to check.
struct StepNeeds {
  std::vector<RowsNeed> rows;
  std::vector<CacheNeed> caches;
  std::vector<StateNeed> states;
  void add(const RowsNeed& need);
  void add(const CacheNeed& need);
  void add(const StateNeed& need);
};

// The numbers among a step's inputs that become addresses.
struct StepValues {
  struct Slots {
    const int64_t* slots;
    int64_t tokens, room;
    bool operator==(const Slots& s) const { return slots == s.slots && tokens == s.tokens && room == s.room; }
  };
  struct Sequences {
    AttentionArgs args;
    int64_t blocks;
  };
  struct States {
    StateSlots steps;
    int64_t tokens, slots;
    bool operator==(const States& s) const {
      return steps.slots == s.steps.slots && steps.query_start == s.steps.query_start &&
             steps.seq_lens == s.steps.seq_lens && steps.saves == s.steps.saves && tokens == s.tokens &&
             slots == s.slots;
    }
  };
  std::vector<Slots> slots;
  std::vector<Sequences> sequences;
  std::vector<States> states;
};

// Throws if an input is too small.
void check_inputs(const StepNeeds& needs, const std::vector<Tensor>& inputs, int64_t tokens);

// Throws if a cache does not fit its instructions, or a slot, block or length lies outside of it.  Returns
// the values for later steps on the same memory.
StepValues check_step(const StepNeeds& needs, const std::vector<Tensor>& inputs, int64_t tokens);

// True if the values, which may have changed, are still in range.
bool are_valid(const StepValues& values);

}  // namespace armllm
