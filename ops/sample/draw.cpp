// From a row's weights to a token: which weights pass the filters, and the draw among them.
#include <algorithm>
#include <functional>
#include <vector>

#include "sample/sample.h"

namespace armllm {
namespace {

struct Candidate {
  float weight;
  int64_t id;
};

bool before(const Candidate& a, const Candidate& b) {
  return a.weight != b.weight ? a.weight > b.weight : a.id < b.id;
}

// All weights of at least `bound`, and never a zero, in the order of the vocabulary.
std::vector<Candidate> at_least(const Weights& w, float bound) {
  std::vector<Candidate> found;
  for (int64_t b = 0; b < w.blocks(); ++b) {
    if (!(w.block_largest[b] >= bound) || w.block_largest[b] == 0.0f) continue;
    const int64_t end = std::min(w.count, (b + 1) * kSampleBlock);
    for (int64_t i = b * kSampleBlock; i < end; ++i)
      if (w.values[i] >= bound && w.values[i] > 0.0f) found.push_back({w.values[i], i});
  }
  return found;
}

// A bound that at least `count` weights reach, if there are so many that are not zero: the count-th largest of the
// blocks' largest.  0 where there are fewer blocks.
float reached_by(const Weights& w, int64_t count) {
  if (count >= w.blocks()) return 0.0f;
  std::vector<float> tops(w.block_largest, w.block_largest + w.blocks());
  std::nth_element(tops.begin(), tops.begin() + (count - 1), tops.end(), std::greater<float>());
  return tops[count - 1];
}

double mass_of(const std::vector<Candidate>& candidates) {
  double sum = 0;
  for (const Candidate& c : candidates) sum += c.weight;
  return sum;
}

// Keeps the k best, and those that are as good as the last of them.
void keep_best(std::vector<Candidate>& candidates, int64_t k) {
  if (k >= static_cast<int64_t>(candidates.size())) return;
  std::vector<float> values;
  values.reserve(candidates.size());
  for (const Candidate& c : candidates) values.push_back(c.weight);
  std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<float>());
  const float bound = values[k - 1];
  candidates.erase(std::remove_if(candidates.begin(), candidates.end(),
                                  [bound](const Candidate& c) { return c.weight < bound; }),
                   candidates.end());
}

// Keeps the fewest of the best whose mass reaches `wanted`, by halving: what lies ahead of the pivot either is
// enough, or all of it stays and its mass counts.
void keep_mass(std::vector<Candidate>& candidates, double wanted) {
  size_t begin = 0, end = candidates.size();
  while (end - begin > 32) {
    const size_t middle = begin + (end - begin) / 2;
    std::nth_element(candidates.begin() + begin, candidates.begin() + middle, candidates.begin() + end,
                     before);
    double ahead = 0;
    for (size_t i = begin; i < middle; ++i) ahead += candidates[i].weight;
    if (ahead < wanted) {
      wanted -= ahead;
      begin = middle;
    } else {
      end = middle;
    }
  }
  std::sort(candidates.begin() + begin, candidates.begin() + end, before);
  size_t kept = begin;
  for (double ahead = 0; kept < end && (kept == 0 || ahead < wanted); ++kept)
    ahead += candidates[kept].weight;
  candidates.resize(std::max<size_t>(kept, 1));
}

int64_t draw_among(std::vector<Candidate>& candidates, double at) {
  std::sort(candidates.begin(), candidates.end(),
            [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
  double left = mass_of(candidates) * at;
  for (const Candidate& c : candidates) {
    if (left < c.weight) return c.id;
    left -= c.weight;
  }
  return candidates.back().id;  // rounding
}

int64_t draw_from_all(const Weights& w, double at) {
  double total = 0;
  for (int64_t b = 0; b < w.blocks(); ++b) total += w.block_sums[b];
  double left = total * at;
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

int64_t draw(const Weights& weights, int64_t top_k, float top_p, double at) {
  const bool by_count = top_k > 0 && top_k < weights.count, by_mass = top_p < 1.0f;
  if (!by_count && !by_mass) return draw_from_all(weights, at);
  std::vector<Candidate> candidates;
  if (by_count) {
    candidates = at_least(weights, reached_by(weights, top_k));
    keep_best(candidates, top_k);
    if (by_mass) keep_mass(candidates, double(top_p) * mass_of(candidates));
    return draw_among(candidates, at);
  }
  double total = 0;
  for (int64_t b = 0; b < weights.blocks(); ++b) total += weights.block_sums[b];
  const double wanted = double(top_p) * total;
  // Most distributions have their mass in few tokens, flatter ones in a tenth; the flattest are taken as a whole.
  constexpr int64_t kFew = 256;
  for (const int64_t count : {kFew, weights.blocks() / 2, weights.blocks() * 15 / 16, weights.blocks()}) {
    if (count < kFew) continue;
    candidates = at_least(weights, reached_by(weights, count));
    if (mass_of(candidates) >= wanted) break;
  }
  keep_mass(candidates, wanted);
  return draw_among(candidates, at);
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
