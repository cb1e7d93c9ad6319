// Filters of a row's weights (top-k, top-p), and the draw among the weights that pass.
#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "dispatch/variants.h"
#include "runtime/thread_scratch.h"
#include "sample/sample.h"

namespace armllm {
namespace {

constexpr float kSmallest = std::numeric_limits<float>::min();  // weights below it are never drawn

bool before(const Candidate& a, const Candidate& b) {
  return a.weight != b.weight ? a.weight > b.weight : a.id < b.id;
}

// Candidates of a row, in the order of the vocabulary, in the thread's scratch memory.
struct Candidates {
  Candidate* data;
  int64_t count;

  double mass() const {
    double sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += data[i].weight;
    return sum;
  }

  template <typename Keep>
  void keep(Keep passes) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
      const Candidate c = data[i];
      data[kept] = c;
      kept += passes(c) ? 1 : 0;
    }
    count = kept;
  }
};

Candidates at_least(const Weights& w, float bound) {
  Candidate* out =
      reinterpret_cast<Candidate*>(thread_memory(round_up(w.count, kSampleBlock) * sizeof(Candidate)));
  return {out,
          variant().sample->gather(w.values, w.block_largest, w.blocks(), std::max(bound, kSmallest), out)};
}

// An upper bound of the sum of all weights below `bound`.  If a block's largest weight reaches `bound`, only
// the other weights of the block count.
double most_below(const Weights& w, float bound) {
  double sum = 0;
  for (int64_t b = 0; b < w.blocks(); ++b) {
    const float others = std::min(w.block_sums[b] - w.block_largest[b], bound * (kSampleBlock - 1));
    sum += w.block_largest[b] < bound ? w.block_sums[b] : others;
  }
  return sum;
}

// A lower bound of the weights that top-p needs: the weights below it sum to less than `spare`, the mass that
// may be left out.
float needed_for(const Weights& w, double spare) {
  float bound = static_cast<float>(spare / static_cast<double>(w.count));
  while (2 * bound <= 1.0f && most_below(w, 2 * bound) < spare) bound *= 2;
  return bound;
}

// Keeps the k largest weights, and weights equal to the k-th.
void keep_best(Candidates& candidates, int64_t k) {
  if (k >= candidates.count) return;
  std::vector<float> values;
  values.reserve(candidates.count);
  for (int64_t i = 0; i < candidates.count; ++i) values.push_back(candidates.data[i].weight);
  std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<float>());
  candidates.keep([bound = values[k - 1]](const Candidate& c) { return c.weight >= bound; });
}

// Number of the bucket of weights of nearly the same size.  Positive floats have the same order as their
// bits.
int32_t size_of(const Candidate& c) {
  int32_t bits;
  std::memcpy(&bits, &c.weight, sizeof bits);
  return bits >> 18;
}
constexpr int32_t kSizes = 0x3f800000 / (1 << 18) + 1;  // buckets for weights up to 1

// Keeps the fewest of the largest weights whose sum reaches `wanted`.  The sums of the buckets show in which
// bucket the sum is reached, and only that bucket is sorted.
void keep_mass(Candidates& candidates, double wanted) {
  double by_size[kSizes] = {};
  for (int64_t i = 0; i < candidates.count; ++i)
    by_size[size_of(candidates.data[i])] += candidates.data[i].weight;
  double ahead = 0;
  int32_t size = kSizes - 1;
  for (; size > 0; --size) {
    if (by_size[size] > 0 && ahead + by_size[size] >= wanted) break;
    ahead += by_size[size];
  }
  std::vector<Candidate> border;
  for (int64_t i = 0; i < candidates.count; ++i)
    if (size_of(candidates.data[i]) == size) border.push_back(candidates.data[i]);
  if (border.empty()) return;  // all are needed
  std::sort(border.begin(), border.end(), before);
  size_t last = 0;
  for (ahead += border[0].weight; last + 1 < border.size() && ahead < wanted; ahead += border[last].weight)
    ++last;
  candidates.keep([size, end = border[last]](const Candidate& c) {
    return size_of(c) != size ? size_of(c) > size : !before(end, c);
  });
}

int64_t draw_among(const Candidates& candidates, double at) {
  double left = candidates.mass() * at;
  for (int64_t i = 0; i < candidates.count; ++i) {
    if (left < candidates.data[i].weight) return candidates.data[i].id;
    left -= candidates.data[i].weight;
  }
  return candidates.data[candidates.count - 1].id;  // rounding
}

double mass_of(const Weights& w) {
  double total = 0;
  for (int64_t b = 0; b < w.blocks(); ++b) total += w.block_sums[b];
  return total;
}

bool filters(const Weights& w, int64_t top_k, float top_p) {
  return (top_k > 0 && top_k < w.count) || top_p < 1.0f;
}

// The candidates that pass the filters; needs at least one active filter.
Candidates passing(const Weights& w, int64_t top_k, float top_p) {
  if (top_k > 0 && top_k < w.count) {
    Candidates found = at_least(w, reached_by(w, top_k));
    keep_best(found, top_k);
    if (top_p < 1.0f) keep_mass(found, double(top_p) * found.mass());
    return found;
  }
  const double total = mass_of(w), wanted = double(top_p) * total;
  Candidates found = at_least(w, needed_for(w, total - wanted));
  keep_mass(found, wanted);
  return found;
}

int64_t draw_from_all(const Weights& w, double at) {
  double left = mass_of(w) * at;
  int64_t last = 0;
  for (int64_t b = 0; b < w.blocks(); ++b) {
    if (w.block_sums[b] == 0.0f) continue;
    if (left >= w.block_sums[b]) {
      left -= w.block_sums[b];
      last = b;
      continue;
    }
    last = b;
    break;
  }
  const int64_t end = std::min(w.count, (last + 1) * kSampleBlock);
  int64_t id = 0;
  for (int64_t i = last * kSampleBlock; i < end; ++i) {
    if (w.values[i] == 0.0f) continue;
    id = i;
    if (left < w.values[i]) break;
    left -= w.values[i];
  }
  return id;
}

}  // namespace

float reached_by(const Weights& w, int64_t count) {
  if (count >= w.blocks()) return 0.0f;
  std::vector<float> tops(w.block_largest, w.block_largest + w.blocks());
  std::nth_element(tops.begin(), tops.begin() + (count - 1), tops.end(), std::greater<float>());
  return tops[count - 1];
}

int64_t draw(const Weights& weights, int64_t top_k, float top_p, double at) {
  return filters(weights, top_k, top_p) ? draw_among(passing(weights, top_k, top_p), at)
                                        : draw_from_all(weights, at);
}

void probabilities(const Weights& weights, int64_t top_k, float top_p, float* out) {
  const Candidates found =
      filters(weights, top_k, top_p) ? passing(weights, top_k, top_p) : at_least(weights, kSmallest);
  const double mass = found.mass();
  for (int64_t i = 0; i < found.count; ++i)
    out[found.data[i].id] = static_cast<float>(found.data[i].weight / mass);
}

double uniform_at(int64_t seed, int64_t step) {
  constexpr int kRounds = 10;
  uint32_t counter[4] = {static_cast<uint32_t>(step), static_cast<uint32_t>(uint64_t(step) >> 32), 0, 0};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(uint64_t(seed) >> 32)};
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t a = uint64_t(0xd2511f53u) * counter[0], b = uint64_t(0xcd9e8d57u) * counter[2];
    const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
                              static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    for (int i = 0; i < 4; ++i) counter[i] = next[i];
    key[0] += 0x9e3779b9u;
    key[1] += 0xbb67ae85u;
  }
  const uint64_t word = uint64_t(counter[0]) << 32 | counter[1];
  return static_cast<double>(word >> 11) * 0x1p-53;
}

}  // namespace armllm
