// SPDX-License-Identifier: MIT
// Source and destination access of vector instructions: modifiers, DPP, SDWA, EXEC. Handlers are
// lambdas over lanes.
#pragma once
#include "machine.h"

namespace emu {

struct alignas(64) Lanes {
  u32 x[kLanes];
};

inline void splat(u32* out, u32 value) {
  for (int i = 0; i < kLanes; ++i) out[i] = value;
}

// The lane that DPP lane i reads, or -1.
int dpp_source(int ctrl, int i);
void dpp_fetch(Wave& w, const Inst& in, const u32* from, u32* to);
u32 sdwa_select(u32 x, u32 sel, bool sext);

// f32_bits: float32 with sign modifiers that MODE.denorm does not act on.
enum class Type { u32, f32, f32_bits, f16 };

template <Type T>
inline u32 sign_modify(u32 x, bool neg, bool abs) {
  constexpr u32 sign = T == Type::f16 ? 0x8000u : 0x80000000u;
  if (abs) x &= ~sign;
  if (neg) x ^= sign;
  return x;
}

// 32 bits of source i for every lane; points into the register file when nothing modifies it.
// Inline float constants of 16-bit operations are half precision.
template <Type T>
inline const u32* source(Wave& w, const Inst& in, int i, Lanes& buffer) {
  int code = in.src[i].code;
  const u32* p;
  if (code >= kVgpr) {
    p = w.vgpr(code);
  } else {
    u32 x = scalar32(w, in, code);
    if (T == Type::f16 && code >= 240 && code <= 248) x = f16_of(inline_float(code));
    splat(buffer.x, x);
    p = buffer.x;
  }
  if (in.modified && i < 2) {
    if (in.dpp >= 0 && i == 0) {
      Lanes moved;
      dpp_fetch(w, in, p, moved.x);
      buffer = moved;
      p = buffer.x;
    }
    u32 sel = i == 0 ? in.sel0 : in.sel1;
    if (in.sdwa && sel != 6) {
      bool sext = (in.sext >> i) & 1;
      for (int l = 0; l < kLanes; ++l) buffer.x[l] = sdwa_select(p[l], sel, sext);
      p = buffer.x;
    }
  }
  if (T == Type::f16 && !in.sdwa && ((in.opsel >> i) & 1)) {
    for (int l = 0; l < kLanes; ++l) buffer.x[l] = p[l] >> 16;
    p = buffer.x;
  }
  bool neg = (in.neg >> i) & 1, abs = (in.abs >> i) & 1;
  if (neg || abs) {
    if (T == Type::u32) throw Fault("unimplemented", "sign modifier on an integer operand");
    for (int l = 0; l < kLanes; ++l) buffer.x[l] = sign_modify<T>(p[l], neg, abs);
    p = buffer.x;
  }
  if (T == Type::f32 && w.flush_sources) {
    for (int l = 0; l < kLanes; ++l) buffer.x[l] = flush(p[l]);
    p = buffer.x;
  }
  return p;
}
inline void flush_results(const Wave& w, u32* out) {
  if (w.flush_results)
    for (int l = 0; l < kLanes; ++l) out[l] = flush(out[l]);
}

inline u64 write_lanes(const Wave& w, const Inst& in) {
  u64 lanes = w.exec();
  if (in.dpp >= 0) {
    if (!in.bound_ctrl) lanes &= w.dpp_valid;
    for (int i = 0; i < kLanes; ++i)
      if (!((in.row_mask >> (i / 16)) & 1) || !((in.bank_mask >> (i % 16 / 4)) & 1))
        lanes &= ~(1ull << i);
  }
  return lanes;
}

inline void store_masked(Wave& w, u32* d, const u32* out, u64 lanes) {
  if (lanes == kAllLanes) {
    std::memcpy(d, out, sizeof(Lanes));
    return;
  }
  const u32* m = w.exec_mask(lanes);
  for (int i = 0; i < kLanes; ++i) d[i] = (d[i] & ~m[i]) | (out[i] & m[i]);
}

void sdwa_place(const Inst& in, const u32* old, u32* out);

template <Type T>
inline void modify_result(const Inst& in, u32* out) {
  for (int i = 0; i < kLanes; ++i) {
    float x = T == Type::f16 ? of_f16(out[i] & 0xffff) : f32_of(out[i]);
    if (in.omod == 1) x *= 2;
    if (in.omod == 2) x *= 4;
    if (in.omod == 3) x *= 0.5f;
    if (in.clamp) x = x > 0 ? (x > 1 ? 1.f : x) : 0.f;  // NaN becomes 0 (DX10_CLAMP)
    out[i] = T == Type::f16 ? f16_of(x) : u32_of(x);
  }
}

// Clamp, output multiplier and flush of float results.
template <Type T>
inline void finish(const Wave& w, const Inst& in, u32* out) {
  if (in.clamp || in.omod) modify_result<T>(in, out);
  if (T == Type::f32) flush_results(w, out);
}

// Writes 32 bits per lane to the destination. 16-bit results: opsel[3] picks the half and keeps the
// other; without it the upper half is zero (GFX9 keeps no old bits for the low half, see README).
inline void store32(Wave& w, const Inst& in, u32* out) {
  u32* d = w.vgpr(in.dst.code);
  if (in.modified) {
    if (in.sdwa && in.dst_sel != 6) sdwa_place(in, d, out);
    store_masked(w, d, out, write_lanes(w, in));
    return;
  }
  store_masked(w, d, out, w.exec());
}

template <Type S, Type D, int N, class F>
inline void map(Wave& w, const Inst& in, F f) {
  Lanes b0, b1, b2, out;
  const u32* a = source<S>(w, in, 0, b0);
  const u32* b = N > 1 ? source<S>(w, in, 1, b1) : a;
  const u32* c = N > 2 ? source<S>(w, in, 2, b2) : a;
  for (int i = 0; i < kLanes; ++i) {
    if constexpr (N == 1) out.x[i] = f(a[i]);
    if constexpr (N == 2) out.x[i] = f(a[i], b[i]);
    if constexpr (N == 3) out.x[i] = f(a[i], b[i], c[i]);
  }
  if constexpr (D != Type::u32) {
    finish<D>(w, in, out.x);
  } else if (in.clamp) {
    throw Fault("unimplemented", "integer clamp");
  }
  if (D == Type::f16) {
    if (!in.sdwa && (in.opsel & 8)) {
      const u32* d = w.vgpr(in.dst.code);
      for (int i = 0; i < kLanes; ++i) out.x[i] = (d[i] & 0xffffu) | (out.x[i] << 16);
    }
  }
  store32(w, in, out.x);
}

// 64-bit sources: a pair of registers, an SGPR pair, an inline constant.
struct alignas(64) Wide {
  u64 x[kLanes];
};
template <bool Float>
inline void source64(Wave& w, const Inst& in, int i, Wide& out) {
  int code = in.src[i].code;
  if (in.modified) throw Fault("unimplemented", "DPP or SDWA on a 64-bit operand");
  if (code >= kVgpr) {
    const u32 *lo = w.vgpr(code), *hi = w.vgpr(code + 1);
    for (int l = 0; l < kLanes; ++l) out.x[l] = lo[l] | (u64(hi[l]) << 32);
  } else {
    u64 x = scalar64(w, in, code, Float);
    for (int l = 0; l < kLanes; ++l) out.x[l] = x;
  }
  bool neg = (in.neg >> i) & 1, abs = (in.abs >> i) & 1;
  if (neg || abs) {
    if (!Float) throw Fault("unimplemented", "sign modifier on an integer operand");
    for (int l = 0; l < kLanes; ++l) {
      if (abs) out.x[l] &= ~(1ull << 63);
      if (neg) out.x[l] ^= 1ull << 63;
    }
  }
}
inline void store64(Wave& w, const Inst& in, const Wide& out) {
  Lanes lo, hi;
  for (int l = 0; l < kLanes; ++l) {
    lo.x[l] = u32(out.x[l]);
    hi.x[l] = u32(out.x[l] >> 32);
  }
  store_masked(w, w.vgpr(in.dst.code), lo.x, w.exec());
  store_masked(w, w.vgpr(in.dst.code + 1), hi.x, w.exec());
}

// A lane mask result (compares, carries): inactive lanes get 0.
inline void store_lane_mask(Wave& w, int code, u64 value) { w.set_pair(code, value & w.exec()); }

}  // namespace emu
