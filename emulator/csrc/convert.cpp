// SPDX-License-Identifier: MIT
// Converters between float32/f16/bf16 and FP8, BF8, FP6, BF6, FP4, with and without block scale.
#include "lanes.h"

namespace emu {
namespace {

constexpr Type U = Type::u32, B = Type::f32_bits;

enum class Float { f32, f16, bf16 };
template <Float K>
inline double value(u32 raw) {
  return K == Float::f32   ? f32_of(raw)
         : K == Float::f16 ? of_f16(raw & 0xffff)
                           : of_bf16(raw & 0xffff);
}
template <Float K>
inline u32 encode(double x) {
  if (K == Float::f16) return f16_from_double(x);
  u32 f = u32_of(float(x));
  if (is_nan(f)) f = 0x7fc00000u;
  return K == Float::f32 ? f : bf16_of(f32_of(f));
}
inline u32 prng(u32 x) { return (x << 1) ^ (x >> 31 ? 197u : 0u); }
inline int exponent(u32 scale) { return int((scale >> 23) & 255); }

// MODE.FP16_OVFL makes FP8 and BF8 saturate. ASSUMED for the scaled forms as well.
inline Overflow overflow(const Wave& w) {
  return (w.mode >> 23) & 1 ? Overflow::saturate : Overflow::special;
}

// Writes `width` bits at bit `at` of the destination, other bits kept, where EXEC is set and
// `write` allows.
void merge(Wave& w, const Inst& in, const u32* values, u64 write, int at, int width) {
  u32* d = w.vgpr(in.dst.code);
  u32 ones = (width == 32 ? ~0u : (1u << width) - 1) << at;
  const u32* m = w.exec_mask(w.exec() & write);
  for (int i = 0; i < kLanes; ++i) {
    u32 keep = ~(ones & m[i]);
    d[i] = (d[i] & keep) | ((values[i] << at) & ~keep);
  }
}
// ASSUMED: a narrowing with scale exponent 255 leaves the destination as it was; widening gives
// NaN.
u64 finite_scales(const u32* scale) {
  u64 ok = 0;
  for (int i = 0; i < kLanes; ++i) ok |= u64(exponent(scale[i]) != 255) << i;
  return ok;
}

// FP4 code of x * 2^(127-E), ties to even, by its thresholds. NaN gives 0 (ASSUMED).
inline u32 fp4_code(double x, double inverse) {
  double a = x * inverse;
  u32 sign = a != a ? 0u : u32(bits<u64>(x) >> 63) << 3;
  a = std::fabs(a);
  return sign | u32((a > 0.25) + (a >= 0.75) + (a > 1.25) + (a >= 1.75) + (a > 2.5) + (a >= 3.5) +
                    (a > 5.0));
}
inline double inverse_scale(u32 scale) {
  return bits<double>(u64(1023 + 127 - exponent(scale)) << 52);
}

template <Float K>
void pk_fp4(Wave& w, const Inst& in) {
  Lanes b0, b1, b2, out;
  const u32 *x, *y, *s;
  if (K == Float::f32) {
    x = source<B>(w, in, 0, b0), y = source<B>(w, in, 1, b1), s = source<U>(w, in, 2, b2);
  } else {
    x = y = source<U>(w, in, 0, b0), s = source<U>(w, in, 1, b1);
  }
  for (int i = 0; i < kLanes; ++i) {
    double inverse = inverse_scale(s[i]);
    double lo = value<K>(x[i]), hi = value<K>(K == Float::f32 ? y[i] : y[i] >> 16);
    out.x[i] = fp4_code(lo, inverse) | (fp4_code(hi, inverse) << 4);
  }
  merge(w, in, out.x, finite_scales(s), 8 * int((in.opsel >> 2) & 3), 8);
}
EMU_HANDLER("v_cvt_scalef32_pk_fp4_f32", pk_fp4<Float::f32>)
EMU_HANDLER("v_cvt_scalef32_pk_fp4_f16", pk_fp4<Float::f16>)
EMU_HANDLER("v_cvt_scalef32_pk_fp4_bf16", pk_fp4<Float::bf16>)

// Stochastic rounding adds the seed to the discarded bits; the second element uses prng(seed).
// ASSUMED bit use.
template <Float K>
void sr_pk_fp4(Wave& w, const Inst& in) {
  Lanes b1, b2, out;
  if (in.src[0].code < kVgpr)
    throw Fault("unimplemented", "scalar source of a stochastic FP4 converter");
  const u32 *x = w.vgpr(in.src[0].code), *y = K == Float::f32 ? w.vgpr(in.src[0].code + 1) : x;
  const u32 *seed = source<U>(w, in, 1, b1), *s = source<U>(w, in, 2, b2);
  if (in.neg || in.abs) throw Fault("unimplemented", "modifiers on a stochastic FP4 converter");
  for (int i = 0; i < kLanes; ++i) {
    double inverse = inverse_scale(s[i]);
    double lo = value<K>(x[i]) * inverse,
           hi = value<K>(K == Float::f32 ? y[i] : y[i] >> 16) * inverse;
    out.x[i] = narrow(kFp4, lo, Overflow::saturate, seed[i]) |
               (narrow(kFp4, hi, Overflow::saturate, prng(seed[i])) << 4);
  }
  merge(w, in, out.x, finite_scales(s), 8 * int((in.opsel >> 2) & 3), 8);
}
EMU_HANDLER("v_cvt_scalef32_sr_pk_fp4_f32", sr_pk_fp4<Float::f32>)
EMU_HANDLER("v_cvt_scalef32_sr_pk_fp4_f16", sr_pk_fp4<Float::f16>)
EMU_HANDLER("v_cvt_scalef32_sr_pk_fp4_bf16", sr_pk_fp4<Float::bf16>)

template <Float K>
void pk_8bit(Wave& w, const Inst& in, const Narrow& f) {
  Lanes b0, b1, b2, out;
  const u32 *x, *y, *s;
  if (K == Float::f32) {
    x = source<B>(w, in, 0, b0), y = source<B>(w, in, 1, b1), s = source<U>(w, in, 2, b2);
  } else {
    x = y = source<U>(w, in, 0, b0), s = source<U>(w, in, 1, b1);
  }
  for (int i = 0; i < kLanes; ++i) {
    double inverse = inverse_scale(s[i]);
    out.x[i] =
        narrow(f, value<K>(x[i]) * inverse, overflow(w)) |
        (narrow(f, value<K>(K == Float::f32 ? y[i] : y[i] >> 16) * inverse, overflow(w)) << 8);
  }
  merge(w, in, out.x, finite_scales(s), 16 * int((in.opsel >> 3) & 1), 16);
}
template <Float K>
void sr_8bit(Wave& w, const Inst& in, const Narrow& f) {
  Lanes b0, b1, b2, out;
  const u32* x = K == Float::f32 ? source<B>(w, in, 0, b0) : source<U>(w, in, 0, b0);
  const u32 *seed = source<U>(w, in, 1, b1), *s = source<U>(w, in, 2, b2);
  for (int i = 0; i < kLanes; ++i) {
    u32 raw = K != Float::f32 && (in.opsel & 1) ? x[i] >> 16 : x[i];
    out.x[i] = narrow(f, value<K>(raw) * inverse_scale(s[i]), overflow(w), seed[i]);
  }
  merge(w, in, out.x, finite_scales(s), 8 * int((in.opsel >> 2) & 3), 8);
}
#define NARROW_8(fmt, K, kname)                                                \
  EMU_HANDLER("v_cvt_scalef32_pk_fp8_" kname,                                  \
              [](Wave& w, const Inst& in) { pk_8bit<Float::K>(w, in, kFp8); }) \
  EMU_HANDLER("v_cvt_scalef32_pk_bf8_" kname,                                  \
              [](Wave& w, const Inst& in) { pk_8bit<Float::K>(w, in, kBf8); }) \
  EMU_HANDLER("v_cvt_scalef32_sr_fp8_" kname,                                  \
              [](Wave& w, const Inst& in) { sr_8bit<Float::K>(w, in, kFp8); }) \
  EMU_HANDLER("v_cvt_scalef32_sr_bf8_" kname,                                  \
              [](Wave& w, const Inst& in) { sr_8bit<Float::K>(w, in, kBf8); })
NARROW_8(0, f32, "f32")
NARROW_8(0, f16, "f16")
NARROW_8(0, bf16, "bf16")

inline double scale_value(u32 scale) {
  return exponent(scale) == 255 ? std::nan("") : std::ldexp(1.0, exponent(scale) - 127);
}

// Two neighbouring codes of `width` bits to two results. The source bits start at opsel * 2 *
// width.
template <Float K>
void widen_pair(Wave& w, const Inst& in, const Narrow& f, int first_bit, const u32* scale) {
  Lanes b0, lo, hi;
  const u32* x = source<U>(w, in, 0, b0);
  int n = f.width();
  u32 ones = (1u << n) - 1;
  for (int i = 0; i < kLanes; ++i) {
    double factor = scale ? scale_value(scale[i]) : 1.0;
    u32 a = encode<K>(widen(f, (x[i] >> first_bit) & ones) * factor);
    u32 b = encode<K>(widen(f, (x[i] >> (first_bit + n)) & ones) * factor);
    lo.x[i] = K == Float::f32 ? a : a | (b << 16);
    hi.x[i] = b;
  }
  store_masked(w, w.vgpr(in.dst.code), lo.x, w.exec());
  if (K == Float::f32) store_masked(w, w.vgpr(in.dst.code + 1), hi.x, w.exec());
}
template <Float K>
void pk_from_fp4(Wave& w, const Inst& in) {
  Lanes b1;
  widen_pair<K>(w, in, kFp4, 8 * int(in.opsel & 3), source<U>(w, in, 1, b1));
}
EMU_HANDLER("v_cvt_scalef32_pk_f32_fp4", pk_from_fp4<Float::f32>)
EMU_HANDLER("v_cvt_scalef32_pk_f16_fp4", pk_from_fp4<Float::f16>)
EMU_HANDLER("v_cvt_scalef32_pk_bf16_fp4", pk_from_fp4<Float::bf16>)
template <Float K>
void pk_from_8bit(Wave& w, const Inst& in, const Narrow& f) {
  Lanes b1;
  widen_pair<K>(w, in, f, 16 * int(in.opsel & 1), source<U>(w, in, 1, b1));
}
#define WIDEN_8(K, kname)                                                           \
  EMU_HANDLER("v_cvt_scalef32_pk_" kname "_fp8",                                    \
              [](Wave& w, const Inst& in) { pk_from_8bit<Float::K>(w, in, kFp8); }) \
  EMU_HANDLER("v_cvt_scalef32_pk_" kname "_bf8",                                    \
              [](Wave& w, const Inst& in) { pk_from_8bit<Float::K>(w, in, kBf8); })
WIDEN_8(f32, "f32")
WIDEN_8(f16, "f16")
WIDEN_8(bf16, "bf16")

template <Float K>
void one_from_8bit(Wave& w, const Inst& in, const Narrow& f) {
  Lanes b0, b1, out;
  const u32 *x = source<U>(w, in, 0, b0), *s = source<U>(w, in, 1, b1);
  int at = 8 * int(in.opsel & 3);
  for (int i = 0; i < kLanes; ++i)
    out.x[i] = encode<K>(widen(f, (x[i] >> at) & 255) * scale_value(s[i]));
  if (K == Float::f32)
    store_masked(w, w.vgpr(in.dst.code), out.x, w.exec());
  else
    merge(w, in, out.x, kAllLanes, 16 * int((in.opsel >> 3) & 1), 16);
}
EMU_HANDLER("v_cvt_scalef32_f32_fp8",
            [](Wave& w, const Inst& in) { one_from_8bit<Float::f32>(w, in, kFp8); })
EMU_HANDLER("v_cvt_scalef32_f32_bf8",
            [](Wave& w, const Inst& in) { one_from_8bit<Float::f32>(w, in, kBf8); })
EMU_HANDLER("v_cvt_scalef32_f16_fp8",
            [](Wave& w, const Inst& in) { one_from_8bit<Float::f16>(w, in, kFp8); })
EMU_HANDLER("v_cvt_scalef32_f16_bf8",
            [](Wave& w, const Inst& in) { one_from_8bit<Float::f16>(w, in, kBf8); })

// --- unscaled FP8 and BF8
void plain_pk(Wave& w, const Inst& in, const Narrow& f) {
  Lanes b0, b1, out;
  const u32 *x = source<B>(w, in, 0, b0), *y = source<B>(w, in, 1, b1);
  for (int i = 0; i < kLanes; ++i)
    out.x[i] = narrow(f, f32_of(x[i]), overflow(w)) | (narrow(f, f32_of(y[i]), overflow(w)) << 8);
  merge(w, in, out.x, kAllLanes, 16 * int((in.opsel >> 3) & 1), 16);
}
void plain_sr(Wave& w, const Inst& in, const Narrow& f) {
  Lanes b0, b1, out;
  const u32 *x = source<B>(w, in, 0, b0), *seed = source<U>(w, in, 1, b1);
  for (int i = 0; i < kLanes; ++i) out.x[i] = narrow(f, f32_of(x[i]), overflow(w), seed[i]);
  merge(w, in, out.x, kAllLanes, 8 * int((in.opsel >> 2) & 3), 8);
}
EMU_HANDLER("v_cvt_pk_fp8_f32", [](Wave& w, const Inst& in) { plain_pk(w, in, kFp8); })
EMU_HANDLER("v_cvt_pk_bf8_f32", [](Wave& w, const Inst& in) { plain_pk(w, in, kBf8); })
EMU_HANDLER("v_cvt_sr_fp8_f32", [](Wave& w, const Inst& in) { plain_sr(w, in, kFp8); })
EMU_HANDLER("v_cvt_sr_bf8_f32", [](Wave& w, const Inst& in) { plain_sr(w, in, kBf8); })
// SDWA (source select) or VOP3 op_sel choose the byte or word.
void plain_one(Wave& w, const Inst& in, const Narrow& f) {
  Lanes b0, out;
  const u32* x = source<U>(w, in, 0, b0);
  int at = in.sdwa ? 0 : 8 * int(in.opsel & 3);
  for (int i = 0; i < kLanes; ++i) out.x[i] = encode<Float::f32>(widen(f, (x[i] >> at) & 255));
  finish<B>(w, in, out.x);
  store32(w, in, out.x);
}
void plain_two(Wave& w, const Inst& in, const Narrow& f) {
  widen_pair<Float::f32>(w, in, f, in.sdwa ? 0 : 16 * int(in.opsel & 1), nullptr);
}
EMU_HANDLER("v_cvt_f32_fp8", [](Wave& w, const Inst& in) { plain_one(w, in, kFp8); })
EMU_HANDLER("v_cvt_f32_bf8", [](Wave& w, const Inst& in) { plain_one(w, in, kBf8); })
EMU_HANDLER("v_cvt_pk_f32_fp8", [](Wave& w, const Inst& in) { plain_two(w, in, kFp8); })
EMU_HANDLER("v_cvt_pk_f32_bf8", [](Wave& w, const Inst& in) { plain_two(w, in, kBf8); })

// --- FP6 and BF6: 32 codes of 6 bits in 6 registers
void put6(u32 (*d)[kLanes], int element, int lane, u32 code) {
  int bit = 6 * element, word = bit / 32, shift = bit % 32;
  d[word][lane] |= code << shift;
  if (shift > 26) d[word + 1][lane] |= code >> (32 - shift);
}
u32 get6(Wave& w, int code, int element, int lane) {
  int bit = 6 * element, word = bit / 32, shift = bit % 32;
  u64 both = w.vgpr(code + word)[lane];
  if (shift > 26) both |= u64(w.vgpr(code + word + 1)[lane]) << 32;
  return u32(both >> shift) & 63;
}
template <class Element>
void narrow6(Wave& w, const Inst& in, const Narrow& f, const u32* scale, const u32* seed,
             Element element) {
  u32 out[6][kLanes] = {};
  for (int l = 0; l < kLanes; ++l) {
    double inverse = inverse_scale(scale[l]);
    u32 random = seed ? seed[l] : 0;
    for (int e = 0; e < 32; ++e) {
      put6(out, e, l,
           narrow(f, element(e, l) * inverse, Overflow::saturate, seed ? i64(random) : -1));
      random = prng(random);
    }
  }
  for (int r = 0; r < 6; ++r)
    store_masked(w, w.vgpr(in.dst.code + r), out[r], w.exec() & finite_scales(scale));
}
void two_pk16(Wave& w, const Inst& in, const Narrow& f) {  // src0 and src1 interleaved
  Lanes b2;
  narrow6(w, in, f, source<U>(w, in, 2, b2), nullptr,
          [&](int e, int l) { return double(f32_of(w.vgpr(in.src[e & 1].code + e / 2)[l])); });
}
template <Float K>
double element_of(Wave& w, int code, int e, int l) {
  return K == Float::f32 ? value<K>(w.vgpr(code + e)[l])
                         : value<K>(w.vgpr(code + e / 2)[l] >> (16 * (e & 1)));
}
template <Float K>
void pk32(Wave& w, const Inst& in, const Narrow& f, bool stochastic) {
  Lanes b1, b2;
  const u32* one = source<U>(w, in, 1, b1);
  const u32* scale = stochastic ? source<U>(w, in, 2, b2) : one;
  narrow6(w, in, f, scale, stochastic ? one : nullptr,
          [&](int e, int l) { return element_of<K>(w, in.src[0].code, e, l); });
}
template <Float K>
void from_pk32(Wave& w, const Inst& in, const Narrow& f) {
  Lanes b1, out[32];
  const u32* scale = source<U>(w, in, 1, b1);
  for (int l = 0; l < kLanes; ++l)
    for (int e = 0; e < 32; ++e) {
      u32 r = encode<K>(widen(f, get6(w, in.src[0].code, e, l)) * scale_value(scale[l]));
      if (K == Float::f32)
        out[e].x[l] = r;
      else if (e & 1)
        out[e / 2].x[l] |= r << 16;
      else
        out[e / 2].x[l] = r;
    }
  for (int r = 0; r < (K == Float::f32 ? 32 : 16); ++r)
    store_masked(w, w.vgpr(in.dst.code + r), out[r].x, w.exec());
}
#define SIX(fname, f)                                                              \
  EMU_HANDLER("v_cvt_scalef32_2xpk16_" fname "_f32",                               \
              [](Wave& w, const Inst& in) { two_pk16(w, in, f); })                 \
  EMU_HANDLER("v_cvt_scalef32_pk32_" fname "_f16",                                 \
              [](Wave& w, const Inst& in) { pk32<Float::f16>(w, in, f, false); })  \
  EMU_HANDLER("v_cvt_scalef32_pk32_" fname "_bf16",                                \
              [](Wave& w, const Inst& in) { pk32<Float::bf16>(w, in, f, false); }) \
  EMU_HANDLER("v_cvt_scalef32_sr_pk32_" fname "_f32",                              \
              [](Wave& w, const Inst& in) { pk32<Float::f32>(w, in, f, true); })   \
  EMU_HANDLER("v_cvt_scalef32_sr_pk32_" fname "_f16",                              \
              [](Wave& w, const Inst& in) { pk32<Float::f16>(w, in, f, true); })   \
  EMU_HANDLER("v_cvt_scalef32_sr_pk32_" fname "_bf16",                             \
              [](Wave& w, const Inst& in) { pk32<Float::bf16>(w, in, f, true); })  \
  EMU_HANDLER("v_cvt_scalef32_pk32_f32_" fname,                                    \
              [](Wave& w, const Inst& in) { from_pk32<Float::f32>(w, in, f); })    \
  EMU_HANDLER("v_cvt_scalef32_pk32_f16_" fname,                                    \
              [](Wave& w, const Inst& in) { from_pk32<Float::f16>(w, in, f); })    \
  EMU_HANDLER("v_cvt_scalef32_pk32_bf16_" fname,                                   \
              [](Wave& w, const Inst& in) { from_pk32<Float::bf16>(w, in, f); })
SIX("fp6", kFp6)
SIX("bf6", kBf6)

// --- stochastic rounding to 16 bits. ASSUMED: the seed's top bits meet the discarded bits.
EMU_HANDLER("v_cvt_sr_bf16_f32", [](Wave& w, const Inst& in) {
  Lanes b0, b1, out;
  const u32 *x = source<B>(w, in, 0, b0), *seed = source<U>(w, in, 1, b1);
  for (int i = 0; i < kLanes; ++i)
    out.x[i] = is_nan(x[i])                          ? bf16_of(f32_of(x[i]))
               : (x[i] & 0x7f800000u) == 0x7f800000u ? x[i] >> 16
                                                     : (x[i] + (seed[i] >> 16)) >> 16;
  merge(w, in, out.x, kAllLanes, 16 * int((in.opsel >> 3) & 1), 16);
})

}  // namespace
}  // namespace emu
