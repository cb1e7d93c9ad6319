// Linear kernels with SMOPA, an outer product in streaming mode.  Few tokens go through NEON: entering
// streaming mode costs more than their product.
#include "linear/kernels/arm/unpack.h"

namespace armllm::i8mm {
extern const LinearKernels linear;
}

namespace armllm::sme2 {
namespace {

constexpr int64_t kBlock = 16;  // tokens of a tile with 512-bit vectors
constexpr int64_t kCallTokens = 64;
constexpr int64_t kCallPanels = 4;

// Arguments of one gemm call, so that streaming mode is entered once per call.  A tile is L tokens × 4 · L
// rows, L being the 32-bit lanes of a vector; its weights are ordered [k / 8][half of 8 k][row][4].
struct GemmCall {
  const int8_t* w;
  const int8_t* x;
  const float* scales;
  float* out;
  int64_t steps;  // steps of 8 k
  int64_t out_stride_bytes;
  int64_t tokens, rows;
  int64_t block_bytes;  // from one block of activations to the next
};

// All in assembly: compilers that know SME call a support library to save the callers' ZA, and older systems
// lack that library.  SME2 instructions are encoded as numbers for assemblers that know SME but not SME2.
__attribute__((noinline)) void gemm_i8_smopa(const GemmCall* call) {
  register const GemmCall* x0 asm("x0") = call;
  asm volatile(
      ".arch_extension sve\n"
      ".arch_extension sme\n"
      "ldp x1, x2, [x0]\n"
      "ldp x3, x4, [x0, #16]\n"
      "ldp x5, x6, [x0, #32]\n"
      "ldp x7, x8, [x0, #48]\n"
      "ldr x9, [x0, #64]\n"

      // Lazy ZA save: TPIDR2_EL0 points to a caller's save buffer, if there is one.  Save ZA on its behalf.
      "mrs x13, S3_3_C13_C0_5\n"
      "cbz x13, 3f\n"
      "ldr x15, [x13]\n"
      "ldrh w16, [x13, #8]\n"
      "cbz x15, 2f\n"
      "rdsvl x17, #1\n"
      "mov w12, #0\n"
      "1:\n"
      "cmp w12, w16\n"
      "b.ge 2f\n"
      "str za[w12, 0], [x15]\n"
      "add x15, x15, x17\n"
      "add w12, w12, #1\n"
      "b 1b\n"
      "2:\n"
      "msr S3_3_C13_C0_5, xzr\n"
      "3:\n"

      "smstart\n"
      "cntw x10\n"
      "ptrue p0.b\n"
      ".inst 0x25207810\n"  // ptrue pn8.b
      "mov x11, #0\n"

      "4:\n"  // 4 · L rows
      "whilelt p1.s, x11, x8\n"
      "add x13, x11, x10\n"
      "whilelt p2.s, x13, x8\n"
      "add x13, x13, x10\n"
      "whilelt p3.s, x13, x8\n"
      "add x13, x13, x10\n"
      "whilelt p4.s, x13, x8\n"
      "ld1w {z20.s}, p1/z, [x3]\n"
      "ld1w {z21.s}, p2/z, [x3, #1, mul vl]\n"
      "ld1w {z22.s}, p3/z, [x3, #2, mul vl]\n"
      "ld1w {z23.s}, p4/z, [x3, #3, mul vl]\n"
      "mov x14, #0\n"

      "5:\n"  // L tokens
      "lsr x15, x14, #4\n"
      "madd x15, x15, x9, x2\n"
      "and x13, x14, #15\n"
      "add x15, x15, x13, lsl #3\n"
      "mov x16, x1\n"
      "mov x17, x5\n"
      "zero {za}\n"

      "6:\n"                // 8 k
      ".inst 0xa04001e8\n"  // ld1b {z8.b-z9.b}, pn8/z, [x15]
      ".inst 0xa0408200\n"  // ld1b {z0.b-z3.b}, pn8/z, [x16]
      "add x15, x15, #128\n"
      ".inst 0xa0418204\n"  // ld1b {z4.b-z7.b}, pn8/z, [x16, #4, mul vl]
      "addvl x16, x16, #8\n"
      ".inst 0xc1a9d10b\n"  // uzp {z10.s-z11.s}, z8.s, z9.s
      "subs x17, x17, #1\n"
      "smopa za0.s, p0/m, p0/m, z10.b, z0.b\n"
      "smopa za1.s, p0/m, p0/m, z10.b, z1.b\n"
      "smopa za2.s, p0/m, p0/m, z10.b, z2.b\n"
      "smopa za3.s, p0/m, p0/m, z10.b, z3.b\n"
      "smopa za0.s, p0/m, p0/m, z11.b, z4.b\n"
      "smopa za1.s, p0/m, p0/m, z11.b, z5.b\n"
      "smopa za2.s, p0/m, p0/m, z11.b, z6.b\n"
      "smopa za3.s, p0/m, p0/m, z11.b, z7.b\n"
      "b.ne 6b\n"

      "sub x13, x7, x14\n"
      "cmp x13, x10\n"
      "csel x13, x13, x10, lt\n"
      "madd x17, x14, x6, x4\n"
      "mov w12, #0\n"
      "7:\n"  // a token
      "mov z24.s, p0/m, za0h.s[w12, 0]\n"
      "mov z25.s, p0/m, za1h.s[w12, 0]\n"
      "mov z26.s, p0/m, za2h.s[w12, 0]\n"
      "mov z27.s, p0/m, za3h.s[w12, 0]\n"
      "scvtf z24.s, p0/m, z24.s\n"
      "scvtf z25.s, p0/m, z25.s\n"
      "scvtf z26.s, p0/m, z26.s\n"
      "scvtf z27.s, p0/m, z27.s\n"
      "fmul z24.s, z24.s, z20.s\n"
      "fmul z25.s, z25.s, z21.s\n"
      "fmul z26.s, z26.s, z22.s\n"
      "fmul z27.s, z27.s, z23.s\n"
      "st1w {z24.s}, p1, [x17]\n"
      "st1w {z25.s}, p2, [x17, #1, mul vl]\n"
      "st1w {z26.s}, p3, [x17, #2, mul vl]\n"
      "st1w {z27.s}, p4, [x17, #3, mul vl]\n"
      "add x17, x17, x6\n"
      "add w12, w12, #1\n"
      "cmp w12, w13\n"
      "b.lt 7b\n"
      "add x14, x14, x10\n"
      "cmp x14, x7\n"
      "b.lt 5b\n"

      "mov x1, x16\n"
      "add x11, x11, x10, lsl #2\n"
      "add x3, x3, x10, lsl #4\n"
      "add x4, x4, x10, lsl #4\n"
      "cmp x11, x8\n"
      "b.lt 4b\n"
      "smstop\n"
      : "+r"(x0)
      :
      : "x1", "x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13", "x14", "x15", "x16",
        "x17", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14",
        "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28",
        "v29", "v30", "v31", "p0", "p1", "p2", "p3", "p4", "p5", "p6", "p7", "p8", "p9", "p10", "p11", "p12",
        "p13", "p14", "p15", "cc", "memory");
}

int64_t streaming_vector_bytes() {
  int64_t bytes;
  asm(".arch_extension sve\n.arch_extension sme\nrdsvl %0, #1" : "=r"(bytes));
  return bytes;
}

// Tile order of kStepBytes / 8 rows; w is where the panel's first row goes.
template <int kStepBytes>
struct HalfOrder {
  static ARMLLM_INLINE void put(int8_t* w, int64_t, int64_t step, int first, int8x16_t rows01,
                                int8x16_t rows23) {
    const int32x4_t a = vreinterpretq_s32_s8(rows01), b = vreinterpretq_s32_s8(rows23);
    int8_t* to = w + step * kStepBytes + first * 4;
    vst1q_s8(to, vreinterpretq_s8_s32(vuzp1q_s32(a, b)));
    vst1q_s8(to + kStepBytes / 2, vreinterpretq_s8_s32(vuzp2q_s32(a, b)));
  }
};

template <int kStepBytes>
void unpack_tiles(Scheme scheme, const uint8_t* const* panel, int panels, int64_t groups, int8_t* w,
                  int32_t* row_info, float* row_scales) {
  constexpr int kTilePanels = kStepBytes / 8 / int(kPanel);
  for (int p = 0; p < panels; ++p)
    armllm::sme2::unpack<HalfOrder<kStepBytes>>(
        scheme, panel + p, 1, groups,
        w + p / kTilePanels * kTilePanels * groups * 512 + p % kTilePanels * kPanel * 4,
        row_info + p * kPanel, row_scales + p * kPanel);
}

void unpack(Scheme scheme, const uint8_t* const* panel, int panels, int64_t groups, int8_t* w,
            int32_t* row_info, float* row_scales) {
  switch (streaming_vector_bytes()) {
    case 16:
      return unpack_tiles<128>(scheme, panel, panels, groups, w, row_info, row_scales);
    case 32:
      return unpack_tiles<256>(scheme, panel, panels, groups, w, row_info, row_scales);
    default:
      return unpack_tiles<512>(scheme, panel, panels, groups, w, row_info, row_scales);
  }
}

void gemm(const int8_t* w, const int32_t*, const float* row_scales, int panels, const Activations& x,
          int64_t first_token, int tokens, float* out, int64_t out_stride) {
  const int64_t bytes = x.row_bytes();
  const GemmCall call{w,
                      x.values + first_token * bytes,
                      row_scales,
                      out,
                      x.groups * 4,
                      out_stride * 4,
                      tokens,
                      panels * kPanel,
                      kBlock * bytes};
  gemm_i8_smopa(&call);
}

void gemv(Scheme scheme, const uint8_t* panel, const Activations& x, int64_t first_token, int tokens,
          float* out) {
  i8mm::linear.gemv(scheme, panel, x, first_token, tokens, out);
}

void gemv_panels(Scheme scheme, const uint8_t* panel, int64_t panel_stride, int64_t panels,
                 const Activations& x, int64_t first_token, int tokens, float* out, int64_t out_stride) {
  i8mm::linear.gemv_panels(scheme, panel, panel_stride, panels, x, first_token, tokens, out, out_stride);
}

}  // namespace

extern const LinearKernels linear;
constexpr LinearKernels linear = [] {
  LinearKernels k = common_kernels();
  k.gemm_block = kBlock;
  k.gemm_tokens = kCallTokens;
  k.gemm_panels = kCallPanels;
  k.gemv = gemv;
  k.unpack = unpack;
  k.gemm = gemm;
  k.gemv_interleaves = true;
  k.gemv_panels = gemv_panels;
  k.int6_gemv_tokens = k.int3_gemv_tokens = kSdotTokens;
  return k;
}();

}  // namespace armllm::sme2
