// SPDX-License-Identifier: MIT
// Matrix instructions. They ignore EXEC and MODE, round to nearest even and keep denormals.
//
// Layouts: row i of A (column j of B) lives in lanes with lane % dim == i. D[i][j] lives in
//   16x16: lane 16*(i/4) + j, register i%4;   32x32: lane 32*((i/4)%2) + j, register 4*(i/8) + i%4.
#include "lanes.h"

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

void no_modifiers(const Inst& in) {
  if (in.neg || in.abs || in.clamp)
    throw Fault("unimplemented", "modifiers on a matrix instruction");
}
void no_broadcast(const Inst& in) {
  if (in.cbsz || in.abid || in.blgp)
    throw Fault("unimplemented", "cbsz, abid or blgp lane permutes of a matrix instruction");
}

inline int d_lane(int dim, int i, int j) {
  return dim == 16 ? 16 * (i / 4) + j : 32 * ((i / 4) % 2) + j;
}
inline int d_reg(int dim, int i) { return dim == 16 ? i % 4 : 4 * (i / 8) + i % 4; }

template <int N>
void read_c(Wave& w, const Inst& in, int block, float (*c)[N]) {
  int code = in.src[2].code, regs = N * N / 64;
  if (code < kVgpr) {
    float x = f32_of(scalar32(w, in, code));
    for (int i = 0; i < N; ++i)
      for (int j = 0; j < N; ++j) c[i][j] = x;
    return;
  }
  for (int i = 0; i < N; ++i) {
    const u32* row = &w.vgpr(code + block * regs + d_reg(N, i))[d_lane(N, i, 0)];
    for (int j = 0; j < N; ++j) c[i][j] = f32_of(row[j]);
  }
}
template <int N>
void write_d(Wave& w, const Inst& in, int block, const float (*d)[N]) {
  int regs = N * N / 64;
  for (int i = 0; i < N; ++i) {
    u32* row = &w.vgpr(in.dst.code + block * regs + d_reg(N, i))[d_lane(N, i, 0)];
    for (int j = 0; j < N; ++j) {
      u32 x = u32_of(d[i][j]);
      row[j] = is_nan(x) ? 0x7fc00000u : x;
    }
  }
}

// --- f8f6f4, with and without block scales
struct Tables {
  float value[5][256];
  Tables() {
    const Narrow* formats[5] = {&kFp8, &kBf8, &kFp6, &kBf6, &kFp4};
    for (int f = 0; f < 5; ++f)
      for (u32 code = 0; code < 256; ++code)
        value[f][code] = code < (1u << formats[f]->width()) ? float(widen(*formats[f], code)) : 0.f;
  }
};
const Tables& tables() {
  static const Tables t;
  return t;
}
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

// --- ordinary float32 accumulation. Lane group g = lane / N holds `per_lane` consecutive k, from k
// = per_lane * g on; with several blocks, group g is block g. ASSUMED: products exact, added in
// float32 in the order of k.
enum class Kind16 { bf16, f16, f32, fp8, bf8 };
// Element e of N neighbouring lanes.
template <int N>
void elements(Wave& w, int code, int lane, int e, Kind16 kind, float* out) {
  bool small = kind == Kind16::bf16 || kind == Kind16::f16;
  const u32* x = &w.vgpr(code + (kind == Kind16::f32 ? e : small ? e / 2 : e / 4))[lane];
  int shift = kind == Kind16::f32 ? 0 : small ? 16 * (e & 1) : 8 * (e & 3);
  const float* table = tables().value[kind == Kind16::bf8];
  switch (kind) {
    case Kind16::bf16:
      for (int i = 0; i < N; ++i) out[i] = of_bf16((x[i] >> shift) & 0xffff);
      break;
    case Kind16::f16:
      for (int i = 0; i < N; ++i) out[i] = of_f16((x[i] >> shift) & 0xffff);
      break;
    case Kind16::f32:
      for (int i = 0; i < N; ++i) out[i] = f32_of(x[i]);
      break;
    default:
      for (int i = 0; i < N; ++i) out[i] = table[(x[i] >> shift) & 255];
  }
}
template <int N>
void plain(Wave& w, const Inst& in, int per_lane, int blocks, Kind16 ka, Kind16 kb) {
  no_modifiers(in);
  no_broadcast(in);
  thread_local Operands<float, N> m;
  int groups = 64 / N / blocks, K = per_lane * groups;
  alignas(64) float acc[4][N][N];
  for (int block = 0; block < blocks; ++block) {
    for (int g = 0; g < groups; ++g)
      for (int e = 0; e < per_lane; ++e) {
        int lane = N * (g + block * groups);
        elements<N>(w, in.src[0].code, lane, e, ka, m.a[per_lane * g + e]);
        elements<N>(w, in.src[1].code, lane, e, kb, m.b[per_lane * g + e]);
      }
    read_c<N>(w, in, block, acc[block]);
    for (int i = 0; i < N; i += kRows) {
      if (ka == Kind16::f32)
        multiply<true, float, N>(m.a, m.b, i, 0, K, &acc[block][i]);
      else
        multiply<false, float, N>(m.a, m.b, i, 0, K, &acc[block][i]);
    }
  }
  for (int block = 0; block < blocks; ++block) write_d<N>(w, in, block, acc[block]);
}
#define PLAIN(name, N, per_lane, blocks, ka, kb)               \
  EMU_HANDLER(name, [](Wave& w, const Inst& in) {              \
    plain<N>(w, in, per_lane, blocks, Kind16::ka, Kind16::kb); \
  })
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
void four(Wave& w, const Inst& in, int K, Kind16 kind) {
  no_modifiers(in);
  no_broadcast(in);
  float d[4][kLanes], a[4][kLanes], b[4][kLanes];
  for (int e = 0; e < K; ++e) {
    elements<64>(w, in.src[0].code, 0, e, kind, a[e]);
    elements<64>(w, in.src[1].code, 0, e, kind, b[e]);
  }
  for (int l = 0; l < kLanes; ++l)
    for (int i = 0; i < 4; ++i) {
      int code = in.src[2].code;
      float acc = f32_of(code >= kVgpr ? w.vgpr(code + i)[l] : scalar32(w, in, code));
      for (int k = 0; k < K; ++k) acc = __builtin_fmaf(a[k][(l & ~3) + i], b[k][l], acc);
      d[i][l] = acc;
    }
  for (int i = 0; i < 4; ++i)
    for (int l = 0; l < kLanes; ++l)
      w.vgpr(in.dst.code + i)[l] = is_nan(u32_of(d[i][l])) ? 0x7fc00000u : u32_of(d[i][l]);
}
EMU_HANDLER("v_mfma_f32_4x4x4_16b_f16",
            [](Wave& w, const Inst& in) { four(w, in, 4, Kind16::f16); })
EMU_HANDLER("v_mfma_f32_4x4x4_16b_bf16",
            [](Wave& w, const Inst& in) { four(w, in, 4, Kind16::bf16); })
EMU_HANDLER("v_mfma_f32_4x4x1_16b_f32",
            [](Wave& w, const Inst& in) { four(w, in, 1, Kind16::f32); })

// --- float64 16x16x4: lane 16*k + index; D[i][j] is register pair i/4 of lane 16*(i%4) + j
EMU_HANDLER("v_mfma_f64_16x16x4_f64", [](Wave& w, const Inst& in) {
  no_modifiers(in);
  no_broadcast(in);
  auto at = [&](int code, int lane) {
    return bits<double>(w.vgpr(code)[lane] | (u64(w.vgpr(code + 1)[lane]) << 32));
  };
  double d[16][16];
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j) {
      int code = in.src[2].code, lane = 16 * (i % 4) + j;
      d[i][j] =
          code >= kVgpr ? at(code + 2 * (i / 4), lane) : bits<double>(scalar64(w, in, code, true));
      for (int k = 0; k < 4; ++k)
        d[i][j] =
            __builtin_fma(at(in.src[0].code, 16 * k + i), at(in.src[1].code, 16 * k + j), d[i][j]);
    }
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j) {
      u64 x = bits<u64>(d[i][j]);
      w.vgpr(in.dst.code + 2 * (i / 4))[16 * (i % 4) + j] = u32(x);
      w.vgpr(in.dst.code + 2 * (i / 4) + 1)[16 * (i % 4) + j] = u32(x >> 32);
    }
})

// --- int8
template <int N>
void int8(Wave& w, const Inst& in, int per_lane) {
  no_modifiers(in);
  no_broadcast(in);
  int groups = 64 / N;
  u32 acc[N][N];
  for (int i = 0; i < N; ++i)
    for (int j = 0; j < N; ++j)
      acc[i][j] = in.src[2].code >= kVgpr ? w.vgpr(in.src[2].code + d_reg(N, i))[d_lane(N, i, j)]
                                          : scalar32(w, in, in.src[2].code);
  auto at = [&](int code, int lane, int e) {
    return i32(i8(w.vgpr(code + e / 4)[lane] >> (8 * (e & 3))));
  };
  for (int i = 0; i < N; ++i)
    for (int j = 0; j < N; ++j)
      for (int g = 0; g < groups; ++g)
        for (int e = 0; e < per_lane; ++e)
          acc[i][j] += u32(at(in.src[0].code, N * g + i, e) * at(in.src[1].code, N * g + j, e));
  for (int i = 0; i < N; ++i)
    for (int j = 0; j < N; ++j) w.vgpr(in.dst.code + d_reg(N, i))[d_lane(N, i, j)] = acc[i][j];
}
EMU_HANDLER("v_mfma_i32_16x16x64_i8", [](Wave& w, const Inst& in) { int8<16>(w, in, 16); })
EMU_HANDLER("v_mfma_i32_32x32x32_i8", [](Wave& w, const Inst& in) { int8<32>(w, in, 16); })
EMU_HANDLER("v_mfma_i32_16x16x32_i8", [](Wave& w, const Inst& in) { int8<16>(w, in, 8); })
EMU_HANDLER("v_mfma_i32_32x32x16_i8", [](Wave& w, const Inst& in) { int8<32>(w, in, 8); })

}  // namespace
}  // namespace emu
