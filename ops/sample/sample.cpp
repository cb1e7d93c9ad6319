#include "sample/sample.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "dispatch/variants.h"
#include "runtime/thread_scratch.h"

namespace armllm {
namespace {

constexpr float kGreedyBelow = 1e-5f;  // temperature, as in vLLM
constexpr float kInfinity = std::numeric_limits<float>::infinity();

enum Phase { kPenalize, kWeigh, kDraw };

struct Memory {
  int64_t chunks, padded;
  float *weights, *block_largest, *block_sums;    // per row: padded, padded / 64, padded / 64
  float *chunk_largest, *raw_largest, *raw_sums;  // [rows][chunks]

  Memory(void* scratch, int64_t rows, int64_t vocab_size)
      : chunks(ceil_div(vocab_size, kSampleChunk)), padded(round_up(vocab_size, kSampleBlock)) {
    float* p = static_cast<float*>(scratch);
    weights = p;
    block_largest = weights + rows * padded;
    block_sums = block_largest + rows * (padded / kSampleBlock);
    chunk_largest = block_sums + rows * (padded / kSampleBlock);
    raw_largest = chunk_largest + rows * chunks;
    raw_sums = raw_largest + rows * chunks;
  }
};

bool greedy(const SampleArgs& a, int64_t row) { return a.temperature[row] < kGreedyBelow; }

bool penalized(const SampleArgs& a, int64_t row) {
  return (a.repetition != nullptr && a.repetition[row] != 1.0f) ||
         (a.presence != nullptr && a.presence[row] != 0.0f) ||
         (a.frequency != nullptr && a.frequency[row] != 0.0f);
}

// Applies the penalties to the row's logits first … first + n − 1.  Each token is changed once, even if it
// occurs several times.
void penalize(const SampleArgs& a, int64_t row, int64_t first, int64_t n, float* x) {
  constexpr int32_t kSeen = 1 << 30;  // flag: in the prompt; lower bits: number of occurrences in the output
  int32_t* counts = reinterpret_cast<int32_t*>(thread_memory(kSampleChunk * 4));
  std::fill(counts, counts + n, 0);
  const auto each = [&](const TokenLists& lists, auto visit) {
    for (const int64_t* id = lists.begin(row); id != lists.end(row); ++id)
      if (*id >= first && *id < first + n) visit(*id - first);
  };
  const float repetition = a.repetition == nullptr ? 1.0f : a.repetition[row];
  const float presence = a.presence == nullptr ? 0.0f : a.presence[row];
  const float frequency = a.frequency == nullptr ? 0.0f : a.frequency[row];
  each(a.output, [&](int64_t i) { counts[i] += 1; });
  each(a.prompt, [&](int64_t i) { counts[i] |= kSeen; });
  const auto lower = [&](int64_t i) {
    if (counts[i] == 0) return;
    const int32_t times = counts[i] & (kSeen - 1);
    x[i] = x[i] > 0.0f ? x[i] / repetition : x[i] * repetition;
    x[i] = x[i] - frequency * static_cast<float>(times) - (times > 0 ? presence : 0.0f);
    counts[i] = 0;
  };
  each(a.output, lower);
  each(a.prompt, lower);
}

float largest_of(const float* x, int64_t n) { return *std::max_element(x, x + n); }

}  // namespace

int64_t Sample::scratch_bytes(int64_t rows, int64_t vocab_size) {
  const int64_t padded = round_up(vocab_size, kSampleBlock), chunks = ceil_div(vocab_size, kSampleChunk);
  return rows * (padded + 2 * (padded / kSampleBlock) + 3 * chunks) * 4;
}

int64_t Sample::tiles(int phase) const {
  return phase == kDraw ? args.rows : args.rows * ceil_div(args.vocab_size, kSampleChunk);
}

void Sample::tile(int phase, int64_t index) {
  const SampleArgs& a = args;
  const SampleKernels& kernels = *variant().sample;
  const Memory m(a.scratch, a.rows, a.vocab_size);
  const int64_t row = phase == kDraw ? index : index / m.chunks;
  const int64_t first = phase == kDraw ? 0 : index % m.chunks * kSampleChunk;
  const int64_t n = phase == kDraw ? a.vocab_size : std::min(kSampleChunk, a.vocab_size - first);
  float* x = m.weights + row * m.padded + first;
  const bool changed = penalized(a, row);

  if (phase == kPenalize) {
    const void* raw = a.logits.at(row, first);
    float top = kernels.largest(raw, a.logits.type, n);
    m.raw_largest[index] = top;
    if (changed) {
      kernels.widen(raw, a.logits.type, n, x);
      penalize(a, row, first, n, x);
      top = kernels.largest(x, DType::f32, n);
    }
    m.chunk_largest[index] = top;
    return;
  }

  const float top = largest_of(m.chunk_largest + row * m.chunks, m.chunks);
  const bool first_best = greedy(a, row) || std::isinf(top);
  if (phase == kWeigh) {
    if (a.logprobs != nullptr) {
      const float raw_top = largest_of(m.raw_largest + row * m.chunks, m.chunks);
      m.raw_sums[index] = std::isinf(raw_top) ? 0.0f
                                              : kernels.sum_of_exponentials(a.logits.at(row, first),
                                                                            a.logits.type, n, raw_top);
    }
    if (first_best) return;
    const int64_t block = (row * m.padded + first) / kSampleBlock;
    const void* from = changed ? static_cast<const void*>(x) : a.logits.at(row, first);
    kernels.weigh(from, changed ? DType::f32 : a.logits.type, n, top, 1.0f / a.temperature[row], a.min_p[row],
                  x, m.block_largest + block, m.block_sums + block);
    return;
  }

  int64_t id = -1;
  if (top == -kInfinity) {
    // no token can be chosen: id stays −1
  } else if (first_best) {
    int64_t chunk = 0;
    while (m.chunk_largest[row * m.chunks + chunk] != top) ++chunk;
    const int64_t begin = chunk * kSampleChunk, count = std::min(kSampleChunk, a.vocab_size - begin);
    id = begin + (changed ? kernels.first_at_least(x + begin, DType::f32, count, top)
                          : kernels.first_at_least(a.logits.at(row, begin), a.logits.type, count, top));
  } else {
    const int64_t block = row * m.padded / kSampleBlock;
    const Weights weights{x, m.block_largest + block, m.block_sums + block, a.vocab_size};
    if (a.probabilities != nullptr) {
      probabilities(weights, a.top_k[row], a.top_p[row], a.probabilities + row * a.vocab_size);
      id = 0;
    } else {
      id = draw(weights, a.top_k[row], a.top_p[row], uniform_at(a.seeds[row], a.steps[row]));
    }
  }
  a.ids[row] = id;
  if (a.probabilities != nullptr && first_best && id >= 0) a.probabilities[row * a.vocab_size + id] = 1.0f;
  if (a.logprobs == nullptr) return;
  float chosen = -kInfinity;
  if (id >= 0) kernels.widen(a.logits.at(row, id), a.logits.type, 1, &chosen);
  double sum = 0;
  for (int64_t c = 0; c < m.chunks; ++c) sum += m.raw_sums[row * m.chunks + c];
  const float raw_top = largest_of(m.raw_largest + row * m.chunks, m.chunks);
  a.logprobs[row] = std::isinf(raw_top) ? (chosen == kInfinity ? 0.0f : -kInfinity)
                                        : chosen - raw_top - static_cast<float>(std::log(sum));
}

}  // namespace armllm
