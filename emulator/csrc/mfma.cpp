// SPDX-License-Identifier: MIT
// Matrix instructions. They ignore EXEC and MODE, round to nearest even and keep denormals.
#include "matrix.h"

namespace emu {
namespace {

constexpr int kMaxK = 128;

// acc[r][j] += sum over k of a[k][row + r] * b[k][j], in the order of k, kRows rows side by side to
// hide latency.
constexpr int kRows = 4;
// NOTE: exactly one register of the host: the compiler keeps wider vectors in memory.
#if defined(__AVX512F__)
constexpr int kHostBytes = 64;
#elif defined(__AVX2__)
constexpr int kHostBytes = 32;
#else
constexpr int kHostBytes = 16;
#endif
template <class T>
struct Vector {
  typedef T type __attribute__((vector_size(kHostBytes)));
  static constexpr int size = kHostBytes / sizeof(T);
};
template <bool Fused, class V, class T>
inline V madd(T a, V b, V c) {
  if (!Fused) return c + a * b;
  for (size_t e = 0; e < sizeof(V) / sizeof(T); ++e) c[e] = std::fma(a, b[e], c[e]);
  return c;
}
// The eight accumulators have names: an array of them would live in memory.
template <bool Fused, class T, int N>
inline void multiply(const T (*a)[N], const T (*b)[N], int row, int first, int last, T (*acc)[N]) {
  using V = typename Vector<T>::type;
  constexpr int kWidth = Vector<T>::size, kPair = 2 * kWidth <= N ? 2 : 1;
  auto load = [](const T* p) {
    V v;
    std::memcpy(&v, p, sizeof(V));
    return v;
  };
  auto store = [](T* p, V v) { std::memcpy(p, &v, sizeof(V)); };
  for (int j = 0; j < N; j += kWidth * kPair) {
    const int j2 = kPair == 2 ? j + kWidth : j;
    V s00 = load(&acc[0][j]), s10 = load(&acc[1][j]), s20 = load(&acc[2][j]),
      s30 = load(&acc[3][j]);
    V s01 = load(&acc[0][j2]), s11 = load(&acc[1][j2]), s21 = load(&acc[2][j2]),
      s31 = load(&acc[3][j2]);
    for (int k = first; k < last; ++k) {
      const T* x = &a[k][row];
      const V c0 = load(&b[k][j]), c1 = load(&b[k][j2]);
      s00 = madd<Fused>(x[0], c0, s00), s10 = madd<Fused>(x[1], c0, s10);
      s20 = madd<Fused>(x[2], c0, s20), s30 = madd<Fused>(x[3], c0, s30);
      if (kPair == 2) {
        s01 = madd<Fused>(x[0], c1, s01), s11 = madd<Fused>(x[1], c1, s11);
        s21 = madd<Fused>(x[2], c1, s21), s31 = madd<Fused>(x[3], c1, s31);
      }
    }
    store(&acc[0][j], s00), store(&acc[1][j], s10), store(&acc[2][j], s20), store(&acc[3][j], s30);
    if (kPair == 2)
      store(&acc[0][j2], s01), store(&acc[1][j2], s11), store(&acc[2][j2], s21),
          store(&acc[3][j2], s31);
  }
}

template <class T, int N>
struct Operands {
  alignas(64) T a[kMaxK][N];  // [k][row]
  alignas(64) T b[kMaxK][N];  // [k][column]
};

// --- f8f6f4, with and without block scales
inline float fp4_value(u32 nibble) {
  i32 c = i32(nibble & 7);
  i32 twice = c < 4 ? c : (c < 6 ? 2 * c - 4 : 4 * c - 16);
  return f32_of(u32_of(float(twice) * 0.5f) | ((nibble & 8) << 28));
}

// Fills m[k][idx] from the fragment that starts at register code.
// FP4 and FP6: lane N*kb + idx holds k = 32*kb .. 32*kb+31. FP8: two chunks of 16, K/2 apart.
template <class T, int N>
void unpack(Wave& w, int code, int format, T (*m)[N]) {
  constexpr int kGroups = 64 / N, K = 32 * kGroups;
  if (format == 4) {
    for (int kb = 0; kb < kGroups; ++kb)
      for (int r = 0; r < 4; ++r) {
        const u32* word = &w.vgpr(code + r)[N * kb];
        for (int n = 0; n < 8; ++n)
          for (int i = 0; i < N; ++i) m[32 * kb + 8 * r + n][i] = T(fp4_value(word[i] >> (4 * n)));
      }
    return;
  }
  const float* value = tables().value[format];
  if (format >= 2) {
    for (int kb = 0; kb < kGroups; ++kb)
      for (int s = 0; s < 32; ++s) {
        int bit = 6 * s, r = bit / 32, shift = bit % 32;
        for (int i = 0; i < N; ++i) {
          int lane = N * kb + i;
          u64 both = w.vgpr(code + r)[lane];
          if (shift > 26) both |= u64(w.vgpr(code + r + 1)[lane]) << 32;
          m[32 * kb + s][i] = T(value[(both >> shift) & 63]);
        }
      }
    return;
  }
  for (int g = 0; g < kGroups; ++g)
    for (int byte = 0; byte < 32; ++byte) {
      int k = (byte / 16) * (K / 2) + 16 * g + byte % 16;
      const u32* word = &w.vgpr(code + byte / 4)[N * g];
      for (int i = 0; i < N; ++i) m[k][i] = T(value[(word[i] >> (8 * (byte % 4))) & 255]);
    }
}

double e8m0(u32 byte) { return byte == 255 ? std::nan("") : std::ldexp(1.0, int(byte) - 127); }
// Scale of (index, block) comes from lane N*block + index. NOTE: a scalar operand gives its bits
// 30:23.
template <int N>
void scales(Wave& w, const Inst& in, int code, int select, double (*out)[N]) {
  static const auto table = [] {
    std::array<double, 256> t;
    for (u32 b = 0; b < 256; ++b) t[b] = e8m0(b);
    return t;
  }();
  for (int kb = 0; kb < 64 / N; ++kb)
    for (int i = 0; i < N; ++i) {
      u32 byte = code >= kVgpr ? (w.vgpr(code)[N * kb + i] >> (8 * select)) & 255
                               : (scalar32(w, in, code) >> 23) & 255;
      out[kb][i] = table[byte];
    }
}

// Every block of 32 products is summed exactly (float32 suffices below 8 bits, float64 for FP8 but
// for BF8's extremes), scaled, rounded to float32 and added to the accumulator, blocks in order.
// ASSUMED order.
template <class T, int N>
void block_scaled(Wave& w, const Inst& in, bool scaled) {
  constexpr int kGroups = 64 / N;
  thread_local Operands<T, N> m;
  unpack<T, N>(w, in.src[0].code, int(in.cbsz), m.a);
  unpack<T, N>(w, in.src[1].code, int(in.blgp), m.b);
  alignas(64) float acc[N][N];
  read_c<N>(w, in, 0, acc);
  double sa[kGroups][N], sb[kGroups][N];
  if (scaled) {
    scales<N>(w, in, in.scale0, int((in.opsel & 1) | ((in.opsel_hi & 1) << 1)), sa);
    scales<N>(w, in, in.scale1, int(((in.opsel >> 1) & 1) | (in.opsel_hi & 2)), sb);
  }
  for (int kb = 0; kb < kGroups; ++kb)
    for (int i = 0; i < N; i += kRows) {
      alignas(64) T sum[kRows][N] = {};
      multiply<false, T, N>(m.a, m.b, i, 32 * kb, 32 * kb + 32, sum);
      for (int r = 0; r < kRows; ++r) {
        float* row = acc[i + r];
        if (scaled) {
          double s = sa[kb][i + r];
          for (int j = 0; j < N; ++j) row[j] += float(double(sum[r][j]) * (s * sb[kb][j]));
        } else {
          for (int j = 0; j < N; ++j) row[j] += float(sum[r][j]);
        }
      }
    }
  write_d<N>(w, in, 0, acc);
}
template <int N, bool Scaled>
void f8f6f4(Wave& w, const Inst& in) {
  no_modifiers(in);
  if (in.cbsz > 4 || in.blgp > 4) throw Fault("unimplemented", "f8f6f4 format code above 4");
  if (!Scaled && (in.abid & 1))
    throw Fault("unimplemented", "f8f6f4 with ABID set but no scale load");
  if (in.cbsz >= 2 && in.blgp >= 2)
    block_scaled<float, N>(w, in, Scaled);
  else
    block_scaled<double, N>(w, in, Scaled);
}
EMU_HANDLER("v_mfma_scale_f32_16x16x128_f8f6f4", (f8f6f4<16, true>))
EMU_HANDLER("v_mfma_scale_f32_32x32x64_f8f6f4", (f8f6f4<32, true>))
EMU_HANDLER("v_mfma_f32_16x16x128_f8f6f4", (f8f6f4<16, false>))
EMU_HANDLER("v_mfma_f32_32x32x64_f8f6f4", (f8f6f4<32, false>))

// --- operand permutes. CBSZ, ABID: every group of 2^CBSZ neighbouring blocks takes A from its
// block ABID (ASSUMED where there are several groups). BLGP: which 16 lanes of B stand in for
// each 16.
int a_block(const Inst& in, int block) { return (block & ~((1 << in.cbsz) - 1)) + int(in.abid); }
int b_lane(const Inst& in, int lane) {
  int group = lane / 16, from[] = {group, group & 1, 2 + (group & 1), (group + 1) & 3};
  return (in.blgp < 4 ? from[in.blgp] : int(in.blgp) - 4) * 16 + lane % 16;
}
void check_permutes(const Inst& in, int blocks, bool lane_groups) {
  if ((1 << in.cbsz) > blocks || in.abid >> in.cbsz)
    throw Fault("unimplemented", "cbsz or abid beyond the blocks of a matrix instruction");
  if (in.blgp && !lane_groups)
    throw Fault("unimplemented", "blgp on a matrix instruction without lane groups");
}

// Element e of the lanes that stand in for N lanes of B.
template <int N, Element kind>
[[gnu::noinline]] void permuted(Wave& w, const Inst& in, int lane, int e, float* out) {
  for (int part = 0; part < N; part += 16)
    elements<16, kind>(w, in.src[1].code, b_lane(in, lane + part), e, out + part);
}

// --- ordinary float32 accumulation. Lane group g = lane / N holds `PerLane` consecutive k, from k
// = PerLane * g on; with several blocks, group g is block g. ASSUMED: products exact, added in
// float32 in the order of k.
template <int N, int PerLane, int Blocks, Element ka, Element kb>
void plain(Wave& w, const Inst& in) {
  no_modifiers(in);
  check_permutes(in, Blocks, Blocks > 1 || ka == Element::f32);
  thread_local Operands<float, N> m;
  constexpr int kGroups = 64 / N / Blocks, K = PerLane * kGroups;
  alignas(64) float acc[Blocks][N][N];
  for (int block = 0; block < Blocks; ++block) {
    for (int g = 0; g < kGroups; ++g)
      for (int e = 0; e < PerLane; ++e) {
        int a_lane = N * (g + a_block(in, block) * kGroups), lane = N * (g + block * kGroups);
        elements<N, ka>(w, in.src[0].code, a_lane, e, m.a[PerLane * g + e]);
        if (in.blgp)
          permuted<N, kb>(w, in, lane, e, m.b[PerLane * g + e]);
        else
          elements<N, kb>(w, in.src[1].code, lane, e, m.b[PerLane * g + e]);
      }
    read_c<N>(w, in, block, acc[block]);
    for (int i = 0; i < N; i += kRows) {
      if (ka == Element::f32)
        multiply<true, float, N>(m.a, m.b, i, 0, K, &acc[block][i]);
      else
        multiply<false, float, N>(m.a, m.b, i, 0, K, &acc[block][i]);
    }
  }
  for (int block = 0; block < Blocks; ++block) write_d<N>(w, in, block, acc[block]);
}
#define PLAIN(name, N, per_lane, blocks, ka, kb) \
  EMU_HANDLER(name, (plain<N, per_lane, blocks, Element::ka, Element::kb>))
PLAIN("v_mfma_f32_16x16x32_bf16", 16, 8, 1, bf16, bf16)
PLAIN("v_mfma_f32_32x32x16_bf16", 32, 8, 1, bf16, bf16)
PLAIN("v_mfma_f32_16x16x32_f16", 16, 8, 1, f16, f16)
PLAIN("v_mfma_f32_32x32x16_f16", 32, 8, 1, f16, f16)
PLAIN("v_mfma_f32_16x16x16_bf16", 16, 4, 1, bf16, bf16)
PLAIN("v_mfma_f32_32x32x8_bf16", 32, 4, 1, bf16, bf16)
PLAIN("v_mfma_f32_16x16x16_f16", 16, 4, 1, f16, f16)
PLAIN("v_mfma_f32_32x32x8_f16", 32, 4, 1, f16, f16)
PLAIN("v_mfma_f32_32x32x4_2b_bf16", 32, 4, 2, bf16, bf16)
PLAIN("v_mfma_f32_16x16x4_4b_bf16", 16, 4, 4, bf16, bf16)
PLAIN("v_mfma_f32_32x32x4_2b_f16", 32, 4, 2, f16, f16)
PLAIN("v_mfma_f32_16x16x4_4b_f16", 16, 4, 4, f16, f16)
PLAIN("v_mfma_f32_32x32x2_f32", 32, 1, 1, f32, f32)
PLAIN("v_mfma_f32_16x16x4_f32", 16, 1, 1, f32, f32)
PLAIN("v_mfma_f32_32x32x1_2b_f32", 32, 1, 2, f32, f32)
PLAIN("v_mfma_f32_16x16x1_4b_f32", 16, 1, 4, f32, f32)
PLAIN("v_mfma_f32_16x16x32_fp8_fp8", 16, 8, 1, fp8, fp8)
PLAIN("v_mfma_f32_16x16x32_fp8_bf8", 16, 8, 1, fp8, bf8)
PLAIN("v_mfma_f32_16x16x32_bf8_fp8", 16, 8, 1, bf8, fp8)
PLAIN("v_mfma_f32_16x16x32_bf8_bf8", 16, 8, 1, bf8, bf8)
PLAIN("v_mfma_f32_32x32x16_fp8_fp8", 32, 8, 1, fp8, fp8)
PLAIN("v_mfma_f32_32x32x16_fp8_bf8", 32, 8, 1, fp8, bf8)
PLAIN("v_mfma_f32_32x32x16_bf8_fp8", 32, 8, 1, bf8, fp8)
PLAIN("v_mfma_f32_32x32x16_bf8_bf8", 32, 8, 1, bf8, bf8)

// --- 4x4: sixteen blocks of four lanes; lane 4*block + index holds every k, D[i][j] is register i
// of lane 4*block + j
template <int K, Element kind>
void four(Wave& w, const Inst& in) {
  no_modifiers(in);
  check_permutes(in, 16, true);
  constexpr bool integer = kind == Element::i8;
  u32 d[4][kLanes];
  float a[4][kLanes], b[4][kLanes];
  for (int e = 0; e < K; ++e) {
    elements<64, kind>(w, in.src[0].code, 0, e, a[e]);
    elements<64, kind>(w, in.src[1].code, 0, e, b[e]);
  }
  for (int l = 0; l < kLanes; ++l)
    for (int i = 0; i < 4; ++i) {
      int code = in.src[2].code, row = 4 * a_block(in, l / 4) + i, column = b_lane(in, l);
      u32 c = code >= kVgpr ? w.vgpr(code + i)[l] : scalar32(w, in, code);
      float acc = integer ? 0.f : f32_of(c);
      for (int k = 0; k < K; ++k) acc = __builtin_fmaf(a[k][row], b[k][column], acc);
      u32 x = u32_of(acc);
      d[i][l] = integer ? c + u32(i32(acc)) : is_nan(x) ? 0x7fc00000u : x;
    }
  for (int i = 0; i < 4; ++i)
    for (int l = 0; l < kLanes; ++l) w.vgpr(in.dst.code + i)[l] = d[i][l];
}
#define FOUR(name, K, kind) EMU_HANDLER(name, (four<K, Element::kind>))
FOUR("v_mfma_f32_4x4x4_16b_f16", 4, f16)
FOUR("v_mfma_f32_4x4x4_16b_bf16", 4, bf16)
FOUR("v_mfma_f32_4x4x1_16b_f32", 1, f32)
FOUR("v_mfma_i32_4x4x4_16b_i8", 4, i8)

// --- float64. A and B: lane dim*(blocks*k + block) + index. D[i][j] of 16x16x4 is register pair
// i/4 of lane 16*(i%4) + j; of 4x4x4 it is lane 16*i + 4*block + j. BLGP negates A, B and C.
template <int N>
void float64(Wave& w, const Inst& in) {
  no_modifiers(in);
  check_permutes(in, 1, true);
  constexpr int kBlocks = N == 16 ? 1 : 4;
  auto at = [&](int code, int lane, int operand) {
    u64 x = w.vgpr(code)[lane] | (u64(w.vgpr(code + 1)[lane]) << 32);
    return bits<double>(x ^ (u64(in.blgp >> operand & 1) << 63));
  };
  auto place = [&](int block, int i, int j, int& pair) {
    pair = N == 16 ? i / 4 : 0;
    return 16 * (i % 4) + 4 * block + j;
  };
  double d[kBlocks][N][N];
  for (int block = 0; block < kBlocks; ++block)
    for (int i = 0; i < N; ++i)
      for (int j = 0; j < N; ++j) {
        int code = in.src[2].code, pair, lane = place(block, i, j, pair);
        double acc =
            code >= kVgpr
                ? at(code + 2 * pair, lane, 2)
                : bits<double>(scalar64(w, in, code, true) ^ (u64(in.blgp >> 2 & 1) << 63));
        for (int k = 0; k < 4; ++k) {
          int first = N * (kBlocks * k + block);
          acc = __builtin_fma(at(in.src[0].code, first + i, 0), at(in.src[1].code, first + j, 1),
                              acc);
        }
        d[block][i][j] = acc;
      }
  for (int block = 0; block < kBlocks; ++block)
    for (int i = 0; i < N; ++i)
      for (int j = 0; j < N; ++j) {
        int pair, lane = place(block, i, j, pair);
        u64 x = bits<u64>(d[block][i][j]);
        w.vgpr(in.dst.code + 2 * pair)[lane] = u32(x);
        w.vgpr(in.dst.code + 2 * pair + 1)[lane] = u32(x >> 32);
      }
}
EMU_HANDLER("v_mfma_f64_16x16x4_f64", float64<16>)
EMU_HANDLER("v_mfma_f64_4x4x4_4b_f64", float64<4>)

// --- int8
template <int N>
void int8(Wave& w, const Inst& in, int per_lane, int blocks) {
  no_modifiers(in);
  check_permutes(in, blocks, blocks > 1);
  int groups = 64 / N / blocks, regs = N * N / 64;
  u32 acc[4][N][N];
  auto at = [&](int code, int lane, int e) {
    return i32(i8(w.vgpr(code + e / 4)[lane] >> (8 * (e & 3))));
  };
  for (int block = 0; block < blocks; ++block) {
    int c = in.src[2].code, a_first = N * groups * a_block(in, block), b_first = N * groups * block;
    for (int i = 0; i < N; ++i)
      for (int j = 0; j < N; ++j) {
        u32 sum = c >= kVgpr ? w.vgpr(c + block * regs + d_reg(N, i))[d_lane(N, i, j)]
                             : scalar32(w, in, c);
        for (int g = 0; g < groups; ++g) {
          int a_lane = a_first + N * g + i, lane = b_lane(in, b_first + N * g + j);
          for (int e = 0; e < per_lane; ++e)
            sum += u32(at(in.src[0].code, a_lane, e) * at(in.src[1].code, lane, e));
        }
        acc[block][i][j] = sum;
      }
  }
  for (int block = 0; block < blocks; ++block)
    for (int i = 0; i < N; ++i)
      for (int j = 0; j < N; ++j)
        w.vgpr(in.dst.code + block * regs + d_reg(N, i))[d_lane(N, i, j)] = acc[block][i][j];
}
#define INT8(name, N, per_lane, blocks) \
  EMU_HANDLER(name, [](Wave& w, const Inst& in) { int8<N>(w, in, per_lane, blocks); })
INT8("v_mfma_i32_16x16x64_i8", 16, 16, 1)
INT8("v_mfma_i32_32x32x32_i8", 32, 16, 1)
INT8("v_mfma_i32_16x16x32_i8", 16, 8, 1)
INT8("v_mfma_i32_32x32x16_i8", 32, 8, 1)
INT8("v_mfma_i32_16x16x4_4b_i8", 16, 4, 4)
INT8("v_mfma_i32_32x32x4_2b_i8", 32, 4, 2)

}  // namespace
}  // namespace emu
