#include "recurrent/recurrent.h"

#include <type_traits>

#include "simd/exp.h"
#include "simd/ragged_blocks.h"
#include "simd/sigmoid.h"

namespace armllm::ARMLLM_VARIANT {

extern const RecurrentKernels recurrent;

namespace {

// Vectors of columns that run through the tokens together.  Each has two sums in two parts, which have to
// stay in registers.
#if defined(ARMLLM_VARIANT_avx512)
constexpr int kVectors = 2;
#else
constexpr int kVectors = 1;
#endif
constexpr int kColumns = kVectors * kLanes;
// Rows of the state that are on their way from memory.  Rows of a slice lie too far apart for hardware
// prefetchers: without this, decode steps read states at two thirds of the speed.
constexpr int64_t kRowsAhead = 32;

template <typename T, int kTaps>
void convolve_rows(const ConvPart& p) {
  const T* const* rows = reinterpret_cast<const T* const*>(p.rows);
  for_blocks(p.channels, [&](int64_t i, int lanes) ARMLLM_INLINE {
    F32 weight[kTaps];
    for (int tap = 0; tap < kTaps; ++tap)
      weight[tap] = load_lanes(p.weight + tap * p.weight_stride + i, lanes);
    const F32 bias = p.bias ? load_lanes(p.bias + i, lanes) : zero();
    for (int64_t token = 0; token < p.tokens; ++token) {
      F32 sum = bias;
      for (int tap = 0; tap < kTaps; ++tap) {
        const T* row = rows[token + tap];
        if (row) sum = fma(weight[tap], load_lanes(row + i, lanes), sum);
      }
      if (p.silu) sum = silu_times<AccuracyOf<T>::value>(sum, set1(1.0f));
      store_lanes(reinterpret_cast<T*>(p.out) + token * p.out_stride + i, sum, lanes);
    }
  });
}

template <int kTaps>
void convolve_taps(const ConvPart& p) {
  switch (p.type) {
    case DType::f32:
      return convolve_rows<float, kTaps>(p);
    case DType::bf16:
      return convolve_rows<bf16, kTaps>(p);
    case DType::f16:
      return convolve_rows<f16, kTaps>(p);
  }
}

template <int kTaps>
void convolve_up_to(const ConvPart& p) {
  if (p.taps == kTaps) return convolve_taps<kTaps>(p);
  if constexpr (kTaps > 1) convolve_up_to<kTaps - 1>(p);
}

void convolve(const ConvPart& p) { convolve_up_to<kMostTaps>(p); }

template <typename T>
F32 products(const T* x, const T* y, int64_t n) {
  F32 part[4] = {zero(), zero(), zero(), zero()};
  for_blocks_in_parts(n, [&](int64_t i, int lanes, int number) ARMLLM_INLINE {
    part[number] = fma(load_lanes(x + i, lanes), load_lanes(y + i, lanes), part[number]);
  });
  return (part[0] + part[1]) + (part[2] + part[3]);
}

template <typename T>
void scale_row(const T* x, int64_t n, bool normalize, float scale, float* out) {
  constexpr float kEpsilon = 1e-6f;
  const F32 factor =
      normalize ? set1(scale) / sqrt(set1(reduce_add(products(x, x, n)) + kEpsilon)) : set1(scale);
  for_blocks(n, [&](int64_t i, int lanes)
                    ARMLLM_INLINE { store_lanes(out + i, load_lanes(x + i, lanes) * factor, lanes); });
}

void scale_any(const void* x, DType type, int64_t n, bool normalize, float scale, float* out) {
  switch (type) {
    case DType::f32:
      return scale_row(static_cast<const float*>(x), n, normalize, scale, out);
    case DType::bf16:
      return scale_row(static_cast<const bf16*>(x), n, normalize, scale, out);
    case DType::f16:
      return scale_row(static_cast<const f16*>(x), n, normalize, scale, out);
  }
}

void prepare(const DeltaRuleArgs& args, int64_t token, int64_t head, float* q, float* k, float* qk) {
  const int64_t n = args.key_size;
  scale_any(args.q.at(token, head * n), args.q.type, n, args.normalize, args.scale, q);
  scale_any(args.k.at(token, head * n), args.k.type, n, args.normalize, 1.0f, k);
  *qk = reduce_add(products(q, k, n));
}

template <typename T>
void decay_row(const T* gate, int64_t n, float* out) {
  for_blocks(n, [&](int64_t i, int lanes)
                    ARMLLM_INLINE { store_lanes(out + i, exp(load_lanes(gate + i, lanes)), lanes); });
}

void decay(const void* gate, DType type, int64_t n, float* out) {
  switch (type) {
    case DType::f32:
      return decay_row(static_cast<const float*>(gate), n, out);
    case DType::bf16:
      return decay_row(static_cast<const bf16*>(gate), n, out);
    case DType::f16:
      return decay_row(static_cast<const f16*>(gate), n, out);
  }
}

float load_float(const char* p, DType type) {
  float value[kLanes];
  switch (type) {
    case DType::f32:
      return *reinterpret_cast<const float*>(p);
    case DType::bf16:
      store(value, load_partial(reinterpret_cast<const bf16*>(p), 1));
      return value[0];
    case DType::f16:
      store(value, load_partial(reinterpret_cast<const f16*>(p), 1));
      return value[0];
  }
  return 0.0f;
}

// A state as the next token sees it: rounded to the dtype in which it is stored, wherever a prompt is cut.
template <typename S>
ARMLLM_INLINE inline F32 kept(F32 state) {
  if constexpr (std::is_same_v<S, bf16>) return round_to_bf16(state);
  return state;
}

// The update of the token before, which the pass of the next token applies.
struct Pending {
  const float* k = nullptr;
  F32 delta[kVectors];
};

// Prefetches a row of a slice, or of the next slice of the same head, whose tile follows.
template <typename S>
ARMLLM_INLINE inline void prefetch_row(const S* slice, int64_t stride, int64_t n, int64_t row) {
  constexpr int kLine = 64 / sizeof(S);  // elements
  const S* at = row < n ? slice + row * stride : slice + kColumns + (row - n) * stride;
  for (int i = 0; i < kColumns; i += kLine) __builtin_prefetch(at + i);
}

// One pass over the state S of a token with key k, query q and decay a, from one place to another:
//
//   S ← a · (S + k' δ'ᵀ)   of the token before, and the sums  Sᵀ k  and  Sᵀ q
//
// With δ = β (v − Sᵀ k) the new state is S + k δᵀ, and its output Sᵀ q + (k · q) δ.  Without the delta rule
// δ = β v, and Sᵀ k is not summed.  States are stored as S.
template <typename S, bool per_channel, bool pending, bool with_delta, typename From>
ARMLLM_INLINE inline void pass(const From* from, int64_t stride, float* state, int64_t n, const float* q,
                               const float* k, const float* decay, const Pending& before, F32* sum_k,
                               F32* sum_q) {
  F32 parts_k[2][kVectors], parts_q[2][kVectors];
  for (int part = 0; part < 2; ++part)
    for (int j = 0; j < kVectors; ++j) parts_k[part][j] = parts_q[part][j] = zero();
  const F32 one_decay = set1(decay[0]);
  const auto row = [&](int64_t d, int part) ARMLLM_INLINE {
    if (!pending) prefetch_row(from, stride, n, d + kRowsAhead);
    const F32 key = set1(k[d]), query = set1(q[d]), factor = per_channel ? set1(decay[d]) : one_decay;
    for (int j = 0; j < kVectors; ++j) {
      F32 s = load(from + d * stride + j * kLanes);
      if (pending) s = kept<S>(fma(set1(before.k[d]), before.delta[j], s));
      s = s * factor;
      store(state + d * kColumns + j * kLanes, s);
      if (with_delta) parts_k[part][j] = fma(s, key, parts_k[part][j]);
      parts_q[part][j] = fma(s, query, parts_q[part][j]);
    }
  };
  int64_t d = 0;
  for (; d + 2 <= n; d += 2) {
    row(d, 0);
    row(d + 1, 1);
  }
  if (d < n) row(d, 0);
  for (int j = 0; j < kVectors; ++j) {
    sum_k[j] = parts_k[0][j] + parts_k[1][j];
    sum_q[j] = parts_q[0][j] + parts_q[1][j];
  }
}

template <typename T>
ARMLLM_INLINE inline void step_out(const DeltaPart& p, int64_t token, const float* qk, const F32* sum_k,
                                   const F32* sum_q, F32* delta) {
  const T* v = reinterpret_cast<const T*>(p.v + token * p.v_stride);
  T* out = reinterpret_cast<T*>(p.out + token * p.out_stride);
  const F32 beta = set1(load_float(p.beta + token * p.beta_stride, p.beta_type)), product = set1(*qk);
  for (int j = 0; j < kVectors; ++j) {
    const int64_t left = p.columns - j * kLanes;
    const int lanes = static_cast<int>(left >= kLanes ? kLanes : left > 0 ? left : 0);
    delta[j] = (lanes > 0 ? load_lanes(v + j * kLanes, lanes) - sum_k[j] : zero()) * beta;
    if (lanes > 0) store_lanes(out + j * kLanes, fma(delta[j], product, sum_q[j]), lanes);
  }
}

// Runs the columns in a copy of the state, [key_size][kColumns], which stays in L1.
template <typename T, typename S, bool per_channel, bool with_delta>
void run_columns(const DeltaPart& p) {
  S *const slice = reinterpret_cast<S*>(p.state), *const slots = reinterpret_cast<S*>(p.slots);
  alignas(64) float state[kMostKeyChannels * kColumns];
  const auto each_row = [&](auto visit) ARMLLM_INLINE {
    for (int64_t d = 0; d < p.key_size; ++d)
      for (int j = 0; j < kVectors; ++j) {
        const int64_t left = p.columns - j * kLanes;
        const int lanes = static_cast<int>(left >= kLanes ? kLanes : left > 0 ? left : 0);
        visit(d, j, lanes);
      }
  };
  const bool whole = !p.is_new && p.columns == kColumns;  // the first pass reads the state where it is
  if (!whole)
    each_row([&](int64_t d, int j, int lanes) ARMLLM_INLINE {
      const S* from = slice + d * p.value_size + j * kLanes;
      store(state + d * kColumns + j * kLanes, p.is_new || lanes == 0 ? zero() : load_lanes(from, lanes));
    });
  Pending before;
  for (int j = 0; j < kVectors; ++j) before.delta[j] = zero();
  const auto write_state = [&](S* to) ARMLLM_INLINE {
    const Pending last = before;  // a copy that no store can change stays in registers
    const auto updated = [&](int64_t d, int j) ARMLLM_INLINE {
      return fma(set1(last.k[d]), last.delta[j], load(state + d * kColumns + j * kLanes));
    };
    if (p.columns == kColumns) {  // with constant lanes this pass takes half the instructions
      const int64_t n = p.key_size, stride = p.value_size;
      for (int64_t d = 0; d < n; ++d)
        for (int j = 0; j < kVectors; ++j) store(to + d * stride + j * kLanes, updated(d, j));
      return;
    }
    each_row([&](int64_t d, int j, int lanes) ARMLLM_INLINE {
      if (lanes > 0) store_lanes(to + d * p.value_size + j * kLanes, updated(d, j), lanes);
    });
  };
  F32 sum_k[kVectors], sum_q[kVectors];
  for (int64_t token = 0; token < p.tokens; ++token) {
    const float *q = p.q + token * p.key_stride, *k = p.k + token * p.key_stride;
    const float* decay = p.decay + token * p.decay_stride;
    if (token > 0)
      pass<S, per_channel, true, with_delta>(state, kColumns, state, p.key_size, q, k, decay, before, sum_k,
                                             sum_q);
    else if (whole)
      pass<S, per_channel, false, with_delta>(slice, p.value_size, state, p.key_size, q, k, decay, before,
                                              sum_k, sum_q);
    else
      pass<S, per_channel, false, with_delta>(state, kColumns, state, p.key_size, q, k, decay, before, sum_k,
                                              sum_q);
    step_out<T>(p, token, p.qk + token * p.key_stride, sum_k, sum_q, before.delta);
    before.k = k;
    if (p.saves && p.saves[token] >= 0) write_state(slots + p.saves[token] * p.slot_stride);
  }
  write_state(slice);
}

template <typename T, typename S>
void run_states(const DeltaPart& p) {
  if (p.decay_per_channel)
    p.delta ? run_columns<T, S, true, true>(p) : run_columns<T, S, true, false>(p);
  else
    p.delta ? run_columns<T, S, false, true>(p) : run_columns<T, S, false, false>(p);
}

template <typename T>
void run_type(const DeltaPart& p) {
  p.state_type == DType::bf16 ? run_states<T, bf16>(p) : run_states<T, float>(p);
}

void delta_rule(const DeltaPart& p) {
  switch (p.type) {
    case DType::f32:
      return run_type<float>(p);
    case DType::bf16:
      return run_type<bf16>(p);
    case DType::f16:
      return run_type<f16>(p);
  }
}

F32 load_row(const Rows& rows, int64_t token, int64_t column, int lanes) {
  const char* p = rows.at(token, column);
  switch (rows.type) {
    case DType::f32:
      return load_lanes(reinterpret_cast<const float*>(p), lanes);
    case DType::bf16:
      return load_lanes(reinterpret_cast<const bf16*>(p), lanes);
    case DType::f16:
      return load_lanes(reinterpret_cast<const f16*>(p), lanes);
  }
  return zero();
}

void store_row(const Rows& rows, int64_t token, F32 v, int lanes) {
  char* p = rows.row(token);
  switch (rows.type) {
    case DType::f32:
      return store_lanes(reinterpret_cast<float*>(p), v, lanes);
    case DType::bf16:
      return store_lanes(reinterpret_cast<bf16*>(p), v, lanes);
    case DType::f16:
      return store_lanes(reinterpret_cast<f16*>(p), v, lanes);
  }
}

// Writes a token's factors of the states, as floats.
void widen_states(const Rows& rows, int64_t token, int64_t states, float* out) {
  for_blocks(states, [&](int64_t i, int lanes)
                         ARMLLM_INLINE { store_lanes(out + i, load_row(rows, token, i, lanes), lanes); });
}

// Runs the channels in a copy of their states, which stays in L1 with their rates.
template <typename S>
void scan_states(const ScanPart& p) {
  static_assert(kScanChannels == kLanes, "a tile is one vector of channels");
  S *const stored = reinterpret_cast<S*>(p.state), *const slots = reinterpret_cast<S*>(p.slots);
  alignas(64) float state[kMostStates * kLanes], rate[kMostStates * kLanes];
  float b[kMostStates], c[kMostStates];
  for (int64_t n = 0; n < p.states; ++n) {
    store(rate + n * kLanes, load_lanes(p.a + n * p.stride, p.channels));
    store(state + n * kLanes, p.is_new ? zero() : load_lanes(stored + n * p.stride, p.channels));
    b[n] = c[n] = 1.0f;
  }
  const auto write_state = [&](S* to) ARMLLM_INLINE {
    for (int64_t n = 0; n < p.states; ++n)
      store_lanes(to + n * p.stride, load(state + n * kLanes), p.channels);
  };
  for (int64_t token = 0; token < p.tokens; ++token) {
    const F32 x = load_row(p.x, token, 0, p.channels), dt = load_row(p.dt, token, 0, p.channels);
    if (p.b) widen_states(p.b, token, p.states, b);
    if (p.c) widen_states(p.c, token, p.states, c);
    const bool normalize = p.normalize && !(p.is_new && token == 0);
    F32 sum[2] = {zero(), zero()};
    const auto update = [&](int64_t n, int part) ARMLLM_INLINE {
      float* place = state + n * kLanes;
      const F32 decay = exp(dt * load(rate + n * kLanes));
      F32 added = x * set1(b[n]);
      if (normalize) added = added * sqrt(fnma(decay, decay, set1(1.0f)));
      const F32 s = fma(decay, load(place), added);
      store(place, kept<S>(s));
      sum[part] = fma(s, set1(c[n]), sum[part]);
    };
    int64_t n = 0;
    for (; n + 2 <= p.states; n += 2) {
      update(n, 0);
      update(n + 1, 1);
    }
    if (n < p.states) update(n, 0);
    store_row(p.out, token, sum[0] + sum[1], p.channels);
    if (p.saves && p.saves[token] >= 0) write_state(slots + p.saves[token] * p.slot_stride);
  }
  write_state(stored);
}

void scan(const ScanPart& p) { p.state_type == DType::bf16 ? scan_states<bf16>(p) : scan_states<float>(p); }

}  // namespace

const RecurrentKernels recurrent = {convolve, prepare, decay, delta_rule, kColumns, scan};

}  // namespace armllm::ARMLLM_VARIANT
