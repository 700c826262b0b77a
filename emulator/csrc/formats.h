// SPDX-License-Identifier: MIT
// Number formats: exact scalar conversions between float32 and the narrow types of the ISA.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace emu {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i8 = int8_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;

template <class To, class From>
inline To bits(From value) {
  static_assert(sizeof(To) == sizeof(From), "bits() reinterprets equal sizes");
  To out;
  std::memcpy(&out, &value, sizeof(To));
  return out;
}
inline float f32_of(u32 x) { return bits<float>(x); }
inline u32 u32_of(float x) { return bits<u32>(x); }

inline bool is_nan(u32 x) { return (x & 0x7fffffffu) > 0x7f800000u; }
inline bool is_snan(u32 x) { return is_nan(x) && !(x & 0x400000u); }
inline bool is_denormal(u32 x) { return !(x & 0x7f800000u) && (x & 0x7fffffu); }
inline u32 quiet(u32 x) { return x | 0x400000u; }
inline u32 flush(u32 x) { return is_denormal(x) ? x & 0x80000000u : x; }

// bfloat16, round to nearest even; NaN stays NaN (quieted, payload truncated).
inline u16 bf16_of(float x) {
  u32 b = u32_of(x);
  u32 rounded = (b + 0x7fffu + ((b >> 16) & 1)) >> 16;
  u32 nan = (b >> 16) | 0x40u;
  return static_cast<u16>(is_nan(b) ? nan : rounded);
}
inline float of_bf16(u32 h) { return f32_of(h << 16); }

// IEEE half from a double, rounded once. Mode 0 is nearest even, 3 is toward zero.
inline u16 f16_from_double(double x, int mode = 0) {
  u64 b = bits<u64>(x);
  u16 sign = static_cast<u16>((b >> 48) & 0x8000u);
  int exponent = static_cast<int>((b >> 52) & 0x7ff);
  u64 mantissa = b & 0xfffffffffffffull;
  if (exponent == 0x7ff)
    return sign |
           (mantissa ? static_cast<u16>(0x7e00u | (mantissa >> 42)) : static_cast<u16>(0x7c00u));
  if (exponent == 0) return sign;
  int e = exponent - 1023;
  if (e > 15) return sign | (mode == 0 ? 0x7c00u : 0x7bffu);
  mantissa |= 1ull << 52;
  int shift = e >= -14 ? 42 : 42 + (-14 - e);
  if (shift > 54) shift = 54;
  u64 kept = mantissa >> shift;
  u64 rest = mantissa & ((1ull << shift) - 1), half = 1ull << (shift - 1);
  if (mode == 0 && (rest > half || (rest == half && (kept & 1)))) ++kept;
  u32 out = e >= -14 ? static_cast<u32>(((e + 14) << 10) + kept) : static_cast<u32>(kept);
  if (out >= 0x7c00u) out = mode == 0 ? 0x7c00u : 0x7bffu;
  return sign | static_cast<u16>(out);
}
inline u16 f16_of(float x) { return f16_from_double(static_cast<double>(x)); }
inline float of_f16(u32 h) {
  u32 sign = (h & 0x8000u) << 16, e = (h >> 10) & 31, m = h & 0x3ffu;
  if (e == 31) return f32_of(sign | 0x7f800000u | (m << 13));
  if (e) return f32_of(sign | ((e + 112) << 23) | (m << 13));
  float magnitude = static_cast<float>(m) * 0x1p-24f;
  return f32_of(sign | u32_of(magnitude));
}
// a*b + c of float32 values as a double that rounds once more without harm: inexact sums get an odd
// last bit.
inline double fma_sticky(float a, float b, float c) {
  double p = static_cast<double>(a) * b, s = p + c;
  if (!std::isfinite(s)) return s;
  double t = s - p, error = (p - (s - t)) + (c - t);
  u64 raw = bits<u64>(s);
  if (error != 0 && !(raw & 1)) raw = (error > 0) == (s > 0) ? raw | 1 : raw - 1;
  return bits<double>(raw);
}
inline u16 fma_f16(float a, float b, float c) { return f16_from_double(fma_sticky(a, b, c)); }

// A small float: sign, E exponent bits, M mantissa bits. `top` is the largest finite code.
struct Narrow {
  int ebits, mbits, bias;
  u32 top;   // code of the largest finite magnitude
  bool inf;  // all-ones exponent, zero mantissa is Inf (E5M2)
  bool nan;  // has NaN: E4M3 only code 0x7f, E5M2 0x7d..0x7f
  int width() const { return 1 + ebits + mbits; }
};
constexpr Narrow kFp8{4, 3, 7, 0x7e, false, true};   // OCP E4M3
constexpr Narrow kBf8{5, 2, 15, 0x7b, true, true};   // OCP E5M2
constexpr Narrow kFp6{2, 3, 1, 0x1f, false, false};  // E2M3
constexpr Narrow kBf6{3, 2, 3, 0x1f, false, false};  // E3M2
constexpr Narrow kFp4{2, 1, 1, 0x7, false, false};   // E2M1

inline double widen(const Narrow& f, u32 code) {
  u32 magnitude = code & ((1u << (f.width() - 1)) - 1);
  double sign = (code >> (f.width() - 1)) & 1 ? -1.0 : 1.0;
  u32 e = magnitude >> f.mbits, m = magnitude & ((1u << f.mbits) - 1);
  if (f.nan && magnitude > f.top) return f.inf && m == 0 ? sign * HUGE_VAL : std::nan("");
  double value = e ? std::ldexp(1.0 + std::ldexp(double(m), -f.mbits), int(e) - f.bias)
                   : std::ldexp(double(m), 1 - f.bias - f.mbits);
  return sign * value;
}

enum class Overflow { saturate, special };  // special: Inf for E5M2, NaN for E4M3

// Rounds to nearest even. `discard` >= 0 instead adds those random bits (32, left aligned) to the
// discarded part. ASSUMED: NaN gives the format's NaN, or code 0 where there is none; Inf saturates
// where there is no Inf.
inline u32 narrow(const Narrow& f, double x, Overflow overflow, i64 discard = -1) {
  u64 b = bits<u64>(x);
  u32 sign = static_cast<u32>(b >> 63) << (f.width() - 1);
  if (std::isnan(x)) return f.nan ? sign | (f.inf ? 0x7fu : 0x7fu) : 0u;
  double a = std::fabs(x);
  if (a == 0) return sign;
  u32 beyond = overflow == Overflow::saturate ? f.top : (f.inf ? 0x7cu : 0x7fu);
  if (!f.nan) beyond = f.top;
  if (std::isinf(a)) return sign | (overflow == Overflow::saturate ? f.top : beyond);
  int e;
  std::frexp(a, &e);  // a = m * 2^e with m in [0.5, 1)
  int unit = (e - 1 < 1 - f.bias ? 1 - f.bias : e - 1) - f.mbits;
  double scaled = std::ldexp(a, -unit), kept = std::floor(scaled), rest = scaled - kept;
  if (discard >= 0) {
    if (rest + std::ldexp(double(discard), -32) >= 1.0) kept += 1;
  } else if (rest > 0.5 || (rest == 0.5 && std::fmod(kept, 2.0) != 0)) {
    kept += 1;
  }
  // kept counts units; a carry into the next binade is the ordinary increment of the code.
  int field = unit + f.mbits + f.bias;  // biased exponent of the binade, 1 for subnormals as well
  double code = std::ldexp(double(field - 1), f.mbits) + kept;
  if (code > f.top) return sign | beyond;
  return sign | static_cast<u32>(code);
}

}  // namespace emu
