#include "compress/compress.h"

#include <algorithm>
#include <cstring>

#include "dispatch/variants.h"
#include "runtime/thread_scratch.h"

namespace armllm {
namespace {

// The rows of a sequence, those of its new tokens and those that its state keeps.
struct Sequence {
  const CompressArgs& a;
  int64_t number, begin, end;  // positions of the new tokens

  Sequence(const CompressArgs& args, int64_t sequence)
      : a(args),
        number(sequence),
        begin(args.steps.seq_lens[sequence] - args.steps.tokens(sequence)),
        end(args.steps.seq_lens[sequence]) {}

  int64_t row_bytes() const { return a.width() * size_of(a.kv.type); }
  // The row of a position in a slot: kv, then the gates.
  char* kept(int64_t slot, int64_t position) const {
    const int64_t rows = a.span() - 1;
    return a.state + (slot * rows + position % rows) * 2 * row_bytes();
  }
  const char* kv(int64_t position) const {
    if (position >= begin) return a.kv.row(a.steps.first(number) + position - begin);
    return kept(a.steps.slots[number], position);
  }
  const char* gate(int64_t position) const {
    if (position >= begin) return a.gate.row(a.steps.first(number) + position - begin);
    return kept(a.steps.slots[number], position) + row_bytes();
  }

  // Writes the state after `last` tokens to a slot.
  void save(int64_t last, int64_t slot) const {
    const bool own = slot == a.steps.slots[number];  // it has the rows before the new tokens already
    for (int64_t p = std::max(last - a.span() + 1, own ? begin : int64_t{0}); p < last; ++p) {
      char* to = kept(slot, p);
      std::memcpy(to, kv(p), row_bytes());
      std::memcpy(to + row_bytes(), gate(p), row_bytes());
    }
  }
};

// Writes the entry that a token completes, if it does.
void complete(const CompressArgs& a, int64_t token) {
  const int32_t* starts = a.steps.query_start;
  const int64_t number = std::upper_bound(starts, starts + a.steps.sequences + 1, token) - starts - 1;
  const Sequence sequence(a, number);
  const int64_t position = sequence.begin + token - starts[number];
  if ((position + 1) % a.rate() != 0) return;
  const int64_t entry = position / a.rate(), first = std::max<int64_t>(position - a.span() + 1, 0);
  CompressPart part;
  part.rows = position - first + 1;
  char* next = thread_memory(a.size * static_cast<int64_t>(sizeof(float)) +
                             3 * part.rows * static_cast<int64_t>(sizeof(void*)));
  const char** kv = reinterpret_cast<const char**>(next);
  const char** gate = kv + part.rows;
  const float** bias = reinterpret_cast<const float**>(gate + part.rows);
  part.pooled = reinterpret_cast<float*>(bias + part.rows);
  for (int64_t i = 0; i < part.rows; ++i) {
    const int64_t p = first + i;
    const int64_t column = a.parts == 2 && p / a.rate() == entry ? a.size : 0;
    kv[i] = sequence.kv(p) + column * size_of(a.kv.type);
    gate[i] = sequence.gate(p) + column * size_of(a.kv.type);
    bias[i] = a.bias + p % a.rate() * a.width() + column;
  }
  part.kv = kv, part.gate = gate, part.bias = bias;
  part.weight = a.weight;
  part.cos = a.cos.row(token), part.sin = a.sin.row(token);
  part.cos_type = a.cos.type, part.sin_type = a.sin.type;
  part.out = a.entries + a.places.row(a.block_table + number * a.block_table_stride, entry) * a.size *
                             size_of(a.entry_type);
  part.out_type = a.entry_type;
  part.type = a.kv.type;
  part.size = a.size, part.pairs = a.pairs;
  part.eps = a.eps;
  variant().compress->compress(part);
}

void update_states(const CompressArgs& a, int64_t number) {
  const int64_t tokens = a.steps.tokens(number), first = a.steps.first(number);
  if (tokens == 0 || a.span() == 1) return;
  const Sequence sequence(a, number);
  for (int64_t token = 0; a.steps.saves && token < tokens; ++token) {
    const int64_t slot = a.steps.saves[first + token];
    if (slot >= 0) sequence.save(sequence.begin + token + 1, slot);
  }
  sequence.save(sequence.end, a.steps.slots[number]);
}

}  // namespace

int64_t CompressWindows::tiles(int phase) const { return phase == 0 ? args.tokens : args.steps.sequences; }

void CompressWindows::tile(int phase, int64_t index) {
  if (phase == 0) return complete(args, index);
  update_states(args, index);
}

}  // namespace armllm
