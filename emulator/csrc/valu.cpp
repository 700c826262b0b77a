// SPDX-License-Identifier: MIT
// Vector ALU: VOP1, VOP2, VOP3 and VOPC, one line per instruction where a line is enough.
#include <algorithm>

#include "lanes.h"

namespace emu {
namespace {

constexpr Type U = Type::u32, F = Type::f32, B = Type::f32_bits, H = Type::f16;

// The host makes negative NaNs for invalid operations, the GPU positive ones.
inline u32 made(float r, u32 a, u32 b = 0, u32 c = 0) {
  u32 x = u32_of(r);
  return is_nan(x) && !is_nan(a) && !is_nan(b) && !is_nan(c) ? 0x7fc00000u : x;
}
inline u32 add(u32 a, u32 b) { return made(f32_of(a) + f32_of(b), a, b); }
inline u32 sub(u32 a, u32 b) { return made(f32_of(a) - f32_of(b), a, b); }
inline u32 mul(u32 a, u32 b) { return made(f32_of(a) * f32_of(b), a, b); }
inline u32 fma3(u32 a, u32 b, u32 c) {
  return made(__builtin_fmaf(f32_of(a), f32_of(b), f32_of(c)), a, b, c);
}

// IEEE mode: a signalling NaN is quieted and returned, a quiet NaN loses against a number.
inline u32 max_f32(u32 a, u32 b) {
  float x = f32_of(a), y = f32_of(b);
  u32 r = x > y ? a : b;
  r = x == y ? (a & b) : r;
  r = is_nan(b) ? a : r;
  r = is_nan(a) ? b : r;
  r = is_snan(b) ? quiet(b) : r;
  return is_snan(a) ? quiet(a) : r;
}
inline u32 min_f32(u32 a, u32 b) {
  float x = f32_of(a), y = f32_of(b);
  u32 r = x < y ? a : b;
  r = x == y ? (a | b) : r;
  r = is_nan(b) ? a : r;
  r = is_nan(a) ? b : r;
  r = is_snan(b) ? quiet(b) : r;
  return is_snan(a) ? quiet(a) : r;
}
// maximum/minimum: NaN wins, -0 < +0.
inline u32 maximum_f32(u32 a, u32 b) {
  float x = f32_of(a), y = f32_of(b);
  u32 r = x > y ? a : b;
  r = x == y ? (a & b) : r;
  r = is_nan(b) ? quiet(b) : r;
  return is_nan(a) ? quiet(a) : r;
}
inline u32 minimum_f32(u32 a, u32 b) {
  float x = f32_of(a), y = f32_of(b);
  u32 r = x < y ? a : b;
  r = x == y ? (a | b) : r;
  r = is_nan(b) ? quiet(b) : r;
  return is_nan(a) ? quiet(a) : r;
}
inline u32 med3_f32(u32 a, u32 b, u32 c) {
  if (is_nan(a) || is_nan(b) || is_nan(c)) return min_f32(min_f32(a, b), c);
  u32 top = max_f32(max_f32(a, b), c);
  if (f32_of(top) == f32_of(a)) return max_f32(b, c);
  if (f32_of(top) == f32_of(b)) return max_f32(a, c);
  return max_f32(a, b);
}
template <class T>
inline T med3(T a, T b, T c) {
  T lo = a < b ? a : b, hi = a < b ? b : a;
  return c < lo ? lo : (c > hi ? hi : c);
}
inline u32 min_u(u32 a, u32 b) { return a < b ? a : b; }
inline u32 max_u(u32 a, u32 b) { return a > b ? a : b; }
inline u32 min_i(u32 a, u32 b) { return i32(a) < i32(b) ? a : b; }
inline u32 max_i(u32 a, u32 b) { return i32(a) > i32(b) ? a : b; }
inline i32 i24(u32 x) { return i32(x << 8) >> 8; }
inline u32 u24(u32 x) { return x & 0xffffffu; }

// Transcendentals: correctly rounded from double, denormal inputs and outputs flushed. ASSUMED: the
// hardware is within 1 ulp, so the last bit may differ.
template <class Fn>
inline u32 trans(u32 a, Fn fn) {
  u32 x = flush(a);
  u32 r = u32_of(float(fn(double(f32_of(x)))));
  if (is_nan(x)) return quiet(x);
  return is_nan(r) ? 0x7fc00000u : flush(r);
}
inline u32 rcp_f32(u32 a) {
  return trans(a, [](double x) { return 1.0 / x; });
}

inline i32 f2i(u32 a) {
  float x = f32_of(a);
  if (is_nan(a)) return 0;
  if (x >= 2147483648.f) return 0x7fffffff;
  if (x <= -2147483648.f) return i32(0x80000000u);
  return i32(x);
}
inline u32 f2u(u32 a) {
  float x = f32_of(a);
  if (is_nan(a) || x <= 0) return 0;
  if (x >= 4294967296.f) return 0xffffffffu;
  return u32(x);
}
inline u32 frexp_exp(u32 a) {
  if ((a & 0x7f800000u) == 0x7f800000u || !(a & 0x7fffffffu)) return 0;
  int e;
  std::frexp(f32_of(a), &e);
  return u32(e);
}
inline u32 frexp_mant(u32 a) {
  if ((a & 0x7f800000u) == 0x7f800000u) return is_nan(a) ? quiet(a) : a;
  int e;
  return u32_of(std::frexp(f32_of(a), &e));
}
inline u32 ldexp_f32(u32 a, i32 e) {
  if (is_nan(a)) return quiet(a);
  return u32_of(float(std::ldexp(double(f32_of(a)), e < -600 ? -600 : (e > 600 ? 600 : e))));
}
inline u32 fract_f32(u32 a) {
  if (is_nan(a)) return quiet(a);
  float x = f32_of(a);
  if (std::isinf(x)) return 0x7fc00000u;
  float r = x - std::floor(x);
  return u32_of(r >= 1.f ? 0x1.fffffep-1f : r);
}
inline u32 reverse(u32 x) {
  x = (x >> 16) | (x << 16);
  x = ((x & 0xff00ff00u) >> 8) | ((x & 0x00ff00ffu) << 8);
  x = ((x & 0xf0f0f0f0u) >> 4) | ((x & 0x0f0f0f0fu) << 4);
  x = ((x & 0xccccccccu) >> 2) | ((x & 0x33333333u) << 2);
  return ((x & 0xaaaaaaaau) >> 1) | ((x & 0x55555555u) << 1);
}
inline u32 perm_byte(u64 both, u32 sel) {
  if (sel >= 13) return 0xff;
  if (sel == 12) return 0;
  if (sel >= 8) {  // sign of bytes 1, 3, 5, 7
    u32 byte = 2 * (sel - 8) + 1;
    return (both >> (8 * byte + 7)) & 1 ? 0xff : 0;
  }
  return (both >> (8 * sel)) & 0xff;
}
inline u32 perm(u32 a, u32 b, u32 sel) {
  u64 both = (u64(a) << 32) | b;
  u32 out = 0;
  for (int i = 0; i < 4; ++i) out |= perm_byte(both, (sel >> (8 * i)) & 0xff) << (8 * i);
  return out;
}
inline u32 bfe_u(u32 a, u32 o, u32 n) {
  o &= 31, n &= 31;
  return n == 0 ? 0 : (a >> o) & ((1u << n) - 1);
}
inline u32 bfe_i(u32 a, u32 o, u32 n) {
  o &= 31, n &= 31;
  if (n == 0) return 0;
  u32 x = (a >> o) & ((1u << n) - 1);
  if (o + n > 32)
    return u32(i32(a) >> o);  // the field's top bits are the sign of the shifted value
  return u32(i32(x << (32 - n)) >> (32 - n));
}
inline u32 prng(u32 x) { return (x << 1) ^ (x >> 31 ? 197u : 0u); }

#define V1(name, S, D, ...)                                                    \
  EMU_HANDLER(name, ([](Wave& w, const Inst& in) {                             \
                map<S, D, 1>(w, in, [](u32 a) -> u32 { return __VA_ARGS__; }); \
              }))
#define V2(name, S, D, ...)                                                           \
  EMU_HANDLER(name, ([](Wave& w, const Inst& in) {                                    \
                map<S, D, 2>(w, in, [](u32 a, u32 b) -> u32 { return __VA_ARGS__; }); \
              }))
#define V3(name, S, D, ...)                                                                  \
  EMU_HANDLER(name, ([](Wave& w, const Inst& in) {                                           \
                map<S, D, 3>(w, in, [](u32 a, u32 b, u32 c) -> u32 { return __VA_ARGS__; }); \
              }))

// --- moves and bits
V1("v_mov_b32", U, U, a)
V1("v_accvgpr_read", U, U, a)
V1("v_accvgpr_write", U, U, a)
V1("v_accvgpr_mov_b32", U, U, a)
V1("v_not_b32", U, U, ~a)
V1("v_bfrev_b32", U, U, reverse(a))
V1("v_ffbh_u32", U, U, a ? u32(__builtin_clz(a)) : ~0u)
V1("v_ffbl_b32", U, U, a ? u32(__builtin_ctz(a)) : ~0u)
V1("v_ffbh_i32", U, U, (a == 0 || a == ~0u) ? ~0u : u32(__builtin_clz(i32(a) < 0 ? ~a : a)))
V1("v_prng_b32", U, U, prng(a))
V2("v_and_b32", U, U, a& b)
V2("v_or_b32", U, U, a | b)
V2("v_xor_b32", U, U, a ^ b)
V2("v_xnor_b32", U, U, ~(a ^ b))
V2("v_lshlrev_b32", U, U, b << (a & 31))
V2("v_lshrrev_b32", U, U, b >> (a & 31))
V2("v_ashrrev_i32", U, U, u32(i32(b) >> (a & 31)))
V2("v_bfm_b32", U, U, ((1u << (a & 31)) - 1) << (b & 31))
V3("v_bfe_u32", U, U, bfe_u(a, b, c))
V3("v_bfe_i32", U, U, bfe_i(a, b, c))
V3("v_bfi_b32", U, U, (a & b) | (~a & c))
V3("v_alignbit_b32", U, U, u32(((u64(a) << 32) | b) >> (c & 31)))
V3("v_alignbyte_b32", U, U, u32(((u64(a) << 32) | b) >> (8 * (c & 3))))
V3("v_perm_b32", U, U, perm(a, b, c))
V3("v_lshl_or_b32", U, U, (a << (b & 31)) | c)
V3("v_and_or_b32", U, U, (a & b) | c)
V3("v_or3_b32", U, U, a | b | c)
V3("v_lshl_add_u32", U, U, (a << (b & 31)) + c)
V3("v_add_lshl_u32", U, U, (a + b) << (c & 31))
V3("v_add3_u32", U, U, a + b + c)
V3("v_xad_u32", U, U, (a ^ b) + c)
V2("v_bcnt_u32_b32", U, U, u32(__builtin_popcount(a)) + b)
V3("v_lerp_u8", U, U, [](u32 x, u32 y, u32 z) {
  u32 r = 0;
  for (int s = 0; s < 32; s += 8)
    r |= ((((x >> s) & 255) + ((y >> s) & 255) + ((z >> s) & 1)) >> 1) << s;
  return r;
}(a, b, c))
V3("v_sad_u8", U, U, [](u32 x, u32 y, u32 z) {
  for (int s = 0; s < 32; s += 8) {
    i32 d = i32((x >> s) & 255) - i32((y >> s) & 255);
    z += u32(d < 0 ? -d : d);
  }
  return z;
}(a, b, c))
V3("v_sad_u16", U, U, [](u32 x, u32 y, u32 z) {
  for (int s = 0; s < 32; s += 16) {
    i32 d = i32((x >> s) & 0xffff) - i32((y >> s) & 0xffff);
    z += u32(d < 0 ? -d : d);
  }
  return z;
}(a, b, c))
V3("v_sad_u32", U, U, (a > b ? a - b : b - a) + c)

// One bit of the table, which sits in the modifier fields, for every combination of source bits.
template <Type T>
void v_bitop3(Wave& w, const Inst& in) {
  Lanes b0, b1, b2, out;
  Inst plain = in;
  plain.neg = plain.abs = plain.omod = 0;
  u32 table = (in.omod << 6) | (in.abs << 3) | in.neg;
  const u32 *a = source<T>(w, plain, 0, b0), *b = source<T>(w, plain, 1, b1),
            *c = source<T>(w, plain, 2, b2);
  for (int i = 0; i < kLanes; ++i) out.x[i] = 0;
  for (int k = 0; k < 8; ++k) {
    if (!((table >> k) & 1)) continue;
    u32 na = k & 4 ? 0 : ~0u, nb = k & 2 ? 0 : ~0u, nc = k & 1 ? 0 : ~0u;
    for (int i = 0; i < kLanes; ++i) out.x[i] |= (a[i] ^ na) & (b[i] ^ nb) & (c[i] ^ nc);
  }
  if (T == H) {
    const u32* d = w.vgpr(in.dst.code);
    for (int i = 0; i < kLanes; ++i)
      out.x[i] = in.opsel & 8 ? (d[i] & 0xffff) | (out.x[i] << 16) : out.x[i] & 0xffff;
  }
  store32(w, plain, out.x);
}
EMU_HANDLER("v_bitop3_b32", v_bitop3<U>)
EMU_HANDLER("v_bitop3_b16", v_bitop3<H>)

// --- integers
void add_sub(Wave& w, const Inst& in, bool is_signed, int form) {  // form 0 a+b, 1 a-b, 2 b-a
  Lanes b0, b1, out;
  const u32 *a = source<U>(w, in, 0, b0), *b = source<U>(w, in, 1, b1);
  for (int i = 0; i < kLanes; ++i)
    out.x[i] = form == 0 ? a[i] + b[i] : form == 1 ? a[i] - b[i] : b[i] - a[i];
  if (in.clamp) {
    for (int i = 0; i < kLanes; ++i) {
      u32 x = form == 2 ? b[i] : a[i], y = form == 2 ? a[i] : b[i];
      if (is_signed) {
        i64 r = form == 0 ? i64(i32(x)) + i32(y) : i64(i32(x)) - i32(y);
        out.x[i] = r > 0x7fffffffll ? 0x7fffffffu : r < -0x80000000ll ? 0x80000000u : u32(r);
      } else {
        if (form == 0 && out.x[i] < x) out.x[i] = ~0u;
        if (form != 0 && y > x) out.x[i] = 0;
      }
    }
  }
  store32(w, in, out.x);
}
EMU_HANDLER("v_add_u32", [](Wave& w, const Inst& in) { add_sub(w, in, false, 0); })
EMU_HANDLER("v_sub_u32", [](Wave& w, const Inst& in) { add_sub(w, in, false, 1); })
EMU_HANDLER("v_subrev_u32", [](Wave& w, const Inst& in) { add_sub(w, in, false, 2); })
EMU_HANDLER("v_add_i32", [](Wave& w, const Inst& in) { add_sub(w, in, true, 0); })
EMU_HANDLER("v_sub_i32", [](Wave& w, const Inst& in) { add_sub(w, in, true, 1); })

V2("v_mul_i32_i24", U, U, u32(i24(a) * i64(i24(b))))
V2("v_mul_hi_i32_i24", U, U, u32((i64(i24(a)) * i24(b)) >> 32))
V2("v_mul_u32_u24", U, U, u24(a) * u24(b))
V2("v_mul_hi_u32_u24", U, U, u32((u64(u24(a)) * u24(b)) >> 32))
V2("v_mul_lo_u32", U, U, a* b)
V2("v_mul_hi_u32", U, U, u32((u64(a) * b) >> 32))
V2("v_mul_hi_i32", U, U, u32((i64(i32(a)) * i32(b)) >> 32))
V3("v_mad_i32_i24", U, U, u32(i64(i24(a)) * i24(b)) + c)
V3("v_mad_u32_u24", U, U, u24(a) * u24(b) + c)
V2("v_min_u32", U, U, min_u(a, b))
V2("v_max_u32", U, U, max_u(a, b))
V2("v_min_i32", U, U, min_i(a, b))
V2("v_max_i32", U, U, max_i(a, b))
V3("v_min3_u32", U, U, min_u(min_u(a, b), c))
V3("v_max3_u32", U, U, max_u(max_u(a, b), c))
V3("v_min3_i32", U, U, min_i(min_i(a, b), c))
V3("v_max3_i32", U, U, max_i(max_i(a, b), c))
V3("v_med3_u32", U, U, (med3<u32>(a, b, c)))
V3("v_med3_i32", U, U, u32(med3<i32>(i32(a), i32(b), i32(c))))

void carry(Wave& w, const Inst& in, int form, bool with_carry) {  // form 0 a+b, 1 a-b, 2 b-a
  Lanes b0, b1, out;
  const u32 *a = source<U>(w, in, 0, b0), *b = source<U>(w, in, 1, b1);
  u64 cin = with_carry ? scalar64(w, in, in.src[2].code, false) : 0, cout = 0;
  for (int i = 0; i < kLanes; ++i) {
    u64 c = (cin >> i) & 1, x = form == 2 ? b[i] : a[i], y = form == 2 ? a[i] : b[i];
    u64 r = form == 0 ? x + y + c : x - y - c;
    out.x[i] = u32(r);
    cout |= ((r >> 32) & 1) << i;
  }
  if (in.clamp) throw Fault("unimplemented", "integer clamp");
  store32(w, in, out.x);
  store_lane_mask(w, in.sdst.code, cout);
}
EMU_HANDLER("v_add_co_u32", [](Wave& w, const Inst& in) { carry(w, in, 0, false); })
EMU_HANDLER("v_sub_co_u32", [](Wave& w, const Inst& in) { carry(w, in, 1, false); })
EMU_HANDLER("v_subrev_co_u32", [](Wave& w, const Inst& in) { carry(w, in, 2, false); })
EMU_HANDLER("v_addc_co_u32", [](Wave& w, const Inst& in) { carry(w, in, 0, true); })
EMU_HANDLER("v_subb_co_u32", [](Wave& w, const Inst& in) { carry(w, in, 1, true); })
EMU_HANDLER("v_subbrev_co_u32", [](Wave& w, const Inst& in) { carry(w, in, 2, true); })

void mad64(Wave& w, const Inst& in, bool is_signed) {
  Lanes b0, b1;
  Wide c, out;
  const u32 *a = source<U>(w, in, 0, b0), *b = source<U>(w, in, 1, b1);
  source64<false>(w, in, 2, c);
  u64 over = 0;
  for (int i = 0; i < kLanes; ++i) {
    u64 p = is_signed ? u64(i64(i32(a[i])) * i32(b[i])) : u64(a[i]) * b[i];
    out.x[i] = p + c.x[i];
    // Bit 64 of the exact sum: a carry, or the sign of the signed form.
    bool o = is_signed ? ((i64(p) < 0) + (i64(c.x[i]) < 0) + (out.x[i] < p)) & 1 : out.x[i] < p;
    over |= u64(o) << i;
  }
  store64(w, in, out);
  store_lane_mask(w, in.sdst.code, over);
}
EMU_HANDLER("v_mad_u64_u32", [](Wave& w, const Inst& in) { mad64(w, in, false); })
EMU_HANDLER("v_mad_i64_i32", [](Wave& w, const Inst& in) { mad64(w, in, true); })

void shift64(Wave& w, const Inst& in, int form) {
  Lanes b0;
  Wide b, out;
  const u32* a = source<U>(w, in, 0, b0);
  source64<false>(w, in, 1, b);
  for (int i = 0; i < kLanes; ++i) {
    u32 n = a[i] & 63;
    out.x[i] = form == 0 ? b.x[i] << n : form == 1 ? b.x[i] >> n : u64(i64(b.x[i]) >> n);
  }
  store64(w, in, out);
}
EMU_HANDLER("v_lshlrev_b64", [](Wave& w, const Inst& in) { shift64(w, in, 0); })
EMU_HANDLER("v_lshrrev_b64", [](Wave& w, const Inst& in) { shift64(w, in, 1); })
EMU_HANDLER("v_ashrrev_i64", [](Wave& w, const Inst& in) { shift64(w, in, 2); })
EMU_HANDLER("v_lshl_add_u64", [](Wave& w, const Inst& in) {
  Lanes b1;
  Wide a, c;
  source64<false>(w, in, 0, a);
  const u32* b = source<U>(w, in, 1, b1);
  source64<false>(w, in, 2, c);
  for (int i = 0; i < kLanes; ++i) a.x[i] = (a.x[i] << (b[i] & 7)) + c.x[i];
  store64(w, in, a);
})
EMU_HANDLER("v_mov_b64", [](Wave& w, const Inst& in) {
  if (in.dpp >= 0) throw Fault("unimplemented", "v_mov_b64 with DPP");
  Wide a;
  source64<false>(w, in, 0, a);
  store64(w, in, a);
})

// --- float32
V2("v_add_f32", F, F, add(a, b))
V2("v_sub_f32", F, F, sub(a, b))
V2("v_subrev_f32", F, F, sub(b, a))
V2("v_mul_f32", F, F, mul(a, b))
V2("v_mul_legacy_f32", F, F, (f32_of(a) == 0 || f32_of(b) == 0) ? 0u : mul(a, b))
V3("v_fma_f32", F, F, fma3(a, b, c))
V3("v_fmac_f32", F, F, fma3(a, b, c))
V3("v_fmamk_f32", F, F, fma3(a, b, c))
V3("v_fmaak_f32", F, F, fma3(a, b, c))
V2("v_max_f32", F, F, max_f32(a, b))
V2("v_min_f32", F, F, min_f32(a, b))
V3("v_max3_f32", F, F, max_f32(max_f32(a, b), c))
V3("v_min3_f32", F, F, min_f32(min_f32(a, b), c))
V3("v_med3_f32", F, F, med3_f32(a, b, c))
V3("v_maximum3_f32", F, F, maximum_f32(maximum_f32(a, b), c))
V3("v_minimum3_f32", F, F, minimum_f32(minimum_f32(a, b), c))
V1("v_fract_f32", F, F, fract_f32(a))
V1("v_trunc_f32", F, F, is_nan(a) ? quiet(a) : u32_of(std::trunc(f32_of(a))))
V1("v_ceil_f32", F, F, is_nan(a) ? quiet(a) : u32_of(std::ceil(f32_of(a))))
V1("v_floor_f32", F, F, is_nan(a) ? quiet(a) : u32_of(std::floor(f32_of(a))))
V1("v_rndne_f32", F, F, is_nan(a) ? quiet(a) : u32_of(std::nearbyint(f32_of(a))))
V1("v_exp_f32", F, F, trans(a, [](double x) { return std::exp2(x); }))
V1("v_log_f32", F, F, trans(a, [](double x) { return std::log2(x); }))
V1("v_rcp_f32", F, F, rcp_f32(a))
V1("v_rcp_iflag_f32", F, F, rcp_f32(a))
V1("v_rsq_f32", F, F, trans(a, [](double x) { return 1.0 / std::sqrt(x); }))
V1("v_sqrt_f32", F, F, trans(a, [](double x) { return std::sqrt(x); }))
V1("v_sin_f32", F, F, trans(a, [](double x) {
     return std::isinf(x) ? std::nan("") : std::sin(6.283185307179586 * (x - std::floor(x)));
   }))
V1("v_cos_f32", F, F, trans(a, [](double x) {
     return std::isinf(x) ? std::nan("") : std::cos(6.283185307179586 * (x - std::floor(x)));
   }))
V1("v_frexp_exp_i32_f32", F, U, frexp_exp(a))
V1("v_frexp_mant_f32", F, F, frexp_mant(a))
EMU_HANDLER("v_ldexp_f32", ([](Wave& w, const Inst& in) {
              if (in.neg & 2 || in.abs & 2)
                throw Fault("unimplemented", "sign modifier on the exponent");
              map<F, F, 2>(w, in, [](u32 a, u32 b) { return ldexp_f32(a, i32(b)); });
            }))

// --- conversions
V1("v_cvt_f32_i32", U, F, u32_of(float(i32(a))))
V1("v_cvt_f32_u32", U, F, u32_of(float(a)))
V1("v_cvt_i32_f32", F, U, u32(f2i(a)))
V1("v_cvt_u32_f32", F, U, f2u(a))
V1("v_cvt_rpi_i32_f32", F, U, u32(f2i(u32_of(std::floor(f32_of(a) + 0.5f)))))
V1("v_cvt_flr_i32_f32", F, U, u32(f2i(u32_of(std::floor(f32_of(a))))))
V1("v_cvt_f32_ubyte0", U, F, u32_of(float(a & 255)))
V1("v_cvt_f32_ubyte1", U, F, u32_of(float((a >> 8) & 255)))
V1("v_cvt_f32_ubyte2", U, F, u32_of(float((a >> 16) & 255)))
V1("v_cvt_f32_ubyte3", U, F, u32_of(float(a >> 24)))
V1("v_cvt_f16_f32", F, H, f16_of(f32_of(a)))
V1("v_cvt_f32_f16", H, F, u32_of(of_f16(a & 0xffff)))
V1("v_cvt_f32_bf16", U, F, (a & 0xffff) << 16)
V2("v_cvt_pk_bf16_f32", F, U, bf16_of(f32_of(a)) | (u32(bf16_of(f32_of(b))) << 16))
V2("v_cvt_pk_f16_f32", F, U, f16_of(f32_of(a)) | (u32(f16_of(f32_of(b))) << 16))
V2("v_cvt_pkrtz_f16_f32", F, U,
   f16_from_double(f32_of(a), 3) | (u32(f16_from_double(f32_of(b), 3)) << 16))
V2("v_cvt_pk_u16_u32", U, U, min_u(a, 0xffff) | (min_u(b, 0xffff) << 16))
V2("v_cvt_pk_i16_i32", U, U,
   (u32(med3<i32>(i32(a), -32768, 32767)) & 0xffff) | (u32(med3<i32>(i32(b), -32768, 32767)) << 16))
V3("v_cvt_pk_u8_f32", F, U, [](u32 x, u32 pos, u32 old) {
  u32 s = 8 * (pos & 3);
  u32 v = min_u(f2u(u32_of(std::nearbyint(f32_of(x)))), 255);
  return (old & ~(255u << s)) | (v << s);
}(a, b, c))
V1("v_sat_pk_u8_i16", U, U,
   u32(med3<i32>(i16(a), 0, 255)) | (u32(med3<i32>(i16(a >> 16), 0, 255)) << 8))
V2("v_pack_b32_f16", H, U, (a & 0xffff) | (b << 16))

// --- half precision
#define HALF(x) of_f16((x) & 0xffff)
V2("v_add_f16", H, H, f16_of(HALF(a) + HALF(b)))
V2("v_sub_f16", H, H, f16_of(HALF(a) - HALF(b)))
V2("v_subrev_f16", H, H, f16_of(HALF(b) - HALF(a)))
V2("v_mul_f16", H, H, f16_of(HALF(a) * HALF(b)))
V2("v_max_f16", H, H, f16_of(f32_of(max_f32(u32_of(HALF(a)), u32_of(HALF(b))))))
V2("v_min_f16", H, H, f16_of(f32_of(min_f32(u32_of(HALF(a)), u32_of(HALF(b))))))
V3("v_max3_f16", H, H,
   f16_of(f32_of(max_f32(max_f32(u32_of(HALF(a)), u32_of(HALF(b))), u32_of(HALF(c))))))
V3("v_min3_f16", H, H,
   f16_of(f32_of(min_f32(min_f32(u32_of(HALF(a)), u32_of(HALF(b))), u32_of(HALF(c))))))
V3("v_med3_f16", H, H, f16_of(f32_of(med3_f32(u32_of(HALF(a)), u32_of(HALF(b)), u32_of(HALF(c))))))
V3("v_fma_f16", H, H, fma_f16(HALF(a), HALF(b), HALF(c)))
V1("v_rcp_f16", H, H, f16_from_double(1.0 / HALF(a)))
V1("v_sqrt_f16", H, H, f16_from_double(std::sqrt(double(HALF(a)))))
V1("v_rsq_f16", H, H, f16_from_double(1.0 / std::sqrt(double(HALF(a)))))
V1("v_exp_f16", H, H, f16_from_double(std::exp2(double(HALF(a)))))
V1("v_log_f16", H, H, f16_from_double(std::log2(double(HALF(a)))))
V1("v_floor_f16", H, H, f16_of(std::floor(HALF(a))))
V1("v_ceil_f16", H, H, f16_of(std::ceil(HALF(a))))
V1("v_trunc_f16", H, H, f16_of(std::trunc(HALF(a))))
V1("v_rndne_f16", H, H, f16_of(std::nearbyint(HALF(a))))
V1("v_sin_f16", H, H,
   f16_from_double(std::sin(6.283185307179586 * (HALF(a) - std::floor(HALF(a))))))
V1("v_cos_f16", H, H,
   f16_from_double(std::cos(6.283185307179586 * (HALF(a) - std::floor(HALF(a))))))
V1("v_fract_f16", H, H, [](float x) -> u32 {
  return std::isinf(x) ? 0x7e00 : f16_of(std::fmin(x - std::floor(x), 0x1.ffcp-1f));
}(HALF(a)))
V1("v_frexp_mant_f16", H, H, [](float x) -> u32 {
  int e;
  return f16_of(std::isfinite(x) ? std::frexp(x, &e) : x);
}(HALF(a)))
V1("v_frexp_exp_i16_f16", H, H, [](float x) -> u32 {
  int e = 0;
  if (std::isfinite(x) && x != 0) std::frexp(x, &e);
  return u32(e) & 0xffff;
}(HALF(a)))
V3("v_div_fixup_f16", H, H, [](u32 q, u32 d, u32 n) -> u32 {
  u32 sign = (d ^ n) & 0x8000, D = d & 0x7fff, N = n & 0x7fff;
  if (N > 0x7c00) return (n & 0xffff) | 0x200;
  if (D > 0x7c00) return (d & 0xffff) | 0x200;
  if ((D == 0 && N == 0) || (D == 0x7c00 && N == 0x7c00)) return 0xfe00;
  if (D == 0 || N == 0x7c00) return sign | 0x7c00;
  if (D == 0x7c00 || N == 0) return sign;
  return sign | (q & 0x7fff);
}(a, b, c))
V1("v_cvt_f16_u16", H, H, f16_of(float(a & 0xffff)))
V1("v_cvt_f16_i16", H, H, f16_of(float(i16(a))))
V1("v_cvt_u16_f16", H, H, min_u(f2u(u32_of(HALF(a))), 0xffff))
V1("v_cvt_i16_f16", H, H, u32(med3<i32>(f2i(u32_of(HALF(a))), -32768, 32767)) & 0xffff)
EMU_HANDLER("v_ldexp_f16", ([](Wave& w, const Inst& in) {
              map<H, H, 2>(w, in, [](u32 a, u32 b) -> u32 {
                return f16_from_double(std::ldexp(double(HALF(a)), i16(b)));
              });
            }))

// --- 16-bit integers; the upper half of the result is zero
template <class Fn>
void int16(Wave& w, const Inst& in, Fn fn, int sources) {
  Lanes b0, b1, b2, out;
  const u32* a = source<H>(w, in, 0, b0);
  const u32* b = source<H>(w, in, 1, b1);
  const u32* c = sources > 2 ? source<H>(w, in, 2, b2) : a;
  if (in.clamp) throw Fault("unimplemented", "integer clamp");
  const u32* d = w.vgpr(in.dst.code);
  for (int i = 0; i < kLanes; ++i) {
    u32 r = fn(a[i] & 0xffff, b[i] & 0xffff, c[i] & 0xffff) & 0xffff;
    out.x[i] = !in.sdwa && (in.opsel & 8) ? (d[i] & 0xffff) | (r << 16) : r;
  }
  store32(w, in, out.x);
}
#define I16(name, n, expr)                           \
  EMU_HANDLER(name, ([](Wave& w, const Inst& in) {   \
                int16(                               \
                    w, in,                           \
                    [](u32 a, u32 b, u32 c) -> u32 { \
                      (void)c;                       \
                      return expr;                   \
                    },                               \
                    n);                              \
              }))
I16("v_add_u16", 2, a + b)
I16("v_sub_u16", 2, a - b)
I16("v_subrev_u16", 2, b - a)
I16("v_add_i16", 2, a + b)
I16("v_sub_i16", 2, a - b)
I16("v_mul_lo_u16", 2, a* b)
I16("v_lshlrev_b16", 2, b << (a & 15))
I16("v_lshrrev_b16", 2, b >> (a & 15))
I16("v_ashrrev_i16", 2, u32(i32(i16(b)) >> (a & 15)))
I16("v_max_u16", 2, max_u(a, b))
I16("v_min_u16", 2, min_u(a, b))
I16("v_max_i16", 2, i16(a) > i16(b) ? a : b)
I16("v_min_i16", 2, i16(a) < i16(b) ? a : b)
I16("v_mad_u16", 3, a* b + c)
I16("v_mad_i16", 3, a* b + c)
I16("v_mad_legacy_u16", 3, a* b + c)
I16("v_mad_legacy_i16", 3, a* b + c)
I16("v_min3_u16", 3, min_u(min_u(a, b), c))
I16("v_max3_u16", 3, max_u(max_u(a, b), c))
I16("v_med3_u16", 3, (med3<u32>(a, b, c)))
I16("v_min3_i16", 3, u32(std::min(std::min(i16(a), i16(b)), i16(c))))
I16("v_max3_i16", 3, u32(std::max(std::max(i16(a), i16(b)), i16(c))))
I16("v_med3_i16", 3, u32(med3<i16>(i16(a), i16(b), i16(c))))
V3("v_mad_u32_u16", U, U, (a & 0xffff) * (b & 0xffff) + c)
V3("v_mad_i32_i16", U, U, u32(i32(i16(a)) * i32(i16(b))) + c)

// Two saturated bytes in one half of the destination; the other half stays.
void ashr_pk(Wave& w, const Inst& in, i32 low, i32 high) {
  Lanes b0, b1, b2, out;
  Inst plain = in;
  plain.opsel = 0;
  const u32 *a = source<U>(w, plain, 0, b0), *b = source<U>(w, plain, 1, b1),
            *c = source<U>(w, plain, 2, b2);
  const u32* d = w.vgpr(in.dst.code);
  bool upper = in.opsel & 8;
  for (int i = 0; i < kLanes; ++i) {
    u32 n = c[i] & 31;
    u32 pair = (u32(med3<i32>(i32(a[i]) >> n, low, high)) & 255) |
               ((u32(med3<i32>(i32(b[i]) >> n, low, high)) & 255) << 8);
    out.x[i] = upper ? (d[i] & 0xffff) | (pair << 16) : (d[i] & 0xffff0000u) | pair;
  }
  store32(w, plain, out.x);
}
EMU_HANDLER("v_ashr_pk_i8_i32", [](Wave& w, const Inst& in) { ashr_pk(w, in, -128, 127); })
EMU_HANDLER("v_ashr_pk_u8_i32", [](Wave& w, const Inst& in) { ashr_pk(w, in, 0, 255); })

// --- double
inline double dbl(u64 x) { return bits<double>(x); }
template <int N, class Fn>
void doubles(Wave& w, const Inst& in, Fn fn) {
  Wide a, b, c;
  source64<true>(w, in, 0, a);
  if (N > 1) source64<true>(w, in, 1, b);
  if (N > 2) source64<true>(w, in, 2, c);
  if (in.clamp || in.omod) throw Fault("unimplemented", "clamp or omod on f64");
  for (int i = 0; i < kLanes; ++i)
    a.x[i] = bits<u64>(double(fn(dbl(a.x[i]), N > 1 ? dbl(b.x[i]) : 0, N > 2 ? dbl(c.x[i]) : 0)));
  store64(w, in, a);
}
#define D64(name, n, expr)                                           \
  EMU_HANDLER(name, ([](Wave& w, const Inst& in) {                   \
                doubles<n>(w, in, [](double a, double b, double c) { \
                  (void)b;                                           \
                  (void)c;                                           \
                  return expr;                                       \
                });                                                  \
              }))
D64("v_add_f64", 2, a + b)
D64("v_mul_f64", 2, a* b)
D64("v_fma_f64", 3, __builtin_fma(a, b, c))
D64("v_fmac_f64", 3, __builtin_fma(a, b, c))
D64("v_max_f64", 2, std::fmax(a, b))
D64("v_min_f64", 2, std::fmin(a, b))
D64("v_rcp_f64", 1, 1.0 / a)
D64("v_sqrt_f64", 1, std::sqrt(a))
D64("v_rsq_f64", 1, 1.0 / std::sqrt(a))
D64("v_floor_f64", 1, std::floor(a))
D64("v_ceil_f64", 1, std::ceil(a))
D64("v_trunc_f64", 1, std::trunc(a))
D64("v_rndne_f64", 1, std::nearbyint(a))
EMU_HANDLER("v_ldexp_f64", [](Wave& w, const Inst& in) {
  Wide a;
  Lanes b1;
  source64<true>(w, in, 0, a);
  const u32* b = source<U>(w, in, 1, b1);
  for (int i = 0; i < kLanes; ++i) a.x[i] = bits<u64>(std::ldexp(dbl(a.x[i]), i32(b[i])));
  store64(w, in, a);
})
template <class Fn>
void from_double(Wave& w, const Inst& in, Fn fn) {
  Wide a;
  Lanes out;
  source64<true>(w, in, 0, a);
  for (int i = 0; i < kLanes; ++i) out.x[i] = fn(dbl(a.x[i]));
  store32(w, in, out.x);
}
EMU_HANDLER("v_cvt_f32_f64", [](Wave& w, const Inst& in) {
  from_double(w, in, [&w](double x) {
    u32 r = u32_of(float(x));
    return w.flush_results ? flush(r) : r;
  });
})
EMU_HANDLER("v_cvt_i32_f64", [](Wave& w, const Inst& in) {
  from_double(w, in, [](double x) {
    return std::isnan(x)       ? 0u
           : x >= 2147483647.  ? 0x7fffffffu
           : x <= -2147483648. ? 0x80000000u
                               : u32(i32(x));
  });
})
EMU_HANDLER("v_cvt_u32_f64", [](Wave& w, const Inst& in) {
  from_double(w, in, [](double x) {
    return std::isnan(x) || x <= 0 ? 0u : x >= 4294967295. ? ~0u : u32(x);
  });
})
template <class Fn>
void to_double(Wave& w, const Inst& in, Fn fn) {
  Lanes b0;
  Wide out;
  const u32* a = source<F>(w, in, 0, b0);
  for (int i = 0; i < kLanes; ++i) out.x[i] = bits<u64>(double(fn(a[i])));
  store64(w, in, out);
}
EMU_HANDLER("v_cvt_f64_f32",
            [](Wave& w, const Inst& in) { to_double(w, in, [](u32 x) { return f32_of(x); }); })
EMU_HANDLER("v_cvt_f64_i32",
            [](Wave& w, const Inst& in) { to_double(w, in, [](u32 x) { return i32(x); }); })
EMU_HANDLER("v_cvt_f64_u32",
            [](Wave& w, const Inst& in) { to_double(w, in, [](u32 x) { return x; }); })

D64("v_fract_f64", 1,
    std::isinf(a) ? std::nan("") : std::fmin(a - std::floor(a), 0x1.fffffffffffffp-1))
D64("v_frexp_mant_f64", 1, [](double x) {
  int e;
  return std::isfinite(x) ? std::frexp(x, &e) : x;
}(a))
EMU_HANDLER("v_frexp_exp_i32_f64", [](Wave& w, const Inst& in) {
  from_double(w, in, [](double x) {
    int e = 0;
    if (std::isfinite(x) && x != 0) std::frexp(x, &e);
    return u32(e);
  });
})
inline int exponent64(double x) { return int((bits<u64>(x) >> 52) & 0x7ff); }
inline bool denormal64(double x) { return x != 0 && exponent64(x) == 0; }
// The same rules as float32's below, with its repairs.
EMU_HANDLER("v_div_scale_f64", [](Wave& w, const Inst& in) {
  Wide s0, s1, s2;
  source64<true>(w, in, 0, s0), source64<true>(w, in, 1, s1), source64<true>(w, in, 2, s2);
  u64 vcc = 0;
  for (int i = 0; i < kLanes; ++i) {
    double a = dbl(s0.x[i]), d = dbl(s1.x[i]), n = dbl(s2.x[i]), r = a;
    bool v = false, tiny_inverse = denormal64(1.0 / d);
    if (n == 0 || d == 0)
      r = bits<double>(0x7ff8000000000000ull);
    else if (exponent64(n) - exponent64(d) >= 768) {
      v = true;
      if (a == d) r = std::ldexp(a, 128);
    } else if (denormal64(d))
      r = std::ldexp(a, 128);
    else if (tiny_inverse && denormal64(n / d)) {
      v = true;
      if (a == d) r = std::ldexp(a, -128);
    } else if (tiny_inverse)
      r = std::ldexp(a, -128);
    else if (denormal64(n / d)) {
      v = true;
      if (a == n) r = std::ldexp(a, 128);
    } else if (exponent64(n) <= 53)
      r = std::ldexp(a, 128);
    s0.x[i] = bits<u64>(r);
    vcc |= u64(v) << i;
  }
  store64(w, in, s0);
  store_lane_mask(w, in.sdst.code, vcc);
})
EMU_HANDLER("v_div_fmas_f64", [](Wave& w, const Inst& in) {
  Wide a, b, c;
  source64<true>(w, in, 0, a), source64<true>(w, in, 1, b), source64<true>(w, in, 2, c);
  u64 vcc = w.vcc();
  for (int i = 0; i < kLanes; ++i) {
    double r = __builtin_fma(dbl(a.x[i]), dbl(b.x[i]), dbl(c.x[i]));
    // NOTE: two roundings when the scaled result is denormal.
    if ((vcc >> i) & 1) r = std::ldexp(r, exponent64(dbl(c.x[i])) > 1023 ? 128 : -128);
    a.x[i] = bits<u64>(r);
  }
  store64(w, in, a);
})
EMU_HANDLER("v_div_fixup_f64", [](Wave& w, const Inst& in) {
  Wide q, d, n;
  source64<true>(w, in, 0, q), source64<true>(w, in, 1, d), source64<true>(w, in, 2, n);
  constexpr u64 kInf = 0x7ff0000000000000ull, kMagnitude = ~(1ull << 63), kQuiet = 1ull << 51;
  for (int i = 0; i < kLanes; ++i) {
    u64 sign = (d.x[i] ^ n.x[i]) & ~kMagnitude, D = d.x[i] & kMagnitude, N = n.x[i] & kMagnitude, r;
    if (N > kInf)
      r = n.x[i] | kQuiet;
    else if (D > kInf)
      r = d.x[i] | kQuiet;
    else if ((D == 0 && N == 0) || (D == kInf && N == kInf))
      r = 0xfff8000000000000ull;
    else if (D == 0 || N == kInf)
      r = sign | kInf;
    else if (D == kInf || N == 0)
      r = sign;
    else if (int(N >> 52) - int(D >> 52) < -1075)
      r = sign;
    else if ((q.x[i] & kMagnitude) > kInf)
      r = sign | kInf;
    else
      r = sign | (q.x[i] & kMagnitude);
    q.x[i] = r;
  }
  store64(w, in, q);
})

// --- select and lane access
EMU_HANDLER("v_cndmask_b32", [](Wave& w, const Inst& in) {
  Lanes b0, b1, out;
  const u32 *a = source<B>(w, in, 0, b0), *b = source<B>(w, in, 1, b1);
  u64 pick = scalar64(w, in, in.src[2].code, false);
  for (int i = 0; i < kLanes; ++i) out.x[i] = (pick >> i) & 1 ? b[i] : a[i];
  store32(w, in, out.x);
})
u32 lane_value(Wave& w, const Inst& in, int lane) {
  int code = in.src[0].code;
  if (code < kVgpr) return scalar32(w, in, code);
  if (w.check() && !((w.defined[code - kVgpr] >> lane) & 1))
    throw Fault("uninitialized register",
                "reads v" + std::to_string(code - kVgpr) + ", which nothing wrote", lane);
  return w.vgpr(code)[lane];
}
EMU_HANDLER("v_readfirstlane_b32", [](Wave& w, const Inst& in) {
  int lane = w.exec() ? __builtin_ctzll(w.exec()) : 0;
  w.s[in.dst.code] = lane_value(w, in, lane);
})
EMU_HANDLER("v_readlane_b32", [](Wave& w, const Inst& in) {
  w.s[in.dst.code] = lane_value(w, in, scalar32(w, in, in.src[1].code) & 63);
})
EMU_HANDLER("v_writelane_b32", [](Wave& w, const Inst& in) {
  int lane = scalar32(w, in, in.src[1].code) & 63;
  w.vgpr(in.dst.code)[lane] = scalar32(w, in, in.src[0].code);
  w.defined[in.dst.code - kVgpr] |= 1ull << lane;
})
EMU_HANDLER("v_mbcnt_lo_u32_b32", [](Wave& w, const Inst& in) {
  Lanes b0, b1, out;
  const u32 *a = source<U>(w, in, 0, b0), *b = source<U>(w, in, 1, b1);
  for (int i = 0; i < kLanes; ++i)
    out.x[i] = b[i] + u32(__builtin_popcount(a[i] & (i >= 32 ? ~0u : (1u << i) - 1)));
  store32(w, in, out.x);
})
EMU_HANDLER("v_mbcnt_hi_u32_b32", [](Wave& w, const Inst& in) {
  Lanes b0, b1, out;
  const u32 *a = source<U>(w, in, 0, b0), *b = source<U>(w, in, 1, b1);
  for (int i = 0; i < kLanes; ++i)
    out.x[i] = b[i] + (i < 32 ? 0 : u32(__builtin_popcount(a[i] & ((1u << (i - 32)) - 1))));
  store32(w, in, out.x);
})
EMU_HANDLER("v_swap_b32", [](Wave& w, const Inst& in) {
  u32 *d = w.vgpr(in.dst.code), *s = w.vgpr(in.src[0].code);
  u64 exec = w.exec();
  for (int i = 0; i < kLanes; ++i)
    if ((exec >> i) & 1) std::swap(d[i], s[i]);
})
// Odd rows of vdst change places with even rows of vsrc. ASSUMED: a lane is written where its own
// EXEC bit is set.
void permlane_swap(Wave& w, const Inst& in, int row) {
  u32 *d = w.vgpr(in.dst.code), *s = w.vgpr(in.src[0].code);
  u64 exec = w.exec();
  for (int i = 0; i < kLanes; ++i) {
    if (i & row) continue;
    u32 up = d[i + row], down = s[i];
    if ((exec >> (i + row)) & 1) d[i + row] = down;
    if ((exec >> i) & 1) s[i] = up;
  }
}
EMU_HANDLER("v_permlane16_swap_b32", [](Wave& w, const Inst& in) { permlane_swap(w, in, 16); })
EMU_HANDLER("v_permlane32_swap_b32", [](Wave& w, const Inst& in) { permlane_swap(w, in, 32); })
EMU_HANDLER("v_nop", [](Wave&, const Inst&) {})

// --- division helpers
EMU_HANDLER("v_div_scale_f32", [](Wave& w, const Inst& in) {
  Lanes b0, b1, b2, out;
  const u32 *s0 = source<F>(w, in, 0, b0), *s1 = source<F>(w, in, 1, b1),
            *s2 = source<F>(w, in, 2, b2);
  u64 vcc = 0;
  auto e = [](u32 x) { return int((x >> 23) & 255); };
  for (int i = 0; i < kLanes; ++i) {
    float a = f32_of(s0[i]), d = f32_of(s1[i]), n = f32_of(s2[i]), r = a;
    bool v = false;
    double inverse = 1.0 / double(d);
    bool tiny_inverse = inverse != 0 && std::fabs(inverse) < 0x1p-126;
    float quotient = n / d;
    if (n == 0 || d == 0)
      r = f32_of(0x7fc00000u);
    else if (e(s2[i]) - e(s1[i]) >= 96) {
      v = true;
      if (a == d) r = std::ldexp(a, 64);
    } else if (is_denormal(s1[i]))
      r = std::ldexp(a, 64);
    // NOTE: the manual prints +64 here, which would overflow; only -64 makes the sequence divide.
    else if (tiny_inverse && is_denormal(u32_of(quotient))) {
      v = true;
      if (a == d) r = std::ldexp(a, -64);
    } else if (tiny_inverse)
      r = std::ldexp(a, -64);
    else if (is_denormal(u32_of(quotient))) {
      v = true;
      if (a == n) r = std::ldexp(a, 64);
    } else if (e(s2[i]) <= 23)
      r = std::ldexp(a, 64);
    out.x[i] = u32_of(r);
    vcc |= u64(v) << i;
  }
  flush_results(w, out.x);
  store32(w, in, out.x);
  store_lane_mask(w, in.sdst.code, vcc);
})
EMU_HANDLER("v_div_fmas_f32", [](Wave& w, const Inst& in) {
  Lanes b0, b1, b2, out;
  const u32 *a = source<F>(w, in, 0, b0), *b = source<F>(w, in, 1, b1),
            *c = source<F>(w, in, 2, b2);
  u64 vcc = w.vcc();
  // NOTE: the manual prints 2**32 here, which does not undo v_div_scale's 2**64; the RDNA manuals'
  // rule does. One rounding: the scale is applied before it.
  for (int i = 0; i < kLanes; ++i) {
    out.x[i] = fma3(a[i], b[i], c[i]);
    if (!((vcc >> i) & 1) || is_nan(out.x[i])) continue;
    double exact = fma_sticky(f32_of(a[i]), f32_of(b[i]), f32_of(c[i]));
    out.x[i] = u32_of(float(std::ldexp(exact, ((c[i] >> 23) & 255) > 127 ? 64 : -64)));
  }
  finish<F>(w, in, out.x);
  store32(w, in, out.x);
})
EMU_HANDLER("v_div_fixup_f32", [](Wave& w, const Inst& in) {
  Lanes b0, b1, b2, out;
  const u32 *q = source<F>(w, in, 0, b0), *d = source<F>(w, in, 1, b1),
            *n = source<F>(w, in, 2, b2);
  for (int i = 0; i < kLanes; ++i) {
    u32 sign = (d[i] ^ n[i]) & 0x80000000u, D = d[i] & 0x7fffffffu, N = n[i] & 0x7fffffffu;
    u32 r;
    if (is_nan(n[i]))
      r = quiet(n[i]);
    else if (is_nan(d[i]))
      r = quiet(d[i]);
    else if (D == 0 && N == 0)
      r = 0xffc00000u;
    else if (D == 0x7f800000u && N == 0x7f800000u)
      r = 0xffc00000u;
    else if (D == 0 || N == 0x7f800000u)
      r = sign | 0x7f800000u;
    else if (D == 0x7f800000u || N == 0)
      r = sign;
    else if (int(N >> 23) - int(D >> 23) < -150)
      r = sign;
    else if (is_nan(q[i]))
      r = sign | 0x7f800000u;  // ASSUMED: the quotient left the range on the way
    else
      r = sign | (q[i] & 0x7fffffffu);
    out.x[i] = r;
  }
  finish<F>(w, in, out.x);
  store32(w, in, out.x);
})

// --- compares
template <Type S, class Fn>
void compare(Wave& w, const Inst& in, Fn fn, bool x) {
  Lanes b0, b1, hit;
  const u32 *a = source<S>(w, in, 0, b0), *b = source<S>(w, in, 1, b1);
  for (int i = 0; i < kLanes; ++i) hit.x[i] = fn(a[i], b[i]);
  u64 mask = 0;
  for (int i = 0; i < kLanes; ++i) mask |= u64(hit.x[i] & 1) << i;
  store_lane_mask(w, in.dst.code, mask);
  if (x) w.set_pair(kExecLo, mask & w.exec());
}
template <bool Float, class Fn>
void compare64(Wave& w, const Inst& in, Fn fn, bool x) {
  Wide a, b;
  source64<Float>(w, in, 0, a);
  source64<Float>(w, in, 1, b);
  u64 mask = 0;
  for (int i = 0; i < kLanes; ++i) mask |= u64(fn(a.x[i], b.x[i])) << i;
  store_lane_mask(w, in.dst.code, mask);
  if (x) w.set_pair(kExecLo, mask & w.exec());
}
#define CMP_ONE(kind, type, body, call)                                 \
  EMU_HANDLER("v_cmp_" kind "_" type, ([](Wave& w, const Inst& in) {    \
                call(w, in, [](auto a, auto b) -> u32 { body }, false); \
              }))                                                       \
  EMU_HANDLER("v_cmpx_" kind "_" type, ([](Wave& w, const Inst& in) {   \
                call(w, in, [](auto a, auto b) -> u32 { body }, true);  \
              }))
#define CMP_FLOAT(type, cv, call)                                       \
  CMP_ONE("f", type, (void)a; (void)b; return 0;, call)                 \
  CMP_ONE("lt", type, return cv(a) < cv(b);, call)                      \
  CMP_ONE("eq", type, return cv(a) == cv(b);, call)                     \
  CMP_ONE("le", type, return cv(a) <= cv(b);, call)                     \
  CMP_ONE("gt", type, return cv(a) > cv(b);, call)                      \
  CMP_ONE("lg", type, return cv(a) < cv(b) || cv(a) > cv(b);, call)     \
  CMP_ONE("ge", type, return cv(a) >= cv(b);, call)                     \
  CMP_ONE("o", type, return cv(a) == cv(a) && cv(b) == cv(b);, call)    \
  CMP_ONE("u", type, return cv(a) != cv(a) || cv(b) != cv(b);, call)    \
  CMP_ONE("nge", type, return !(cv(a) >= cv(b));, call)                 \
  CMP_ONE("nlg", type, return !(cv(a) < cv(b) || cv(a) > cv(b));, call) \
  CMP_ONE("ngt", type, return !(cv(a) > cv(b));, call)                  \
  CMP_ONE("nle", type, return !(cv(a) <= cv(b));, call)                 \
  CMP_ONE("neq", type, return !(cv(a) == cv(b));, call)                 \
  CMP_ONE("nlt", type, return !(cv(a) < cv(b));, call)                  \
  CMP_ONE("tru", type, (void)a; (void)b; return 1;, call)
#define CMP_INT(type, cv, call)                         \
  CMP_ONE("f", type, (void)a; (void)b; return 0;, call) \
  CMP_ONE("lt", type, return cv(a) < cv(b);, call)      \
  CMP_ONE("eq", type, return cv(a) == cv(b);, call)     \
  CMP_ONE("le", type, return cv(a) <= cv(b);, call)     \
  CMP_ONE("gt", type, return cv(a) > cv(b);, call)      \
  CMP_ONE("ne", type, return cv(a) != cv(b);, call)     \
  CMP_ONE("ge", type, return cv(a) >= cv(b);, call)     \
  CMP_ONE("t", type, (void)a; (void)b; return 1;, call)
CMP_FLOAT("f32", f32_of, compare<F>)
CMP_FLOAT("f16", HALF, compare<H>)
CMP_FLOAT("f64", dbl, compare64<true>)
CMP_INT("i32", i32, compare<U>)
CMP_INT("u32", u32, compare<U>)
CMP_INT("i16", i16, compare<H>)
CMP_INT("u16", u16, compare<H>)
CMP_INT("i64", i64, compare64<false>)
CMP_INT("u64", u64, compare64<false>)

// Class bits: 0 sNaN, 1 qNaN, 2 -Inf, 3 -normal, 4 -denormal, 5 -0, 6 +0, 7 +denormal, 8 +normal, 9
// +Inf.
inline u32 class_f32(u32 a) {
  if (is_nan(a)) return a & 0x400000u ? 2 : 1;
  bool minus = a >> 31;
  u32 m = a & 0x7fffffffu;
  if (m == 0x7f800000u) return minus ? 4 : 512;
  if (m == 0) return minus ? 32 : 64;
  if (m < 0x800000u) return minus ? 16 : 128;
  return minus ? 8 : 256;
}
EMU_HANDLER("v_cmp_class_f32", [](Wave& w, const Inst& in) {
  compare<B>(w, in, [](u32 a, u32 b) -> u32 { return (class_f32(a) & b) != 0; }, false);
})
EMU_HANDLER("v_cmpx_class_f32", [](Wave& w, const Inst& in) {
  compare<B>(w, in, [](u32 a, u32 b) -> u32 { return (class_f32(a) & b) != 0; }, true);
})

void class_f64(Wave& w, const Inst& in, bool x) {
  Wide a;
  Lanes b1;
  source64<true>(w, in, 0, a);
  const u32* b = source<U>(w, in, 1, b1);
  u64 mask = 0;
  for (int i = 0; i < kLanes; ++i) {
    u64 m = a.x[i] & ~(1ull << 63), inf = 0x7ff0000000000000ull;
    bool minus = a.x[i] >> 63;
    u32 c = m > inf    ? (m >> 51 & 1 ? 2 : 1)
            : m == inf ? (minus ? 4 : 512)
            : m == 0   ? (minus ? 32 : 64)
            : m >> 52  ? (minus ? 8 : 256)
                       : (minus ? 16 : 128);
    mask |= u64((c & b[i]) != 0) << i;
  }
  store_lane_mask(w, in.dst.code, mask);
  if (x) w.set_pair(kExecLo, mask & w.exec());
}
EMU_HANDLER("v_cmp_class_f64", [](Wave& w, const Inst& in) { class_f64(w, in, false); })
EMU_HANDLER("v_cmpx_class_f64", [](Wave& w, const Inst& in) { class_f64(w, in, true); })
void class_f16(Wave& w, const Inst& in, bool x) {
  compare<H>(
      w, in,
      [](u32 a, u32 b) -> u32 {
        u32 m = a & 0x7fff;
        bool minus = (a >> 15) & 1;
        u32 c = m > 0x7c00    ? (m & 0x200 ? 2 : 1)
                : m == 0x7c00 ? (minus ? 4 : 512)
                : m == 0      ? (minus ? 32 : 64)
                : m >> 10     ? (minus ? 8 : 256)
                              : (minus ? 16 : 128);
        return (c & b) != 0;
      },
      x);
}
EMU_HANDLER("v_cmp_class_f16", [](Wave& w, const Inst& in) { class_f16(w, in, false); })
EMU_HANDLER("v_cmpx_class_f16", [](Wave& w, const Inst& in) { class_f16(w, in, true); })

}  // namespace
}  // namespace emu
