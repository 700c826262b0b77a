// SPDX-License-Identifier: MIT
// VOP3P: packed f32, f16 and 16-bit integers, mixed precision, dot products.
// In these forms `neg` is neg_lo, `abs` holds neg_hi, `opsel` and `opsel_hi` choose the half per
// source.
#include "lanes.h"

namespace emu {
namespace {

inline u32 made(float r, u32 a, u32 b, u32 c = 0) {
  u32 x = u32_of(r);
  return is_nan(x) && !is_nan(a) && !is_nan(b) && !is_nan(c) ? 0x7fc00000u : x;
}

// The dword of source i that result half `hi` uses, with its sign modifier.
const u32* packed_f32(Wave& w, const Inst& in, int i, int hi, Lanes& buffer) {
  int code = in.src[i].code, dword = ((hi ? in.opsel_hi : in.opsel) >> i) & 1;
  const u32* p;
  if (code >= kVgpr) {
    p = w.vgpr(code + dword);
  } else {
    if (code >= 128 && dword)
      throw Fault("unimplemented", "the high half of an inline constant in packed f32 (not known)");
    splat(buffer.x, code < 128 ? w.s[code + dword] : scalar32(w, in, code));
    p = buffer.x;
  }
  if (((hi ? in.abs : in.neg) >> i) & 1) {
    for (int l = 0; l < kLanes; ++l) buffer.x[l] = p[l] ^ 0x80000000u;
    p = buffer.x;
  }
  return p;
}
template <int N, class Fn>
void packed32(Wave& w, const Inst& in, Fn fn) {
  Lanes out[2], b0, b1, b2;
  auto operand = [&](int i, int hi, Lanes& buffer) {
    const u32* p = packed_f32(w, in, i, hi, buffer);
    if (!w.flush_sources) return p;
    for (int l = 0; l < kLanes; ++l) buffer.x[l] = flush(p[l]);
    return static_cast<const u32*>(buffer.x);
  };
  for (int hi = 0; hi < 2; ++hi) {
    const u32* a = operand(0, hi, b0);
    const u32* b = operand(1, hi, b1);
    const u32* c = N > 2 ? operand(2, hi, b2) : a;
    for (int i = 0; i < kLanes; ++i) out[hi].x[i] = fn(a[i], b[i], c[i]);
    if (in.clamp)
      for (int i = 0; i < kLanes; ++i) {
        float x = f32_of(out[hi].x[i]);
        out[hi].x[i] = u32_of(x > 0 ? (x > 1 ? 1.f : x) : 0.f);
      }
    flush_results(w, out[hi].x);
  }
  store_masked(w, w.vgpr(in.dst.code), out[0].x, w.exec());
  store_masked(w, w.vgpr(in.dst.code + 1), out[1].x, w.exec());
}
EMU_HANDLER("v_pk_add_f32", [](Wave& w, const Inst& in) {
  packed32<2>(w, in, [](u32 a, u32 b, u32) { return made(f32_of(a) + f32_of(b), a, b); });
})
EMU_HANDLER("v_pk_mul_f32", [](Wave& w, const Inst& in) {
  packed32<2>(w, in, [](u32 a, u32 b, u32) { return made(f32_of(a) * f32_of(b), a, b); });
})
EMU_HANDLER("v_pk_fma_f32", [](Wave& w, const Inst& in) {
  packed32<3>(w, in, [](u32 a, u32 b, u32 c) {
    return made(__builtin_fmaf(f32_of(a), f32_of(b), f32_of(c)), a, b, c);
  });
})
// op_sel[0] picks the dword of src0 for the low result, op_sel[1] that of src1 for the high one.
EMU_HANDLER("v_pk_mov_b32", [](Wave& w, const Inst& in) {
  Lanes b0, b1, lo, hi;
  Inst from = in;
  from.neg = from.abs = 0;
  from.opsel_hi = in.opsel;
  const u32* a = packed_f32(w, from, 0, 0, b0);
  const u32* b = packed_f32(w, from, 1, 1, b1);
  std::memcpy(lo.x, a, sizeof lo);
  std::memcpy(hi.x, b, sizeof hi);
  store_masked(w, w.vgpr(in.dst.code), lo.x, w.exec());
  store_masked(w, w.vgpr(in.dst.code + 1), hi.x, w.exec());
})

// 16-bit halves.
enum class Half { f16, i16 };
template <Half K>
const u32* packed_raw(Wave& w, const Inst& in, int i, Lanes& buffer) {
  int code = in.src[i].code;
  if (code >= kVgpr) return w.vgpr(code);
  u32 x = scalar32(w, in, code);
  if (K == Half::f16 && code >= 240 && code <= 248) x = f16_of(inline_float(code));
  splat(buffer.x, x);
  return buffer.x;
}
template <Half K>
inline u32 pick(const Inst& in, u32 x, int i, int hi) {
  u32 h = ((hi ? in.opsel_hi : in.opsel) >> i) & 1 ? x >> 16 : x & 0xffff;
  if (K == Half::f16 && (((hi ? in.abs : in.neg) >> i) & 1)) h ^= 0x8000;
  return h;
}
template <Half K, class Fn>
void packed16(Wave& w, const Inst& in, Fn fn, int sources) {
  Lanes b0, b1, b2, out;
  if (K == Half::i16 && in.clamp) throw Fault("unimplemented", "integer clamp");
  const u32* a = packed_raw<K>(w, in, 0, b0);
  const u32* b = packed_raw<K>(w, in, 1, b1);
  const u32* c = sources > 2 ? packed_raw<K>(w, in, 2, b2) : a;
  for (int l = 0; l < kLanes; ++l) {
    u32 r[2];
    for (int hi = 0; hi < 2; ++hi) {
      r[hi] = fn(pick<K>(in, a[l], 0, hi), pick<K>(in, b[l], 1, hi),
                 sources > 2 ? pick<K>(in, c[l], 2, hi) : 0) &
              0xffff;
      if (in.clamp) {
        float x = of_f16(r[hi]);
        r[hi] = f16_of(x > 0 ? (x > 1 ? 1.f : x) : 0.f);
      }
    }
    out.x[l] = r[0] | (r[1] << 16);
  }
  store_masked(w, w.vgpr(in.dst.code), out.x, w.exec());
}
inline float hf(u32 x) { return of_f16(x); }
inline u32 choose(u32 a, u32 b, bool larger, bool nan_wins) {
  float x = hf(a), y = hf(b);
  bool na = x != x, nb = y != y;
  // As for float32: maximum/minimum keep a NaN; max/min return a signalling NaN quieted, else the
  // number.
  if (nan_wins && (na || nb)) return na ? a | 0x200 : b | 0x200;
  if (na && !(a & 0x200)) return a | 0x200;
  if (nb && !(b & 0x200)) return b | 0x200;
  if (na || nb) return na ? b : a;
  if (x == y) return larger ? a & b : a | b;
  return (x > y) == larger ? a : b;
}
#define PK(name, kind, n, expr)                      \
  EMU_HANDLER(name, ([](Wave& w, const Inst& in) {   \
                packed16<Half::kind>(                \
                    w, in,                           \
                    [](u32 a, u32 b, u32 c) -> u32 { \
                      (void)c;                       \
                      return expr;                   \
                    },                               \
                    n);                              \
              }))
PK("v_pk_add_f16", f16, 2, f16_of(hf(a) + hf(b)))
PK("v_pk_mul_f16", f16, 2, f16_of(hf(a) * hf(b)))
PK("v_pk_fma_f16", f16, 3, fma_f16(hf(a), hf(b), hf(c)))
PK("v_pk_max_f16", f16, 2, choose(a, b, true, false))
PK("v_pk_min_f16", f16, 2, choose(a, b, false, false))
PK("v_pk_maximum3_f16", f16, 3, choose(choose(a, b, true, true), c, true, true))
PK("v_pk_minimum3_f16", f16, 3, choose(choose(a, b, false, true), c, false, true))
PK("v_pk_add_u16", i16, 2, a + b)
PK("v_pk_add_i16", i16, 2, a + b)
PK("v_pk_sub_u16", i16, 2, a - b)
PK("v_pk_sub_i16", i16, 2, a - b)
PK("v_pk_mul_lo_u16", i16, 2, a* b)
PK("v_pk_mad_u16", i16, 3, a* b + c)
PK("v_pk_mad_i16", i16, 3, a* b + c)
PK("v_pk_lshlrev_b16", i16, 2, b << (a & 15))
PK("v_pk_lshrrev_b16", i16, 2, b >> (a & 15))
PK("v_pk_ashrrev_i16", i16, 2, u32(i32(i16(b)) >> (a & 15)))
PK("v_pk_max_u16", i16, 2, a > b ? a : b)
PK("v_pk_min_u16", i16, 2, a < b ? a : b)
PK("v_pk_max_i16", i16, 2, i16(a) > i16(b) ? a : b)
PK("v_pk_min_i16", i16, 2, i16(a) < i16(b) ? a : b)

// Mixed f16/f32 fma: op_sel_hi says "half precision", op_sel then picks the half; `abs` here is a
// true |x|.
void mix(Wave& w, const Inst& in, int form) {  // form 0 f32, 1 low f16, 2 high f16
  Lanes buffer[3], out;
  const u32* s[3];
  for (int i = 0; i < 3; ++i) {
    int code = in.src[i].code;
    bool half = (in.opsel_hi >> i) & 1;
    if (code >= kVgpr) {
      s[i] = w.vgpr(code);
    } else {
      u32 x = scalar32(w, in, code);
      if (half && code >= 240 && code <= 248) x = f16_of(inline_float(code));
      splat(buffer[i].x, x);
      s[i] = buffer[i].x;
    }
  }
  u32* d = w.vgpr(in.dst.code);
  for (int l = 0; l < kLanes; ++l) {
    float x[3];
    for (int i = 0; i < 3; ++i) {
      bool half = (in.opsel_hi >> i) & 1;
      x[i] = half ? of_f16((in.opsel >> i) & 1 ? s[i][l] >> 16 : s[i][l] & 0xffff)
                  : f32_of(w.flush_sources ? flush(s[i][l]) : s[i][l]);
      if ((in.abs >> i) & 1) x[i] = std::fabs(x[i]);
      if ((in.neg >> i) & 1) x[i] = -x[i];
    }
    float r = __builtin_fmaf(x[0], x[1], x[2]);
    if (in.clamp) r = r > 0 ? (r > 1 ? 1.f : r) : 0.f;
    out.x[l] = form == 0   ? u32_of(r)
               : form == 1 ? (d[l] & 0xffff0000u) | f16_of(r)
                           : (d[l] & 0xffffu) | (u32(f16_of(r)) << 16);
  }
  if (form == 0) flush_results(w, out.x);
  store_masked(w, d, out.x, w.exec());
}
EMU_HANDLER("v_mad_mix_f32", [](Wave& w, const Inst& in) { mix(w, in, 0); })
EMU_HANDLER("v_mad_mixlo_f16", [](Wave& w, const Inst& in) { mix(w, in, 1); })
EMU_HANDLER("v_mad_mixhi_f16", [](Wave& w, const Inst& in) { mix(w, in, 2); })

// Dot products, in the order of the manual's pseudocode: products first for dot2_f32_bf16, else the
// accumulator.
template <class Fn>
void dot(Wave& w, const Inst& in, Fn fn) {
  Lanes b0, b1, b2, out;
  Inst plain = in;
  if (in.kind == kVop3p) {
    if (in.neg || in.abs || (in.opsel & 7) || (in.opsel_hi & 3) != 3 || in.clamp)
      throw Fault("unimplemented", "modifiers on a dot product");
    plain.opsel = 0;
  }
  const u32* a = source<Type::u32>(w, plain, 0, b0);
  const u32* b = source<Type::u32>(w, plain, 1, b1);
  const u32* c = source<Type::u32>(w, plain, 2, b2);
  for (int i = 0; i < kLanes; ++i) out.x[i] = fn(a[i], b[i], c[i]);
  store32(w, plain, out.x);
}
inline u32 dot2_bf16(u32 a, u32 b, u32 c) {
  float t = of_bf16(a & 0xffff) * of_bf16(b & 0xffff);
  t += of_bf16(a >> 16) * of_bf16(b >> 16);
  return u32_of(t + f32_of(c));
}
inline u32 dot2c_bf16(u32 a, u32 b, u32 c) {
  float t = f32_of(c) + of_bf16(a & 0xffff) * of_bf16(b & 0xffff);
  return u32_of(t + of_bf16(a >> 16) * of_bf16(b >> 16));
}
inline u32 dot2_f16(u32 a, u32 b, u32 c) {
  float t = f32_of(c) + of_f16(a & 0xffff) * of_f16(b & 0xffff);
  return u32_of(t + of_f16(a >> 16) * of_f16(b >> 16));
}
inline u32 dot4_i8(u32 a, u32 b, u32 c) {
  for (int s = 0; s < 32; s += 8) c += u32(i32(i8(a >> s)) * i32(i8(b >> s)));
  return c;
}
inline u32 dot4_u8(u32 a, u32 b, u32 c) {
  for (int s = 0; s < 32; s += 8) c += ((a >> s) & 255) * ((b >> s) & 255);
  return c;
}
inline u32 dot2_i16(u32 a, u32 b, u32 c) {
  return c + u32(i16(a) * i16(b)) + u32(i16(a >> 16) * i16(b >> 16));
}
inline u32 dot2_u16(u32 a, u32 b, u32 c) {
  return c + (a & 0xffff) * (b & 0xffff) + (a >> 16) * (b >> 16);
}
EMU_HANDLER("v_dot2_i32_i16", [](Wave& w, const Inst& in) { dot(w, in, dot2_i16); })
EMU_HANDLER("v_dot2c_i32_i16", [](Wave& w, const Inst& in) { dot(w, in, dot2_i16); })
EMU_HANDLER("v_dot2_u32_u16", [](Wave& w, const Inst& in) { dot(w, in, dot2_u16); })
EMU_HANDLER("v_dot2_f32_bf16", [](Wave& w, const Inst& in) { dot(w, in, dot2_bf16); })
EMU_HANDLER("v_dot2c_f32_bf16", [](Wave& w, const Inst& in) { dot(w, in, dot2c_bf16); })
EMU_HANDLER("v_dot2_f32_f16", [](Wave& w, const Inst& in) { dot(w, in, dot2_f16); })
EMU_HANDLER("v_dot2c_f32_f16", [](Wave& w, const Inst& in) { dot(w, in, dot2_f16); })
EMU_HANDLER("v_dot4_i32_i8", [](Wave& w, const Inst& in) { dot(w, in, dot4_i8); })
EMU_HANDLER("v_dot4c_i32_i8", [](Wave& w, const Inst& in) { dot(w, in, dot4_i8); })
EMU_HANDLER("v_dot4_u32_u8", [](Wave& w, const Inst& in) { dot(w, in, dot4_u8); })

}  // namespace
}  // namespace emu
