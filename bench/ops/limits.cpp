// What a core can do at best: reading memory, and multiplying without reading any.
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

constexpr int kChains = 12;  // sums in flight: enough to hide the latency of any multiplication

// The same value, of which the compiler knows nothing: it cannot leave out a loop whose sums nobody needs.
template <typename T>
inline T kept(T value) {
#if defined(__AVX512F__)
  __asm__ volatile("" : "+v"(value));
#elif defined(__x86_64__)
  __asm__ volatile("" : "+x"(value));
#else
  __asm__ volatile("" : "+w"(value));
#endif
  return value;
}

// Runs `step(sum)` on kChains sums, `rounds` times.
template <typename Sum, typename Step>
inline int64_t chains(int64_t rounds, Sum zero, const Step& step) {
  Sum sum[kChains];
  for (Sum& s : sum) s = zero;
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) sum[c] = step(sum[c]);
  }
  for (const Sum& s : sum) kept(s);
  return rounds * kChains;
}

#if defined(__AMX_INT8__) && defined(__AMX_BF16__)
struct alignas(64) TileConfig {
  uint8_t palette = 1, others[15] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Whether Linux lets this process use tiles, which have to be asked for.
bool may_use_tiles() {
  static const bool may = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return may;
}

#define MULTIPLY_TILES(instruction)                                                                        \
  asm volatile(instruction " %%tmm6, %%tmm4, %%tmm0\n" instruction " %%tmm7, %%tmm4, %%tmm1\n" instruction \
                           " %%tmm6, %%tmm5, %%tmm2\n" instruction " %%tmm7, %%tmm5, %%tmm3" ::)

// So many rounds of four products of tiles; gives how many products.
template <typename Round>
int64_t tiles(int64_t rounds, const Round& round) {
  const TileConfig config;
  asm volatile("ldtilecfg %0" ::"m"(config));
  for (int64_t i = 0; i < rounds; ++i) round();
  asm volatile("tilerelease" ::);
  return 4 * rounds;
}
#endif

}  // namespace

extern "C" {

// Reads `bytes` bytes, a multiple of 512, once, and asks for a little more.
void read_memory(const char* data, int64_t bytes) {
#if defined(__AVX512F__)
  __m512i sum[8] = {};
  for (int64_t i = 0; i < bytes; i += 512) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      _mm_prefetch(data + i + 64 * j + 4096,
                   _MM_HINT_T1);  // the best of several distances and hints on Zen 4
      sum[j] = _mm512_xor_si512(sum[j], _mm512_load_si512(data + i + 64 * j));
    }
  }
  for (const __m512i& s : sum) kept(s);
#else
  uint64_t sum[8] = {};
  for (int64_t i = 0; i < bytes; i += 64)
    for (int j = 0; j < 8; ++j) sum[j] ^= reinterpret_cast<const uint64_t*>(data + i)[j];
  for (uint64_t& s : sum) __asm__ volatile("" : "+r"(s));
#endif
}

// INT8 multiply-accumulates done, or 0 where this was built without an instruction for them.
int64_t multiply_int8(int64_t rounds) {
#if defined(__AMX_INT8__) && defined(__AMX_BF16__)
  if (may_use_tiles()) return 16 * 16 * 64 * tiles(rounds, [] { MULTIPLY_TILES("tdpbssd"); });
#endif
#if defined(__AVX512VNNI__)
  const __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(5);
  return 64 * chains(rounds, _mm512_setzero_si512(), [&](__m512i s) { return _mm512_dpbusd_epi32(s, a, b); });
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  const int8x16_t a = vdupq_n_s8(3), b = vdupq_n_s8(5);
  return 32 * chains(rounds, vdupq_n_s32(0), [&](int32x4_t s) { return vmmlaq_s32(s, a, b); });
#elif defined(__ARM_FEATURE_DOTPROD)
  const int8x16_t a = vdupq_n_s8(3), b = vdupq_n_s8(5);
  return 16 * chains(rounds, vdupq_n_s32(0), [&](int32x4_t s) { return vdotq_s32(s, a, b); });
#else
  return 0 * rounds;
#endif
}

// The same of bfloat16.
int64_t multiply_bf16(int64_t rounds) {
#if defined(__AMX_INT8__) && defined(__AMX_BF16__)
  if (may_use_tiles()) return 16 * 16 * 32 * tiles(rounds, [] { MULTIPLY_TILES("tdpbf16ps"); });
#endif
#if defined(__AVX512BF16__)
  const __m512bh a = (__m512bh)_mm512_set1_epi16(0x3f80), b = (__m512bh)_mm512_set1_epi16(0x3f00);
  return 32 * chains(rounds, _mm512_setzero_ps(), [&](__m512 s) { return _mm512_dpbf16_ps(s, a, b); });
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  const bfloat16x8_t a = vreinterpretq_bf16_u16(vdupq_n_u16(0x3f80)), b = a;
  return 16 * chains(rounds, vdupq_n_f32(0), [&](float32x4_t s) { return vbfmmlaq_f32(s, a, b); });
#else
  return 0 * rounds;
#endif
}

}  // extern "C"
