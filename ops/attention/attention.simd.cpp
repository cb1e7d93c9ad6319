// One split of keys against a tile of query rows, the merge of splits, and the cache's layout on writing.
#include "attention/attention.h"

#include "attention/product.h"
#include "common/math.h"
#include "common/simd.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

constexpr int64_t kTile = 8 * kTileRows;  // query rows: enough to pay for converting keys and values once
constexpr int64_t kPanelRows =
    3 * kTileRows;  // from so many rows on, converting once beats converting in registers

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t clamp(int64_t x, int64_t low, int64_t high) { return smaller(larger(x, low), high); }

// Positions [begin, end) of the split that any of some rows sees, counted from the split's first.
struct Span {
  int64_t begin, end;
};

Span visible(const AttentionTile& t, int64_t row, int64_t rows) {
  Span span{kSplit, 0};
  for (int64_t r = row; r < row + rows; ++r) {
    const int64_t begin = larger(t.first[r] - t.split_begin, 0),
                  end = smaller(t.last[r] - t.split_begin, kSplit);
    if (begin >= end) continue;
    span.begin = smaller(span.begin, begin);
    span.end = larger(span.end, end);
  }
  return span;
}

template <typename T>
struct Cache {
  const AttentionArgs& args;
  const AttentionTile& tile;

  int64_t head_of(int64_t position) const {
    return tile.blocks[(tile.split_begin + position) / args.block_size] * args.kv_heads + tile.kv_head;
  }
  // Sixteen keys from `position` on, dimension 0; the next dimension is block_size further.
  const T* keys(int64_t position) const {
    return static_cast<const T*>(args.k_cache) + head_of(position) * args.head_size * args.block_size +
           position % args.block_size;
  }
  const T* value(int64_t position) const {
    return static_cast<const T*>(args.v_cache) +
           (head_of(position) * args.block_size + position % args.block_size) * args.value_size;
  }
};

template <typename B>
void score_groups(const AttentionArgs& args, const AttentionTile& t, int64_t chunk, const B& keys) {
  for (int64_t row = 0; row < t.rows; row += kTileRows) {
    const int64_t rows = smaller(kTileRows, t.rows - row);
    const Span span = visible(t, row, rows);
    if (span.end <= chunk || span.begin >= chunk + kChunk) continue;
    product(rows, t.q + row * args.head_size, args.head_size, keys, kChunk / kLanes, args.head_size,
            t.scores + row * kScoreStride + chunk, kScoreStride, false);
  }
}

// scores = Q · Kᵀ
template <typename T>
void score(const AttentionArgs& args, const AttentionTile& t, Span all) {
  const Cache<T> cache{args, t};
  // Vectors that nobody sees may lie in blocks that are not there: their place is taken by one that is.
  const int64_t low = all.begin / kLanes * kLanes, high = (all.end - 1) / kLanes * kLanes;
  for (int64_t chunk = all.begin / kChunk * kChunk; chunk < all.end; chunk += kChunk) {
    Scattered<T> keys;
    const bool values_next = chunk + kChunk >= all.end;
    keys.stride = args.block_size;
    keys.ahead_stride = values_next ? ceil_div(kLanes * args.value_size, args.head_size) : args.block_size;
    for (int v = 0; v < kChunk / kLanes; ++v) {
      const int64_t next = clamp(values_next ? low + v * kLanes : chunk + kChunk + v * kLanes, low, high);
      keys.data[v] = cache.keys(clamp(chunk + v * kLanes, low, high));
      keys.ahead[v] = values_next ? cache.value(next) : cache.keys(next);
    }
    if (t.rows < kPanelRows) {
      score_groups(args, t, chunk, keys);
      continue;
    }
    for (int64_t d = 0; d < args.head_size; ++d)
      for (int v = 0; v < kChunk / kLanes; ++v) store(t.panel + d * kChunk + v * kLanes, load(keys.at(d, v)));
    score_groups(args, t, chunk, Panel{t.panel});
  }
}

// Lanes of the vector at `position` that are in the span keep x, the others get y.
F32 inside(Span span, int64_t position, F32 x, F32 y) {
  x = select_first(static_cast<int>(smaller(span.end - position, kLanes)), x, y);
  return select_first(static_cast<int>(larger(span.begin - position, 0)), y, x);
}

// ends(i) for the first and last vector of the span, of which it may cover a part, whole(i) for those between.
template <typename Ends, typename Whole>
void each_vector(Span span, Ends ends, Whole whole) {
  if (span.begin >= span.end) return;
  const int64_t first = span.begin / kLanes * kLanes, last = (span.end - 1) / kLanes * kLanes;
  ends(first);
  for (int64_t i = first + kLanes; i < last; i += kLanes) whole(i);
  if (last > first) ends(last);
}

// scores → exp(score − maximum), with zeros wherever the row's group sees a key that the row does not.
void soften(const AttentionArgs& args, const AttentionTile& t, int64_t row, Span group) {
  float* s = t.scores + row * kScoreStride;
  const Span span = visible(t, row, 1);
  const int64_t begin = span.begin / kLanes * kLanes;
  if (args.softcap > 0.0f) {
    const F32 cap = set1(args.softcap);
    for (int64_t i = begin; i < span.end; i += kLanes) store(s + i, cap * tanh(load(s + i) / cap));
  }
  const F32 nothing = set1(kNothing);
  F32 highest = nothing, sum = zero();
  each_vector(
      span, [&](int64_t i) { highest = max(highest, inside(span, i, load(s + i), nothing)); },
      [&](int64_t i) { highest = max(highest, load(s + i)); });
  const float top = reduce_max(highest);
  const float maximum = top > kNothing ? top : kNothing;
  const auto weigh = [&](int64_t i) { return exp_weight(load(s + i) - set1(maximum)); };
  const auto keep = [&](int64_t i, F32 p) {
    store(s + i, p);
    sum = sum + p;
  };
  each_vector(
      span, [&](int64_t i) { keep(i, inside(span, i, weigh(i), zero())); },
      [&](int64_t i) { keep(i, weigh(i)); });
  const int64_t end = span.end > span.begin ? round_up(span.end, kLanes) : begin;
  for (int64_t i = group.begin / kLanes * kLanes; i < smaller(begin, group.end); i += kLanes)
    store(s + i, zero());
  for (int64_t i = larger(end, group.begin / kLanes * kLanes); i < group.end; i += kLanes)
    store(s + i, zero());
  t.maximum[row] = maximum;
  t.sum[row] = reduce_add(sum);
}

template <typename T>
void widen_values(const Cache<T>& cache, int64_t begin, int64_t end, int64_t column, int width,
                  float* panel) {
  for (int64_t i = begin; i < end; ++i) {
    const T* from = cache.value(i) + column;
    float* to = panel + (i - begin) * kChunk;
    int v = 0;
    for (; v + kLanes <= width; v += kLanes) store(to + v, load(from + v));
    if (v < width) store(to + v, load_partial(from + v, width - v));
  }
}

// values += P · V for keys [begin, end) and up to 64 value dimensions from `column` on
template <typename B>
void weigh_group(const AttentionArgs& args, const AttentionTile& t, int64_t row, int64_t begin, int64_t end,
                 int64_t column, int vectors, const B& values) {
  const int64_t stride = value_stride(args.value_size);
  product(smaller(kTileRows, t.rows - row), t.scores + row * kScoreStride + begin, kScoreStride, values,
          vectors, end - begin, t.values + row * stride + column, stride, true);
}

// One chunk of keys and up to 64 value dimensions.
template <typename T>
void weigh_chunk(const AttentionArgs& args, const AttentionTile& t, Span keys, Span all, int64_t column) {
  const Cache<T> cache{args, t};
  const int width = static_cast<int>(smaller(kChunk, args.value_size - column));
  const int vectors = static_cast<int>(ceil_div(width, kLanes));
  const bool widen = t.rows >= kPanelRows || width % kLanes != 0;
  if (widen) widen_values(cache, keys.begin, keys.end, column, width, t.panel);
  for (int64_t row = 0; row < t.rows; row += kTileRows) {
    const Span span = visible(t, row, smaller(kTileRows, t.rows - row));
    const int64_t end = smaller(keys.end, span.end);
    int64_t begin = larger(keys.begin, span.begin);
    if (widen && begin < end)
      weigh_group(args, t, row, begin, end, column, vectors, Panel{t.panel + (begin - keys.begin) * kChunk});
    while (!widen && begin < end) {
      const int64_t stop = smaller(end, round_up(begin + 1, args.block_size));
      const int64_t next = begin + kChunk < all.end ? begin + kChunk : begin;
      weigh_group(args, t, row, begin, stop, column, vectors,
                  Adjacent<T>{cache.value(begin) + column, cache.value(next) + column, args.value_size});
      begin = stop;
    }
  }
}

template <typename T>
void weigh(const AttentionArgs& args, const AttentionTile& t, Span all) {
  for (int64_t chunk = all.begin / kChunk * kChunk; chunk < all.end; chunk += kChunk) {
    const Span keys{larger(chunk, all.begin), smaller(chunk + kChunk, all.end)};
    for (int64_t column = 0; column < args.value_size; column += kChunk)
      weigh_chunk<T>(args, t, keys, all, column);
  }
}

template <typename T>
void attend_typed(const AttentionArgs& args, const AttentionTile& t) {
  const int64_t stride = value_stride(args.value_size);
  for (int64_t i = 0; i < t.rows * stride; i += kLanes) store(t.values + i, zero());
  const Span all = visible(t, 0, t.rows);
  if (all.begin < all.end) score<T>(args, t, all);
  for (int64_t row = 0; row < t.rows; row += kTileRows) {
    const int64_t rows = smaller(kTileRows, t.rows - row);
    const Span group = visible(t, row, rows);
    for (int64_t r = row; r < row + rows; ++r) soften(args, t, r, group);
  }
  if (all.begin < all.end) weigh<T>(args, t, all);
}

void attend(const AttentionArgs& args, const AttentionTile& tile) {
  switch (args.cache_type) {
    case DType::f32:
      return attend_typed<float>(args, tile);
    case DType::bf16:
      return attend_typed<bf16>(args, tile);
    case DType::f16:
      return attend_typed<f16>(args, tile);
  }
}

template <typename T>
void load_query_typed(const T* from, int64_t n, float scale, float* q) {
  const F32 factor = set1(scale);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(q + i, load(from + i) * factor);
  const int rest = static_cast<int>(n - i);
  if (rest > 0) store_partial(q + i, load_partial(from + i, rest) * factor, rest);
}

void load_query(const AttentionArgs& args, int64_t token, int64_t head, float* q) {
  const char* from = args.q.at(token, head * args.head_size);
  switch (args.q.type) {
    case DType::f32:
      return load_query_typed(reinterpret_cast<const float*>(from), args.head_size, args.scale, q);
    case DType::bf16:
      return load_query_typed(reinterpret_cast<const bf16*>(from), args.head_size, args.scale, q);
    case DType::f16:
      return load_query_typed(reinterpret_cast<const f16*>(from), args.head_size, args.scale, q);
  }
}

float exp_of(float x) {
  float lanes[kLanes];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

void merge(float* maximum, float* sum, float* values, float m, float s, const float* v, int64_t value_size) {
  const float top = *maximum > m ? *maximum : m;
  const F32 old_weight = set1(exp_of(*maximum - top)), weight = set1(exp_of(m - top));
  for (int64_t i = 0; i < value_size; i += kLanes)
    store(values + i, fma(load(v + i), weight, load(values + i) * old_weight));
  float lanes[kLanes];
  store(lanes, fma(set1(s), weight, set1(*sum) * old_weight));
  *sum = lanes[0];
  *maximum = top;
}

template <typename T>
void finish_typed(const float* values, int64_t n, float factor, T* to) {
  const F32 f = set1(factor);
  for (int64_t i = 0; i < n; i += kLanes) {
    // A zero that keys unseen by this row were added to has lost its sign: give all zeros the same.
    const F32 y = load(values + i) * f + zero();
    if (i + kLanes <= n)
      store(to + i, y);
    else
      store_partial(to + i, y, static_cast<int>(n - i));
  }
}

void finish(const AttentionArgs& args, int64_t token, int64_t head, float maximum, float sum,
            const float* values) {
  float factor = 1.0f;
  if (args.sinks != nullptr) {
    const float sink = args.sinks[head];
    const float top = maximum > sink ? maximum : sink;
    factor = exp_of(maximum - top);
    sum = sum * factor + exp_of(sink - top);
  }
  factor = sum == 0.0f ? 0.0f : factor / sum;
  char* to = args.out.at(token, head * args.value_size);
  switch (args.out.type) {
    case DType::f32:
      return finish_typed(values, args.value_size, factor, reinterpret_cast<float*>(to));
    case DType::bf16:
      return finish_typed(values, args.value_size, factor, reinterpret_cast<bf16*>(to));
    case DType::f16:
      return finish_typed(values, args.value_size, factor, reinterpret_cast<f16*>(to));
  }
}

// n values of x to every `step`-th place of `to`
template <typename X, typename T>
void spread(const X* x, int64_t n, T* to, int64_t step) {
  T lanes[kLanes];
  for (int64_t i = 0; i < n; i += kLanes) {
    const int count = static_cast<int>(smaller(kLanes, n - i));
    store(lanes, count == kLanes ? load(x + i) : load_partial(x + i, count));
    for (int l = 0; l < count; ++l) to[(i + l) * step] = lanes[l];
  }
}

template <typename T>
void spread_any(const char* x, DType type, int64_t n, T* to, int64_t step) {
  switch (type) {
    case DType::f32:
      return spread(reinterpret_cast<const float*>(x), n, to, step);
    case DType::bf16:
      return spread(reinterpret_cast<const bf16*>(x), n, to, step);
    case DType::f16:
      return spread(reinterpret_cast<const f16*>(x), n, to, step);
  }
}

template <typename T>
void write_typed(const KvWriteArgs& args, int64_t token, int64_t kv_head) {
  const int64_t slot = args.slots[token];
  if (slot < 0) return;
  const int64_t head = slot / args.block_size * args.kv_heads + kv_head, offset = slot % args.block_size;
  T* k = static_cast<T*>(args.k_cache) + head * args.head_size * args.block_size + offset;
  T* v = static_cast<T*>(args.v_cache) + (head * args.block_size + offset) * args.value_size;
  spread_any(args.k.at(token, kv_head * args.head_size), args.k.type, args.head_size, k, args.block_size);
  spread_any(args.v.at(token, kv_head * args.value_size), args.v.type, args.value_size, v, 1);
}

void write(const KvWriteArgs& args, int64_t token, int64_t kv_head) {
  switch (args.cache_type) {
    case DType::f32:
      return write_typed<float>(args, token, kv_head);
    case DType::bf16:
      return write_typed<bf16>(args, token, kv_head);
    case DType::f16:
      return write_typed<f16>(args, token, kv_head);
  }
}

}  // namespace

extern const AttentionKernels attention;
const AttentionKernels attention = {kTile, load_query, attend, merge, finish, write};

}  // namespace armllm::ARMLLM_VARIANT
